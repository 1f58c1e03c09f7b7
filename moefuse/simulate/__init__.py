"""What an expert-parallel layer costs on more ranks than this machine has.

In: a layer, its routing, a topology and measured costs. Out: time, bytes and launches of the fused node, of unfused
all-to-all and of all-gather, with a timeline.
"""

from moefuse.simulate.costs import Costs, load_costs
from moefuse.simulate.predict import WAYS, Prediction, predict
from moefuse.simulate.workload import Routing, Topology, Workload

__all__ = ["WAYS", "Costs", "Prediction", "Routing", "Topology", "Workload", "load_costs", "predict"]
