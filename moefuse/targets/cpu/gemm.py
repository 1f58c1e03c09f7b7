"""Small matrix products against one expert's weight, read as it lies.

In: rows and a 2-D view of a weight. Out: the product, by the fastest route that torch has on a CPU and that
makes no copy of the weight. Measured with benchmarks/layer.py's shapes: for float32, oneDNN's inner product
takes about half the time of torch.mm (MKL) on an AVX-512 AMD part; for bfloat16 torch.mm is oneDNN already,
and neither the weight as left operand nor blocks of the weight's rows or columns gain over real row counts.
"""

from torch import Tensor, float32, mm, ops
from torch.backends import mkldnn

_inner_product = ops.mkldnn._linear_pointwise.default if mkldnn.is_available() else None


def multiply_into(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """out [n, N] = x [n, K] @ w [N, K].T + bias [N]; `w` may have any strides."""
    if _inner_product is not None and x.dtype == float32:
        out.copy_(_inner_product(x, w, bias, "none", [], ""))
        return
    mm(x, w.t(), out=out)
    if bias is not None:
        out.add_(bias)
