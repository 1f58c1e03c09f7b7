"""moefuse: a torch.compile backend that fuses every Mixture-of-Experts layer into one node.

m = torch.compile(model, backend="moefuse")       # no import of moefuse needed
print(moefuse.explain(model, *args))              # what happens to which layer, and why
result = moefuse.fuse(graph_module)               # the passes alone
"""

from moefuse._version import __version__
from moefuse.api import Fused, explain, fuse
from moefuse.graph.capture import CaptureError
from moefuse.onegraph import compile
from moefuse.options import OptionError, Options
from moefuse.passes.pipeline import RejectedError
from moefuse.passes.verify import VerifyError
from moefuse.report.journal import reports
from moefuse.report.model import GraphReport, LayerReport, Report

__all__ = [
    "CaptureError",
    "Fused",
    "GraphReport",
    "LayerReport",
    "OptionError",
    "Options",
    "RejectedError",
    "Report",
    "VerifyError",
    "__version__",
    "compile",
    "explain",
    "fuse",
    "reports",
]
