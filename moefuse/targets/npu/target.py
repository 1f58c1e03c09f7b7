"""The npu target: a layer whose experts are spread over ranks of NPUs is one call of aclnnMegaMoe.

In: a spec to judge, or a mega_moe.ep or quant_ep call. Out: a verdict, or the layer's result. The operator exchanges
the rows between the ranks itself, so this target communicates by itself too; it has nothing for layers of a single
rank, which aclnnMegaMoe doesn't take.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefuse.comm import Capacity
from moefuse.ops.mx import BLOCK
from moefuse.ops.operands import Operands
from moefuse.ops.options import PACKED, Options
from moefuse.ops.quantised import BLOCKS, Quantisation
from moefuse.ops.spec import MoeSpec
from moefuse.policy import Verdict
from moefuse.policy.npu import Conditions, NotAllowedError, decide_npu
from moefuse.policy.npu_limits import COMBINE, family_of, schemes
from moefuse.targets.base import Opened, Target
from moefuse.targets.npu import formats
from moefuse.targets.npu.arguments import arguments
from moefuse.targets.npu.calls import Call, CCall, OfficialCall
from moefuse.targets.npu.combine import CombineCall
from moefuse.targets.npu.context import NpuContext, Sizes, combine_context_for, npu_context_for, resolve
from moefuse.targets.npu.library import InstallError
from moefuse.targets.npu.machine import Machine, hccl_buffer_bytes, machine

ENGINE = (
    "tensor_parallel",
    "lora",
    "dynamic_eplb",
    "streams",
    "min_weight_bytes",
    "copy_weights",
    "weights_cast",
)
"""What no graph shows: the facts of `NpuTarget.tell`."""
_ENCODED, _BIAS = 8, 4
"""Bytes of a scale and of a bias, as the operator takes them."""


class NpuTarget(Target):
    """See the module text.

    find: what this machine offers, asked when it is needed. stream: the current stream's handle, for the C interface.
    """

    name = "npu"
    communicates = True

    def __init__(
        self,
        find: Callable[[], Machine] = machine,
        stream: Callable[[torch.device], int] | None = None,
    ) -> None:
        self._find, self._stream = find, stream or _current_stream
        self._judged: dict[Any, Verdict] = {}
        self._engine: dict[str, Any] = {}
        self._cast = False

    def tell(self, **facts: Any) -> None:
        """What the engine around the graph knows, equal on all ranks; see `Conditions`.

        facts: of `ENGINE`; those that aren't given are as by default. weights_cast: quantised experts lie in the memory
        format that the operator takes of them before a model is compiled. Raises ValueError for others.
        """
        unknown = [name for name in facts if name not in ENGINE]
        if unknown:
            raise ValueError(f"{unknown[0]}: expected one of {', '.join(ENGINE)}")
        self._engine = dict(facts)
        self._cast = bool(self._engine.pop("weights_cast", False))
        self._judged.clear()

    @property
    def machine(self) -> Machine:
        """What was found. Raises InstallError."""
        return self._find()

    def supported(self) -> Verdict:
        """Is there a device, and an operator whose revision is known?"""
        try:
            self._find()
        except InstallError as error:
            return Verdict.refuse("install", str(error))
        return Verdict(True)

    def supports(self, spec: MoeSpec, max_tokens: int = 1) -> Verdict:
        """May this layer become one aclnnMegaMoe here? The same function judges it again when its context is known."""
        if not self.supported().ok:
            return self.supported()
        lies = self._told(spec)
        verdict = decide_npu(spec, self._conditions(spec, max_tokens, 0, lies))
        if verdict.ok or self._find().combine is None:
            return verdict
        other = decide_npu(spec, self._conditions(spec, max_tokens, 0, lies, COMBINE))
        if not other.ok and self._find().revision:
            return replace(verdict, reason=f"{verdict.reason}; {COMBINE}: {other.reason}")
        return other

    def copied_bytes(self, spec: MoeSpec) -> int:
        """Of weights that lie the other way round or in another format, and of scales; where copies are allowed."""
        scheme = schemes().get(spec.quant)
        if scheme is None or not self._engine.get("copy_weights"):
            return 0
        cast = scheme.weight_format != "ND" and not self._cast
        blocks = spec.quant in BLOCKS  # the device that takes these reads weights the other way round
        first = spec.weight1_rows * spec.hidden if cast or spec.transpose_weight1 is not blocks else 0
        second = spec.intermediate * spec.out_features if cast or spec.transpose_weight2 is not blocks else 0
        weights = (first + second) * spec.expert_dtype.itemsize // spec.values_per_element
        channels = 0 if spec.quant == "none" else spec.weight1_rows + spec.out_features
        beside = channels * (_ENCODED + (_BIAS if scheme.biases else 0))
        per_expert = weights + ((first + second) // BLOCK if blocks else beside)
        return spec.num_experts // spec.ep_world_size * per_expert

    def open_context(self, group: Any, capacity: Capacity, spec: MoeSpec) -> Opened:
        """See `npu_context_for`."""
        sizes = Sizes(
            capacity.ep_world_size,
            capacity.num_experts,
            capacity.top_k,
            capacity.hidden,
            capacity.max_tokens_per_rank,
            scheme=spec.quant,
        )
        mega = decide_npu(spec, self._conditions(spec, capacity.max_tokens_per_rank, 0, self._told(spec)))
        if not mega.ok and self._find().combine is not None:
            made = combine_context_for(group, sizes)
            return Opened(made.tensor, COMBINE, hccl_buffer_bytes())
        made = npu_context_for(group, sizes, intermediate=spec.intermediate)
        return Opened(made.tensor, "aclnnMegaMoe", made.ccl_buffer_size)

    def run(self, context: Tensor | None, operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
        """One call.

        Raises:
            NpuContextError: no context, or a call that isn't what it was made for.
            NotAllowedError: a layer that the operator doesn't take.
            PlanError, CallError: see `targets/npu/calls.py`.
        """
        return self._run(context, operands, options, None)

    def run_quantised(
        self, context: Tensor | None, operands: Operands, options: Options, quantisation: Quantisation
    ) -> tuple[Tensor, Tensor]:
        """One call with quantised experts; raises as `run` does, and PreparationError."""
        return self._run(context, operands, options, quantisation)

    def _run(
        self,
        context: Tensor | None,
        operands: Operands,
        options: Options,
        quantisation: Quantisation | None,
    ) -> tuple[Tensor, Tensor]:
        if context is None:
            raise NotAllowedError(
                "mega_moe on one rank: aclnnMegaMoe takes experts that are spread over ranks (mega_moe.ep)"
            )
        scheme = "none" if quantisation is None else quantisation.quant
        made = resolve(context, operands, options, scheme)
        verdict = self._judge(made, operands, options, quantisation)
        if not verdict.ok:
            raise NotAllowedError(
                f"the layer may not become an aclnnMegaMoe: {verdict.check}: {verdict.reason}"
            )
        keep = bool(self._engine.get("copy_weights"))
        family = family_of(self._find().soc)
        given = arguments(made, operands, options, family, quantisation, keep)
        if made.hccl:
            return CombineCall(self._find().combine)(given, made.hccl, made.sizes.max_recv_token_num)
        return self._call(given)

    @functools.cached_property
    def _call(self) -> Call:
        found = self._find()
        if found.official is not None:
            return OfficialCall(found.official)
        return CCall(found, self._stream)

    def _told(self, spec: MoeSpec) -> str:
        """In which memory format the weights lie, before they are seen."""
        scheme = schemes().get(spec.quant)
        return scheme.weight_format if self._cast and scheme is not None else "ND"

    def _conditions(
        self, spec: MoeSpec, max_tokens: int, max_recv: int, weight_format: str, revision: str | None = None
    ) -> Conditions:
        found = self._find()
        return Conditions(
            found.soc,
            found.revision if revision is None else revision,
            max_tokens,
            max_recv,
            hccl_buffer_bytes(),
            scheme=spec.quant,
            weight_format=weight_format,
            **self._engine,
        )

    def _judge(
        self, made: NpuContext, operands: Operands, options: Options, quantisation: Quantisation | None
    ) -> Verdict:
        """Once per layer: a spec has no token count, and nothing else of a call changes."""
        spec = spec_of(operands, options, quantisation)
        lies = self._lies(operands, spec)
        key = (made.sizes, made.hccl, spec, lies)
        if key not in self._judged:
            sizes = made.sizes
            tokens, received = sizes.num_max_tokens_per_rank, sizes.max_recv_token_num
            revision = COMBINE if made.hccl else None
            self._judged[key] = decide_npu(spec, self._conditions(spec, tokens, received, lies, revision))
        return self._judged[key]

    @staticmethod
    def _lies(operands: Operands, spec: MoeSpec) -> str:
        """The memory format of both weights; where one isn't as the operator wants it, that one's."""
        found = [formats.memory_format(weights[0]) for weights in (operands.weight1, operands.weight2)]
        scheme = schemes().get(spec.quant)
        return next((lies for lies in found if scheme is None or lies != scheme.weight_format), found[0])


def spec_of(operands: Operands, options: Options, quantisation: Quantisation | None = None) -> MoeSpec:
    """The spec of a call, ids taken to be in range: whoever calls has promised it, and no value is read."""
    weight1, weight2 = operands.weight1[0], operands.weight2[0]
    rows = (-2, -1)
    outputs1, outputs2 = (rows[not options.transpose_weight1], rows[not options.transpose_weight2])
    gated = options.gate_up not in ("none", "separate")
    packed = PACKED if weight1.dtype == torch.int32 else 1
    width = weight1.shape[outputs1] * packed
    intermediate = width // 2 if gated else width
    return MoeSpec(
        num_experts=options.num_experts,
        top_k=operands.topk_ids.shape[1],
        hidden=operands.x.shape[1],
        intermediate=intermediate,
        out_features=weight2.shape[outputs2] * packed,
        device=str(operands.x.device),
        ep_world_size=options.ep_world_size,
        transpose_weight1=options.transpose_weight1,
        transpose_weight2=options.transpose_weight2,
        gate_up=options.gate_up,  # type: ignore[arg-type]
        activation=options.activation,
        activation_params=tuple(options.activation_params),
        weight_position=options.weight_position,  # type: ignore[arg-type]
        row_norm=options.row_norm,  # type: ignore[arg-type]
        num_identity_experts=options.num_identity_experts,
        has_bias1=bool(operands.bias1),
        has_bias2=bool(operands.bias2),
        x_dtype=operands.x.dtype,
        expert_dtype=weight1.dtype,
        output_dtype=options.output_dtype or operands.x.dtype,
        router_dtype=operands.topk_weights.dtype,
        ids_checked=True,
        **_quantised((weight1, weight2), (operands.x.shape[1], intermediate), quantisation),
    )


def _quantised(
    weights: tuple[Tensor, Tensor], inputs: tuple[int, int], quantisation: Quantisation | None
) -> dict[str, Any]:
    """The fields of a spec that quantised experts have; inputs: of both GEMMs."""
    if quantisation is None:
        return {}
    scales = (quantisation.weight_scales1[0], quantisation.weight_scales2[0])
    # [E, N] or [E, G, N] beside [E, K, N]; [N] or [G, N] beside [K, N]
    groups = (s.shape[-2] if s.dim() == w.dim() else 1 for s, w in zip(scales, weights, strict=True))
    if quantisation.quant in BLOCKS:
        groups = (size // BLOCK for size in inputs)
    return {
        "quant": quantisation.quant,
        "has_weight_offsets": bool(quantisation.weight_offsets1 or quantisation.weight_offsets2),
        "weight_scale_groups": tuple(groups),
        "hidden_dtype": quantisation.hidden_dtype,
        "rows_dtype": quantisation.rows_dtype,
    }


def _current_stream(device: torch.device) -> int:
    """Reading it drains torch_npu's queue: what was enqueued before is on the stream when the call is."""
    return int(torch.get_device_module(device).current_stream(device).npu_stream)
