"""The passes: canonicalize, lift, fuse (with emit), and the pipeline that runs them."""
