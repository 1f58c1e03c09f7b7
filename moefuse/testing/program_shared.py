"""The shared expert of a `Program`: a dense FFN on the token rows, with the layer's activation and weight layout.

In: a `Program`, a source of parameters, the layer's own ways to cut and activate hidden rows. Out: what is added to y.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moefuse.testing.programs import Program

Parameter = Callable[..., torch.nn.Parameter]


class SharedExpert(torch.nn.Module):
    """Shapes: x [T, H], y [T, H]."""

    def __init__(self, program: "Program", parameter: Parameter) -> None:
        super().__init__()
        self.program = program
        hidden, inner = program.sizes.hidden, program.sizes.inter
        rows = 2 * inner if program.gate_up not in ("none", "separate") else inner

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            shape = (rows, columns) if program.out_features_first else (columns, rows)
            return parameter(*shape, fan_in=columns)

        self.w1 = weight(rows, hidden)
        self.w3 = weight(rows, hidden) if program.gate_up == "separate" else None
        self.w2 = weight(hidden, inner)
        self.b1 = parameter(rows) if program.bias else None
        self.b3 = parameter(rows) if program.bias and program.gate_up == "separate" else None
        self.b2 = parameter(hidden) if program.bias else None
        self.gate = parameter(1, hidden, fan_in=hidden) if program.shared == "weighted" else None

    def forward(self, x: Tensor, hidden_of: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """X [T, H] -> [T, H]. hidden_of: the activation of one GEMM's rows, or of gate's and up's."""
        up = self._linear(x, self.w3, self.b3) if self.w3 is not None else None
        y = self._linear(hidden_of(self._linear(x, self.w1, self.b1), up), self.w2, self.b2)
        return y if self.gate is None else torch.sigmoid(x @ self.gate.t()) * y

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = x @ (weight.t() if self.program.out_features_first else weight)
        return product if bias is None else product + bias
