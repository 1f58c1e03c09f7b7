"""The mega_moe operator: schema, arguments, fake, gradient and activations.

In: nothing. Out: importing this room registers `torch.ops.moefuse.mega_moe`, its overloads `ep` for several ranks,
`quant` for quantised experts and `quant_ep` for both, and `mega_moe_backward`.
"""

import moefuse.ops.ep_context
import moefuse.ops.expert_parallel
import moefuse.ops.mega_moe
import moefuse.ops.mega_moe_quant  # noqa: F401  (registers the operators)
