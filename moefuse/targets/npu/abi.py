"""The argument lists that aclnnMegaMoeGetWorkspaceSize has had, as data.

In: nothing. Out: `REVISIONS`, by name. The symbol never changed while its arguments did, so a library's revision is
found out from what is installed beside it (`identify.py`), never by calling. After the listed arguments every
revision takes `uint64_t *workspaceSize, aclOpExecutor **executor`; the second stage,
`aclnnMegaMoe(workspace, workspaceSize, executor, stream)`, never changed.
"""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a C argument is."""

    TENSOR = "aclTensor*"
    TENSORS = "aclTensorList*"
    INT = "int64_t"
    TEXT = "char*"
    FLOAT = "float"
    FLOATS = "aclFloatArray*"


@dataclass(frozen=True)
class Slot:
    """One argument: its name in snake case without the suffixes Optional and Out, and its kind."""

    name: str
    kind: Kind


Signature = tuple[Slot, ...]

OUTPUTS = ("y", "expert_token_nums")
REQUIRED = (
    *("context", "x", "topk_ids", "topk_weights", "weight1", "weight2"),
    *("moe_expert_num", "ep_world_size", "ccl_buffer_size", "num_max_tokens_per_rank", "activation"),
    *OUTPUTS,
)
"""Arguments that must be given wherever a revision has them. Other tensors and lists may be null."""

DEFAULTS: dict[str, int | str] = {
    "max_recv_token_num": 0,
    "dispatch_quant_mode": 0,
    "dispatch_quant_out_type": -1,
    "dispatch_quant_out_dtype": -1,
    "shared_expert_quant_out_dtype": -1,
    "combine_quant_mode": 0,
    "comm_alg": "",
    "global_bs": 0,
    "topo_type": 0,
    "rank_num_per_server": 2,
    "topk_weights_type": 0,
}
"""Numbers and texts that may be left out, with what then is passed."""


def _slots(text: str) -> Signature:
    kinds = {
        "T": Kind.TENSOR,
        "L": Kind.TENSORS,
        "I": Kind.INT,
        "S": Kind.TEXT,
        "F": Kind.FLOAT,
        "A": Kind.FLOATS,
    }
    return tuple(Slot(name, kinds[kind]) for kind, name in (word.split(":") for word in text.split()))


def _with(signature: Signature, after: str, text: str) -> Signature:
    at = [slot.name for slot in signature].index(after) + 1
    return (*signature[:at], *_slots(text), *signature[at:])


def _instead(signature: Signature, name: str, text: str) -> Signature:
    return tuple(new for slot in signature for new in (_slots(text) if slot.name == name else (slot,)))


_R0 = _slots(
    "T:context T:x T:topk_ids T:topk_weights L:weight1 L:weight2 L:weight_scales1 L:weight_scales2 T:x_active_mask"
    " T:scales I:moe_expert_num I:ep_world_size I:ccl_buffer_size I:max_recv_token_num I:dispatch_quant_mode"
    " I:dispatch_quant_out_type I:combine_quant_mode S:comm_alg I:global_bs T:y T:expert_token_nums"
)
_R1 = _slots(
    "T:context T:x T:topk_ids T:topk_weights L:weight1 L:weight2 L:weight_scales1 L:weight_scales2 L:bias1 L:bias2"
    " T:x_active_mask I:moe_expert_num I:ep_world_size I:ccl_buffer_size I:max_recv_token_num I:dispatch_quant_mode"
    " I:dispatch_quant_out_dtype I:combine_quant_mode S:comm_alg I:num_max_tokens_per_rank S:activation"
    " F:activation_clamp T:y T:expert_token_nums"
)
_R2 = _with(_R1, "activation_clamp", "I:topo_type")
_R3 = _with(_R2, "topo_type", "I:rank_num_per_server")
_R4 = _with(
    _R3,
    "x_active_mask",
    "L:shared_weight1 L:shared_weight2 L:shared_weight_scales1 L:shared_weight_scales2 L:shared_bias1 L:shared_bias2",
)
_R5 = _with(_R4, "rank_num_per_server", "I:topk_weights_type")
_R6 = _instead(_R5, "activation_clamp", "A:activation_params")
_R7 = _with(_R6, "shared_bias2", "T:mask_buffer")
_R8 = _with(
    _with(_R7, "x_active_mask", "T:scales"), "dispatch_quant_out_dtype", "I:shared_expert_quant_out_dtype"
)

REVISIONS: dict[str, Signature] = {
    f"R{number}": signature for number, signature in enumerate((_R0, _R1, _R2, _R3, _R4, _R5, _R6, _R7, _R8))
}
