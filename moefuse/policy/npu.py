"""May this layer become one aclnnMegaMoe, or dispatch_ffn_combine, on an Ascend machine?

In: a `MoeSpec` and the `Conditions` of the machine and the engine, together an `NpuLayer`. Out: a `Verdict`. All of it
is equal on every rank and for every batch: the type has no field for what only one rank knows (its token count, its
addresses), so no verdict can depend on it. What the operator accepts is data: `npu_limits.toml`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moefuse.ops.quantised import BLOCKS
from moefuse.ops.spec import MoeSpec
from moefuse.policy.check import Check, Verdict, extended, judge
from moefuse.policy.npu_buffer import MIB, Traffic, combine_bytes, required_bytes
from moefuse.policy.npu_limits import (
    COMBINE,
    Limits,
    Scheme,
    family_of,
    limits,
    operator_of,
    rows,
    schemes,
)

Mode = Literal["off", "auto", "on"]


class NotAllowedError(RuntimeError):
    """A layer that may not become an aclnnMegaMoe where falling back isn't possible or not wanted."""


@dataclass(frozen=True)
class Conditions:
    """What the layer runs in. Every value must be the same on all ranks of the expert-parallel group.

    soc: the device's name, as it reports it. revision: of the installed operator (R0, R1, ..., or
        "dispatch_ffn_combine"), "" if unidentified.
    scheme: how the weights are quantised (none, w8a8, w4a8, mxfp8, ...); weight_format: ND or FRACTAL_NZ.
    num_max_tokens_per_rank: the true maximum of any rank's token count. max_recv_token_num: rows that a rank can
    receive, 0 for the worst case. hccl_buffer_bytes: HCCL_BUFFSIZE of the group, in bytes.
    tensor_parallel: the size of the group that shards each expert. lora, dynamic_eplb: in use on this layer.
    streams: how many streams the layer's nodes are spread over, shared experts and collectives beside it included.
    min_weight_bytes: a rank's share of weights below this isn't worth an operator of its own.
    copy_weights: weights that lie the wrong way round, or in another format, may be copied. A promise, too: a change of
        one that its version counter doesn't show (`weight.data.copy_`) is followed by `moefuse.targets.npu.refresh()`.
    """

    soc: str
    revision: str
    num_max_tokens_per_rank: int
    max_recv_token_num: int = 0
    hccl_buffer_bytes: int = 200 * MIB
    scheme: str = "none"
    weight_format: str = "ND"
    tensor_parallel: int = 1
    lora: bool = False
    dynamic_eplb: bool = False
    streams: int = 1
    min_weight_bytes: int = 0
    copy_weights: bool = False


@dataclass(frozen=True)
class NpuLayer(MoeSpec):
    """A layer and its conditions in one value: what the checks read."""

    conditions: Conditions = Conditions("", "", 1)

    @staticmethod
    def of(spec: MoeSpec, conditions: Conditions) -> "NpuLayer":
        """Join both."""
        return extended(NpuLayer, spec, conditions=conditions)

    @property
    def family(self) -> str:
        """A2, A3 or A5; "" for an unknown device."""
        return family_of(self.conditions.soc)

    @property
    def operator(self) -> str:
        """The operator that is asked for."""
        return operator_of(self.conditions.revision)

    @property
    def traffic(self) -> Traffic:
        """What the layer sends at most."""
        quantised = self.conditions.scheme != "none"
        tokens = self.conditions.num_max_tokens_per_rank
        return Traffic(self.ep_world_size, self.num_experts, self.top_k, self.hidden, tokens, quantised)


def decide_npu(spec: MoeSpec, conditions: Conditions) -> Verdict:
    """Judge a layer; the first failing check gives the reason.

    Limits are looked up, and their checks made, once the device and the operator's revision are known.
    """
    layer = NpuLayer.of(spec, conditions)
    known = judge(layer, IDENTITY)
    row = limits(conditions.revision, layer.family)
    if not known.ok or row is None:
        return known
    return judge(layer, (*IDENTITY, *checks_of_row(row)))


def resolve(mode: Mode, verdict: Verdict, *, collectives_started: bool = False) -> bool:
    """Fuse (True) or leave the layer as it is (False).

    auto falls back on a refusal, but only before the layer's first collective: afterwards the ranks would part.

    Raises:
        NotAllowedError: a refusal with mode="on", or after a collective has started.
        ValueError: an unknown mode.
    """
    if mode not in ("off", "auto", "on"):
        raise ValueError(f"mode: expected off, auto or on, got {mode!r}")
    if mode == "off":
        return False
    if verdict.ok:
        return True
    why = f"{verdict.check}: {verdict.reason}"
    if mode == "on":
        raise NotAllowedError(f'mode="on", and the layer may not become an aclnnMegaMoe: {why}')
    if collectives_started:
        raise NotAllowedError(f"too late to fall back, the layer's first collective has started: {why}")
    return False


# --- checks ----------------------------------------------------------------------------------------------


def _check(name: str, reads: tuple[str, ...], test: Any) -> Check:
    # every reason names the operator, which the conditions tell
    return Check(name, tuple(dict.fromkeys((*reads, "conditions"))), test, subject=NpuLayer)


def _soc(layer: NpuLayer) -> str:
    if layer.family:
        return ""
    return f"the device {layer.conditions.soc!r} is none of the known Ascend families"


def _revision(layer: NpuLayer) -> str:
    revision = layer.conditions.revision
    if not revision:
        return f"the revision of the installed {layer.operator} could not be identified: its argument list is not known"
    if limits(revision, layer.family) is not None:
        return ""
    known = sorted(
        {row.revision for row in rows() if layer.family in row.families and row.operator == layer.operator}
    )
    return f"the limits of {layer.operator} {revision} on {layer.family} are not known; known are {', '.join(known)}"


_TRAFFIC = ("ep_world_size", "num_experts", "top_k", "hidden")
_WEIGHT_BYTES = ("num_experts", "hidden", "intermediate", "out_features", "gate_up", "expert_dtype", "quant")
IDENTITY = (_check("soc", ("conditions",), _soc), _check("revision", ("conditions",), _revision))
"""What must be known before any limit can be looked up."""


def checks_of_row(row: Limits) -> tuple[Check, ...]:
    """The checks of one row of limits, in order."""
    within = functools.partial(_within, row)
    quantisation = functools.partial(_quantisation, row=row)
    return (
        within("ep_world_size", ("ep_world_size",), lambda s: s.ep_world_size),
        within("num_experts", ("num_experts",), lambda s: s.num_experts),
        _check("experts_divide", ("num_experts", "ep_world_size"), _experts_divide),
        within(
            "experts_per_rank",
            ("num_experts", "ep_world_size"),
            lambda s: s.num_experts // s.ep_world_size,
        ),
        within("top_k", ("top_k",), lambda s: s.top_k),
        within("hidden", ("hidden",), lambda s: s.hidden),
        within("intermediate", ("intermediate",), lambda s: s.intermediate),
        _check("out_features", ("hidden", "out_features"), _out_features),
        _check("activation", ("activation", "activation_params"), functools.partial(_activation, row=row)),
        _check("layout", ("gate_up", "weight_position"), _layout),
        _check("row_norm", ("row_norm",), _row_norm),
        _check("identity", ("num_identity_experts",), _identity),
        _check("scheme", ("conditions", "quant", "has_weight_offsets"), quantisation),
        _check("weight_dtype", ("expert_dtype", "conditions"), _weight_dtype),
        _check("weight_format", ("conditions", "ep_world_size", *_WEIGHT_BYTES), _weight_format),
        _check(
            "weight_layout",
            ("conditions", "transpose_weight1", "transpose_weight2", *_WEIGHT_BYTES),
            functools.partial(_weight_layout, transposed=row.transposed_weights),
        ),
        _check("weight_scales", ("weight_scale_groups", "quant"), _weight_scales),
        _check("bias", ("has_bias1", "has_bias2", "conditions"), _bias),
        _check("dtypes", ("x_dtype", "output_dtype", "router_dtype"), _dtypes),
        _check("ids", ("ids_checked",), _ids),
        _check("training", ("training",), _training),
        within("tokens_per_rank", ("conditions",), lambda s: s.conditions.num_max_tokens_per_rank),
        _check("capacity", ("conditions", *_TRAFFIC), _capacity),
        _check("buffer", ("conditions", *_TRAFFIC), _buffer),
        _check("tensor_parallel", ("conditions",), _tensor_parallel),
        _check("lora", ("conditions",), _lora),
        _check("eplb", ("conditions",), _eplb),
        _check("streams", ("conditions",), _streams),
        _check("worth_it", ("conditions", "ep_world_size", *_WEIGHT_BYTES), _worth_it),
    )


def _within(row: Limits, name: str, reads: tuple[str, ...], value: Callable[[NpuLayer], int]) -> Check:
    """The check that a size of the layer is among those that the row has under this name."""
    limit = getattr(row, name)

    def test(layer: NpuLayer) -> str:
        got = value(layer)
        return "" if got in limit else f"{name.replace('_', ' ')} {got}: {layer.operator} takes {limit}"

    return _check(name, reads, test)


def _activation(layer: NpuLayer, *, row: Limits) -> str:
    if layer.activation_params and not row.clamps:
        numbers = ", ".join(f"{number:g}" for number in layer.activation_params)
        return f"activation {layer.activation} with {numbers}: {layer.operator} takes none of its numbers"
    if layer.activation in row.activations:
        return ""
    return f"activation {layer.activation}: {row.title} takes {', '.join(row.activations)}"


def _quantisation(layer: NpuLayer, *, row: Limits) -> str:
    if layer.quant not in ("none", layer.conditions.scheme):
        return f"the experts are quantised as {layer.quant}, the conditions say {layer.conditions.scheme}"
    if layer.has_weight_offsets:
        return f"the experts' weights have offsets; {layer.operator} takes scales alone"
    if layer.conditions.scheme in row.schemes:
        return ""
    return f"quantisation {layer.conditions.scheme}: {layer.operator} takes {', '.join(row.schemes)} here"


def _scheme(layer: NpuLayer) -> Scheme | None:
    return schemes().get(layer.conditions.scheme)


def _experts_divide(layer: NpuLayer) -> str:
    if layer.num_experts % layer.ep_world_size == 0:
        return ""
    return f"{layer.num_experts} experts can't be spread evenly over {layer.ep_world_size} ranks"


def _out_features(layer: NpuLayer) -> str:
    if layer.out_features == layer.hidden:
        return ""
    return f"the experts turn {layer.hidden} features into {layer.out_features}; {layer.operator} keeps their number"


def _layout(layer: NpuLayer) -> str:
    if layer.gate_up != "concat":
        return f"gate_up={layer.gate_up!r}: {layer.operator} reads the gate in the first half of the first weight"
    if layer.weight_position != "output":
        return (
            f"the routing weight multiplies at the {layer.weight_position}, {layer.operator}'s at the output"
        )
    return ""


def _row_norm(layer: NpuLayer) -> str:
    return (
        ""
        if layer.row_norm == "none"
        else f"the experts' rows are normalised; {layer.operator} doesn't do that"
    )


def _identity(layer: NpuLayer) -> str:
    count = layer.num_identity_experts
    return f"{count} identity experts: every expert of {layer.operator} has weights" if count else ""


def _weight_dtype(layer: NpuLayer) -> str:
    scheme, dtype = _scheme(layer), str(layer.expert_dtype).removeprefix("torch.")
    if scheme is None or dtype in scheme.weight_dtypes:
        return ""
    wanted = " or ".join(scheme.weight_dtypes)
    return f"weights are {dtype}; quantisation {layer.conditions.scheme} takes {wanted}"


def _weight_format(layer: NpuLayer) -> str:
    scheme = _scheme(layer)
    lies = layer.conditions.weight_format
    if scheme is None or lies == scheme.weight_format or layer.conditions.copy_weights:
        return ""
    return (
        f"weights lie in {lies} format; {layer.operator} takes {scheme.weight_format} here: cast them, or allow copies "
        f"of up to {_copied(layer)} MB per rank (copy_weights)"
    )


def _weight_scales(layer: NpuLayer) -> str:
    if layer.quant in BLOCKS or layer.weight_scale_groups == (1, 1):
        return ""
    groups = " and ".join(map(str, layer.weight_scale_groups))
    return f"the weights have scales for {groups} groups of inputs; {layer.operator} takes one per output channel"


def _weight_layout(layer: NpuLayer, *, transposed: bool) -> str:
    wrong = layer.transpose_weight1 is not transposed or layer.transpose_weight2 is not transposed
    if not wrong or layer.conditions.copy_weights:
        return ""
    wanted = "[E, N, K]" if transposed else "[E, K, N]"
    return (
        f"{layer.operator} reads weights as {wanted} and they lie the other way round: store them so, or allow copies "
        f"of up to {_copied(layer)} MB per rank (copy_weights)"
    )


def _copied(layer: NpuLayer) -> int:
    """MB of a rank's weights, if all of them are copied."""
    return -(-layer.weight_bytes // layer.ep_world_size // MIB)


def _bias(layer: NpuLayer) -> str:
    scheme = _scheme(layer)
    if scheme is None or layer.has_bias1 == layer.has_bias2 == scheme.biases:
        return ""
    wanted = "a bias on both GEMMs" if scheme.biases else "no bias"
    return f"quantisation {layer.conditions.scheme} takes {wanted}"


def _dtypes(layer: NpuLayer) -> str:
    if layer.x_dtype != torch.bfloat16 or layer.output_dtype != torch.bfloat16:
        return f"x is {layer.x_dtype} and the output {layer.output_dtype}; {layer.operator} takes bfloat16"
    if layer.router_dtype not in (torch.float32, torch.bfloat16):
        return f"the routing weights are {layer.router_dtype}; {layer.operator} takes float32 or bfloat16"
    return ""


def _ids(layer: NpuLayer) -> str:
    if layer.ids_checked:
        return ""
    return f"the ids are not known to lie in 0..num_experts-1; {layer.operator} doesn't define what others do"


def _training(layer: NpuLayer) -> str:
    return f"{layer.operator} has no gradient" if layer.training else ""


def _capacity(layer: NpuLayer) -> str:
    given, worst = layer.conditions.max_recv_token_num, layer.traffic.worst_receive
    if given == 0 or given >= worst:
        return ""
    return f"max_recv_token_num={given} would drop tokens: a rank may receive {worst} rows"


def _buffer(layer: NpuLayer) -> str:
    have = layer.conditions.hccl_buffer_bytes
    if layer.operator == COMBINE:
        need = combine_bytes(layer.traffic)
    else:
        need = required_bytes(layer.family, layer.traffic, layer.conditions.max_recv_token_num)
    if have >= need:
        return ""
    return f"HCCL_BUFFSIZE gives {have // MIB} MB of communication buffer, the layer needs {-(-need // MIB)}"


def _tensor_parallel(layer: NpuLayer) -> str:
    size = layer.conditions.tensor_parallel
    return (
        "" if size == 1 else f"each expert is sharded over {size} ranks; {layer.operator} takes whole experts"
    )


def _lora(layer: NpuLayer) -> str:
    return f"LoRA adapters on the experts have no place in {layer.operator}" if layer.conditions.lora else ""


def _eplb(layer: NpuLayer) -> str:
    if not layer.conditions.dynamic_eplb:
        return ""
    return "experts move between ranks while serving (EPLB): weight addresses and ids don't stay"


def _streams(layer: NpuLayer) -> str:
    count = layer.conditions.streams
    if count == 1:
        return ""
    return f"the layer runs on {count} streams: collectives beside {layer.operator} deadlock across ranks"


def _worth_it(layer: NpuLayer) -> str:
    scheme, least = _scheme(layer), layer.conditions.min_weight_bytes
    packed = scheme.values_per_element if scheme and layer.quant == "none" else 1
    share = layer.weight_bytes // layer.ep_world_size // packed
    return "" if share >= least else f"a rank's {share} bytes of weights are below min_weight_bytes={least}"
