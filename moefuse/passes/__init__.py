"""The passes, one per file, and the pipeline that runs them: canonicalize, lift, plan_comm, fuse, verify.

In: a functional ATen graph. Out: the graph with a node for each layer, and a verdict each. Other people's compilers get
them as `as_inductor_pass` and `as_torchair_pass`.
"""

from typing import Any


def as_inductor_pass(**options: Any) -> Any:
    """A pass for Inductor's `pre_grad_custom_pass`: `torch.compile(model, options={"pre_grad_custom_pass": ...})`.

    options: as for the backend, of which mode, target, exclude, dump and meta_device have a meaning here. Raises
    OptionError for others. The result is a `torch._inductor.custom_graph_pass.CustomGraphPass`.
    """
    from moefuse.passes.inductor import InductorPass  # imports Inductor, which takes seconds

    return InductorPass(options)


def as_torchair_pass(**options: Any) -> Any:
    """A pass for torchair's `config.post_grad_custom_pre_pass` and for npugraph_ex's option of that name.

    options: as for the backend, of which mode, target, exclude, dump and meta_device have a meaning here. Raises
    OptionError for others. The result, a `moefuse.passes.torchair.TorchairPass`, is called with a graph module,
    its example inputs and the compiler's configuration, and rewrites the graph in place.
    """
    from moefuse.passes.torchair import TorchairPass

    return TorchairPass(options)
