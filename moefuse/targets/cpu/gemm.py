"""Small matrix products against one expert's weight, read as it lies.

In: rows and a 2-D view of a weight. Out: the product, by the fastest route that torch has on a CPU and that
makes no copy of the weight. Measured with the shapes of `moefuse bench` on an AVX-512 AMD part:

- float32: oneDNN's inner product takes about half the time of torch.mm, which is MKL;
- bfloat16, one row (decoding): the product is a walk over the weight, and torch.mm (oneDNN, which re-lays the
  weight first) reaches 10 to 16 GB/s per core. The two kernels of embedding bags do just that walk at 20 to 29
  GB/s, with float32 sums: a weighted sum of rows where the weight is stored [K, N], row dot products where it
  is stored [N, K];
- bfloat16, more rows: torch.mm; neither the weight as left operand nor blocks of its rows or columns gain.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

_inner_product = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_row_dots = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
_BAGS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # elsewhere bags are plain loops
_BAG_ROWS = 2  # each row walks over the weight anew: two still beat one torch.mm


def multiply_into(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """out [n, N] = x [n, K] @ w [N, K].T + bias [N]; `w` may have any strides."""
    if x.dtype == torch.float32 and _inner_product is not None:
        bias = None if bias is None else bias.contiguous()  # a strided one is read as if it were not
        out.copy_(_inner_product(x, w, bias, "none", [], ""))
        return
    if x.dtype == torch.bfloat16 and _BAGS and x.shape[0] <= _BAG_ROWS and w.t().is_contiguous():
        _sum_rows(out, x, w.t())
    elif x.dtype == torch.bfloat16 and _BAGS and x.shape[0] == 1 and w.stride(1) == 1:
        _dot_rows(out, x, w)
    else:
        torch.mm(x, w.t(), out=out)
    if bias is not None:
        out.add_(bias)


def _sum_rows(out: Tensor, x: Tensor, w: Tensor) -> None:
    """out [n, N] = x [n, K] @ w [K, N], contiguous w: one bag per row and thread, each over a part of N."""
    n = x.shape[0]
    k, features = w.shape
    parts = math.gcd(features, torch.get_num_threads())
    weights = x.unsqueeze(1).expand(n, parts, k).reshape(n * parts, k)
    bags = F.embedding_bag(
        _bag_index(n, parts, k), w.view(k * parts, features // parts), mode="sum", per_sample_weights=weights
    )
    out.copy_(bags.view(n, features))


def _dot_rows(out: Tensor, x: Tensor, w: Tensor) -> None:
    """out [1, N] = x [1, K] @ w [N, K].T: the gradient of a bag's weights is a dot product with each row."""
    rows, one, zeros = _row_index(w.shape[0])
    out.copy_(_row_dots(x, w, rows, one, zeros, 0))


@lru_cache(maxsize=64)
def _bag_index(n: int, parts: int, k: int) -> Tensor:
    rows = torch.arange(k * parts, device="cpu").view(k, parts).t()
    return rows.repeat(n, 1).contiguous()


@lru_cache(maxsize=64)
def _row_index(features: int) -> tuple[Tensor, Tensor, Tensor]:
    zeros = torch.zeros(features, dtype=torch.int64, device="cpu")
    return torch.arange(features, device="cpu"), zeros[:1], zeros
