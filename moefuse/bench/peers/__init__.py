"""Other people's MoE kernels as contestants: one file per package, nothing of them is imported before it is asked for.

In: a `Layer`. Out: a function (x, topk_ids, topk_weights) -> y. Each packs the weights for itself, before the clock
starts. `absent()` of a file says why its package can't run on this machine, `limit(layer, tokens)` what it doesn't do.
"""
