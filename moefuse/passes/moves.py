"""May all that a layer does be done where its output is?

In: a site. Out: the check and the reason why not; None where it may. One node stands at the layer's end: what happens
on the way there to its tensors, or between streams, would happen before it instead.
"""

from moefuse.passes.streams import crossing
from moefuse.passes.writes import written
from moefuse.patterns.site import Site


def obstacle(site: Site) -> tuple[str, str] | None:
    """(check, reason); see the module text."""
    if (switch := crossing(site)) is not None:
        where = "stands between the first GEMM and the output: the layer isn't on one stream"
        return "streams", f"`{switch.name}` {where}"
    if (write := written(site)) is not None:
        return "in_place", f"`{write.name}` writes in place to what the layer reads, before the layer's end"
    return None
