"""The mega_moe operator: schema, arguments, fake, gradient and activations.

In: nothing. Out: importing this room registers `torch.ops.moefuse.mega_moe`, its overload `ep` for several ranks, and
`mega_moe_backward`.
"""

import moefuse.ops.ep_context
import moefuse.ops.expert_parallel
import moefuse.ops.mega_moe  # noqa: F401  (registers the operators)
