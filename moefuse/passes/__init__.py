"""The passes: canonicalize, lift, fuse (with emit), and the pipeline that runs them."""

from typing import Any


def as_inductor_pass(**options: Any) -> Any:
    """A pass for Inductor's `pre_grad_custom_pass`: `torch.compile(model, options={"pre_grad_custom_pass": ...})`.

    options: as for the backend, of which mode, target, exclude and meta_device have a meaning here. Raises OptionError
    for unknown ones. The result is a `torch._inductor.custom_graph_pass.CustomGraphPass`.
    """
    from moefuse.passes.inductor import InductorPass  # imports Inductor, which takes seconds

    return InductorPass(options)
