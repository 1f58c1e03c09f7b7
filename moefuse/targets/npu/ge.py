"""mega_moe.ep and quant_ep in GE's graphs: torchair's "max-autotune" and `dynamo_export`.

In: a node with target="npu" while torchair converts a graph. Out: one GE operator MegaMoe, with what its inputs need
around it (casts, and added rows where the device wants as many on every rank). The vendor's own converter for this
operator raises at the revision that was seen, so moefuse has its own. Weights must lie as [E, K, N]: GE would transpose
them at every step.
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from moefuse.ops.ep_context import provided
from moefuse.ops.options import Options
from moefuse.ops.quantised import BLOCKS
from moefuse.policy.npu_limits import family_of
from moefuse.targets.npu.abi import OUTPUTS, Kind
from moefuse.targets.npu.arguments import numbers, rows_of
from moefuse.targets.npu.context import Asked, NpuContext, only_one
from moefuse.targets.npu.machine import Machine
from moefuse.targets.npu.plan import Plan, PlanError

_LOADED = "torchair._ge_concrete_graph.fx2ge_converter"
_registered: list[bool] = []


def register() -> bool:
    """Make torchair know the node, where torchair is loaded; False where it isn't."""
    if _LOADED not in sys.modules:
        return False
    if not _registered:
        import torchair

        import moefuse.ops  # noqa: F401  registers the operator

        torchair.register_fx_node_ge_converter(torch.ops.moefuse.mega_moe.ep)(convert)
        torchair.register_fx_node_ge_converter(torch.ops.moefuse.mega_moe.quant_ep)(convert_quantised)
        torchair.register_fx_node_ge_converter(torch.ops.moefuse.ep_context.default)(convert_context)
        _registered.append(True)
    return True


def convert(
    context: Any,
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    weight1: list[Any],
    weight2: list[Any],
    bias1: list[Any],
    bias2: list[Any],
    row_scale: Any = None,
    *,
    target: str = "reference",
    meta_outputs: Any = None,
    **constants: Any,
) -> Any:
    """The converter: GE tensors in, GE tensors (y, expert_token_nums) out.

    Raises:
        PlanError: another target, or weights that GE would have to transpose.
        NpuContextError: not exactly one open context fits the layer.
    """
    return _converted(target, context, (x, topk_ids, topk_weights), weight1, weight2, Options(**constants))


def convert_quantised(
    context: Any,
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    weight1: list[Any],
    weight2: list[Any],
    bias1: list[Any],
    bias2: list[Any],
    weight_scales1: list[Any],
    weight_scales2: list[Any],
    weight_offsets1: list[Any],
    weight_offsets2: list[Any],
    *,
    quant: str,
    hidden_dtype: Any = None,
    rows_dtype: Any = None,
    target: str = "reference",
    meta_outputs: Any = None,
    **constants: Any,
) -> Any:
    """The same for quantised experts; scales that aren't encoded yet are encoded in the graph."""
    options = Options(**constants)
    if weight_offsets1 or weight_offsets2:
        raise PlanError("weight_offsets1: MegaMoe takes scales alone")
    if quant in BLOCKS:
        raise PlanError(f"quant: GE has a converter for integers alone, got {quant}")
    beside = {
        "weight_scales1": [_encoded(scale) for scale in _experts(weight_scales1, 1, options)],
        "weight_scales2": [_encoded(scale) for scale in _experts(weight_scales2, 1, options)],
        "bias1": [_widened(bias) for bias in _experts(bias1, 1, options)],
        "bias2": [_widened(bias) for bias in _experts(bias2, 1, options)],
    }
    own = (x, topk_ids, topk_weights)
    return _converted(target, context, own, weight1, weight2, options, quant, beside)


def _converted(
    target: str,
    context: Any,
    own: tuple[Any, Any, Any],
    weight1: list[Any],
    weight2: list[Any],
    options: Options,
    scheme: str = "none",
    beside: Mapping[str, list[Any]] = MappingProxyType({}),
) -> Any:
    """own: this rank's tokens, ids and routing weights. beside: further lists, by the operator's names."""
    if target != "npu":
        raise PlanError(f"target: GE runs layers over ranks with target='npu' only, got {target!r}")
    from moefuse import targets

    x, topk_ids, topk_weights = own
    machine: Machine = targets.get("npu").machine  # type: ignore[attr-defined]
    made = only_one(Asked.of(x.symsize[1], topk_ids.symsize[1], options, scheme))
    if made.hccl:
        raise PlanError(
            "target: the layer runs as dispatch_ffn_combine, which can't stand in a GE graph: vllm-ascend's operator "
            "DispatchFFNCombine infers no shape of its outputs; npugraph_ex and mode='reduce-overhead' capture it"
        )
    transposed = [name for name in ("transpose_weight1", "transpose_weight2") if getattr(options, name)]
    if transposed:
        raise PlanError(
            f"{transposed[0]}: expected weights that lie as [E, K, N] in a GE graph, got [E, N, K]"
        )
    tensors = _tensors(made, x, topk_ids, topk_weights, family_of(machine.soc))
    lists = {"weight1": _experts(weight1, 2, options), "weight2": _experts(weight2, 2, options)}
    lists |= {name: given for name, given in beside.items() if given}
    y, nums = _operator(machine.revision, {"context": context} | tensors, lists, numbers(made, options))
    if "x_active_mask" in tensors:
        from torchair._ge_concrete_graph import ge_apis as ge

        y = ge.Slice(y, [0, 0], ge.Shape(x))
    return y, nums


def convert_context(name: str, *, meta_outputs: Any = None) -> Any:
    """A context that the graph knows by name, as a constant: its addresses are this process's."""
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge import DataType

    context = provided(name).cpu()
    dtype = DataType.DT_INT32 if context.dtype == torch.int32 else DataType.DT_INT64
    return ge.Const(context.tolist(), dtype=dtype)


def _tensors(made: NpuContext, x: Any, ids: Any, weights: Any, family: str) -> dict[str, Any]:
    """The inputs with a token axis, in the operator's dtypes, filled up where they must be (as `arguments` does)."""
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge import DataType

    tokens = x.symsize[0]
    ids = ge.Cast(ids, dst_type=DataType.DT_INT32)
    weights = ge.Cast(weights, dst_type=DataType.DT_FLOAT)
    rows = rows_of(made, tokens, family)
    if isinstance(rows, torch.SymInt) or rows == tokens:
        return {"x": x, "topk_ids": ids, "topk_weights": weights}
    have = ge.Gather(ge.Shape(x), 0)
    more = ge.Reshape(ge.Pack([0, ge.Sub(rows, have), 0, 0], N=4, axis=0), [2, 2])
    filled = ge.Less(ge.Range(0, rows, 1), have)
    other = ge.Reshape(ge.Cast(ge.LogicalNot(filled), dst_type=DataType.DT_INT32), [rows, 1])
    chosen = ge.Mul(other, ge.Const(list(range(made.sizes.top_k)), dtype=DataType.DT_INT32))
    return {
        "x": ge.Pad(x, more),
        "topk_ids": ge.Add(ge.Pad(ids, more), chosen),
        "topk_weights": ge.Pad(weights, more),
        "x_active_mask": ge.Cast(filled, dst_type=DataType.DT_INT8),
    }


def _experts(tensors: list[Any], dims: int, options: Options) -> list[Any]:
    """One tensor of so many dimensions per expert; a stacked one is unpacked along its first axis."""
    from torchair._ge_concrete_graph import ge_apis as ge

    if not tensors or len(tensors[0].symsize) == dims:
        return list(tensors)
    unpacked = ge.Unpack(tensors[0], num=options.local_experts, axis=0)
    return list(unpacked) if isinstance(unpacked, list | tuple) else [unpacked]


def _encoded(scale: Any) -> Any:
    """A scale as the operator takes it: 64 bits without a sign, a float32's in the low word."""
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge import DataType

    if scale.dtype == DataType.DT_INT64:
        return ge.Bitcast(scale, type=DataType.DT_UINT64)
    bits = ge.Bitcast(ge.Cast(scale, dst_type=DataType.DT_FLOAT), type=DataType.DT_UINT32)
    return ge.Cast(bits, dst_type=DataType.DT_UINT64)


def _widened(bias: Any) -> Any:
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge import DataType

    return ge.Cast(bias, dst_type=DataType.DT_FLOAT)


def _operator(
    revision: str, tensors: dict[str, Any], lists: dict[str, list[Any]], given: dict[str, Any]
) -> Any:
    """The node. Arguments that nobody gave are left to the operator's own defaults, which aren't the C interface's."""
    from torchair._ge_concrete_graph.compat_ir import IrDef, ge_op
    from torchair.ge import attr

    plan = Plan(revision)
    values = plan.own(tensors | lists | given)
    kinds = {Kind.INT: attr.Int, Kind.TEXT: attr.Str, Kind.FLOAT: attr.Float, Kind.FLOATS: attr.ListFloat}
    ir, attributes = IrDef("MegaMoe"), {}
    for slot in plan.signature:
        if slot.name in OUTPUTS:
            ir = ir.output(slot.name, "")
        elif slot.kind is Kind.TENSORS:
            ir = ir.dynamic_input(slot.name, "")
        elif slot.kind is Kind.TENSOR:
            optional = slot.name in ("x_active_mask", "scales", "mask_buffer")
            ir = (ir.optional_input if optional else ir.input)(slot.name, "")
        elif slot.name in values:
            attributes[slot.name] = kinds[slot.kind](values[slot.name])
            ir = ir.required_attr(slot.name, kinds[slot.kind])
    inputs = {
        slot.name: values[slot.name]
        for slot in plan.signature
        if slot.name in values and slot.kind in (Kind.TENSOR, Kind.TENSORS)
    }
    return ge_op(op_type="MegaMoe", inputs=inputs, attrs=attributes, outputs=list(OUTPUTS), ir=ir)
