"""What a target is: one way to run mega_moe.

In: nothing. Out: the `Target` base class; each target is a folder beside this file.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from moefuse.comm import Capacity, ContextError
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.quantised import Quantisation
from moefuse.ops.spec import MoeSpec
from moefuse.policy import Verdict, checks_of, judge


class Opened(NamedTuple):
    """A communication context: the tensor that a node takes, how rows travel, and the memory that it takes."""

    tensor: Tensor
    transport: str
    bytes: int


class Target(ABC):
    """One way to run the operator. Stateless where possible; one instance per process.

    communicates: `run` itself exchanges the rows of experts that are spread over ranks, given their context.
    """

    name: ClassVar[str]
    communicates: ClassVar[bool] = False

    def supported(self) -> Verdict:
        """Does this machine have what the target needs? Yes, unless a target says otherwise."""
        return Verdict(True)

    def supports(self, spec: MoeSpec, max_tokens: int = 1) -> Verdict:
        """May this layer run here, with so many tokens on one rank at most? The checks under the target's name."""
        return judge(spec, checks_of(self.name))

    def open_context(self, group: Any, capacity: Capacity, spec: MoeSpec) -> Opened:
        """The context of a group for a layer; collective. Asked of targets that communicate themselves.

        Raises ContextError where none can be had.
        """
        raise ContextError(f"target {self.name!r} has no contexts of its own")

    def copied_bytes(self, spec: MoeSpec) -> int:
        """How much this target copies of a layer's tensors at most, once, at its first run; for the report."""
        return 0

    @abstractmethod
    def run(
        self,
        context: Tensor | None,
        operands: Operands,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer: y [T, O] and expert_token_nums [E] int32.

        The operator has checked shapes and dtypes, not the ids: those outside 0..E+Z-1 contribute nothing.
        """

    def run_quantised(
        self, context: Tensor | None, operands: Operands, options: Options, quantisation: Quantisation
    ) -> tuple[Tensor, Tensor]:
        """Compute a layer of quantised experts, likewise.

        A target without it is no target of `mega_moe.quant`. Of one that communicates it answers `quant_ep` alone; the
        others answer that as well, rows travelling as the context says.
        """
        raise NotImplementedError(f"{self.name}: no quantised experts")
