"""The zoo: every MoE architecture of the installed transformers, and styles of plain torch, through moefuse.

`scan` finds the architectures, `rows` builds tiny models of them, `cell` measures one of them under one setting,
`sweep` runs many cells in processes of their own, `render` makes pages of the results. Needs transformers.
"""
