// Rows of tokens against a range of one expert's output features, whatever the layout of its weight.
//
// In: a view of the weight, token rows as Mac<D>::X. Out: float32 sums, bias included. Chooses the form (dot products
// or outer products) by the weight's strides and cuts k and tokens into blocks that stay in the caches. Which sums
// are added in which order depends on k alone, never on threads or on the other tokens.
#pragma once

#include "dot.h"
#include "outer.h"

namespace moefuse {

constexpr int DOT_WIDTH = 48;              // output features per block of dot products
constexpr int OUTER_WIDTH = SUMS * LANES;  // and of outer products: the widest tile
constexpr int BLOCK_TOKENS = 48;           // token rows that stay in the L2 cache beside the weights
constexpr int BLOCK_BYTES = 4096;          // of k: one group of token rows and four of weights fit the L1 cache

// Part of a weight: feature n and input k lie at w[n * stride_n + k * stride_k]; one of the strides is 1.
template <class D>
struct View {
    const D* w;
    ptrdiff_t stride_n, stride_k;
    const D* bias;  // null: none
    ptrdiff_t stride_bias;

    bool dots() const { return stride_k == 1; }
    View from(int64_t n) const {
        return {w + n * stride_n, stride_n, stride_k, bias ? bias + n * stride_bias : bias, stride_bias};
    }
};

static constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// c [t][ldc], columns 0..n-1 = bias + rows of x times the view's first n features. `next` is read afterwards.
template <class D>
static void multiply(const View<D>& view, int n, const typename Mac<D>::X* x, ptrdiff_t ldx, int t, int64_t k,
                     float* c, ptrdiff_t ldc, const D* next) {
    for (int i = 0; i < t; i++) std::memset(c + i * ldc, 0, size_t(n) * sizeof(float));
    if (view.bias)
        for (int j = 0; j < n; j++) {
            const float bias = scalar(view.bias + j * view.stride_bias);
            for (int i = 0; i < t; i++) c[i * ldc + j] = bias;
        }
    const int64_t most = BLOCK_BYTES / int64_t(sizeof(typename Mac<D>::X));
    const int64_t block = round_up((k + (k + most - 1) / most - 1) / ((k + most - 1) / most), Mac<D>::STEP);
    for (int64_t k0 = 0; k0 < k; k0 += block) {
        const int own = int(k - k0 < block ? k - k0 : block);
        if (!view.dots()) {
            outer_panel<D>(view.w + k0 * view.stride_k, view.stride_k, n, x + k0, ldx, t, own, c, ldc);
            continue;
        }
        const D* after = k0 + block < k ? view.w + k0 + block : next;
        for (int i = 0; i < t; i += BLOCK_TOKENS)
            dot_panel<D>(view.w + k0, view.stride_n, n, x + i * ldx + k0, ldx, t - i < BLOCK_TOKENS ? t - i : BLOCK_TOKENS,
                         own, c + i * ldc, ldc, after);
    }
}

}  // namespace moefuse
