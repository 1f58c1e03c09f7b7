// Rows of tokens against a range of one expert's output features, whatever the layout of its weight.
//
// In: a view of the weight, token rows as Mac<D>::X. Out: float32 sums, bias included. Chooses the form (dot products
// or outer products) by the weight's strides and cuts k and tokens into blocks that stay in the caches. Which sums
// are added in which order depends on k alone, never on threads or on the other tokens.
#pragma once

#include "dot.h"
#include "outer.h"
#include "packed.h"

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

// Token rows, and some of them packed.
template <class D>
struct Tokens {
    using X = typename Mac<D>::X;
    X* rows;  // [count][stride], zero-padded to 32 values
    ptrdiff_t stride;
    X* packed;  // `stride` values per token
    int count, in_blocks;
    float* turned;    // [PANEL][TURNED_STRIDE], sums of packed tokens
    uint32_t* panel;  // [PANEL_K][PANEL_STRIDE], a copy of columns of W

    // Packs as many rows as packed_tokens() says; those beyond `count` in the last block are zeroed.
    void pack_rows(int64_t k, bool dots) {
        in_blocks = 0;
        if constexpr (PACKS<D>) {
            in_blocks = packed_tokens<D>(count, dots);
            for (int i = count; i < in_blocks; i++)
                std::memset(static_cast<void*>(rows + i * stride), 0, stride * sizeof(X));
            const int64_t padded = round_up(k, 32);
            int i = 0;
            for (; i + WIDE <= in_blocks; i += WIDE) pack<2>(rows + i * stride, stride, padded, packed + i * stride);
            if (i < in_blocks) pack<1>(rows + i * stride, stride, padded, packed + i * stride);
        }
    }
};

constexpr int TURNED = 6 * WIDE;  // tokens per block of sums with tokens in the lanes
constexpr int TURNED_STRIDE = TURNED + LANES;

template <class D>
static void start(const View<D>& view, int n, int t, float* c, ptrdiff_t ldc) {
    for (int i = 0; i < t; i++) std::memset(c + i * ldc, 0, size_t(n) * sizeof(float));
    if (!view.bias) return;
    for (int j = 0; j < n; j++) {
        const float bias = scalar(view.bias + j * view.stride_bias);
        for (int i = 0; i < t; i++) c[i * ldc + j] = bias;
    }
}

// The packed tokens, up to TURNED at a time, against n <= PANEL features: sums come out with tokens in the lanes and are
// turned.
template <class D>
static void multiply_packed(const View<D>& view, int n, const Tokens<D>& tokens, int64_t k, int64_t block, float* c,
                            ptrdiff_t ldc, const D* next) {
    float* turned = tokens.turned;
    // rows as they lie are read again for each block, out of the L2 cache; a panel is copied for each
    const int most = view.dots() ? TURNED / 2 : TURNED;
    for (int i = 0; i < tokens.in_blocks; i += most) {
        const int own = tokens.in_blocks - i < most ? tokens.in_blocks - i : most;
        const D* x = tokens.packed + i * tokens.stride;
        for (int j = 0; j < n; j++) {
            const f32v bias = splat(view.bias ? scalar(view.bias + j * view.stride_bias) : 0.f);
            for (int t = 0; t < own; t += LANES) store(turned + j * TURNED_STRIDE + t, bias);
        }
        for (int64_t k0 = 0; k0 < k; k0 += block) {
            const int part = int(k - k0 < block ? k - k0 : block);
            const D* w = view.w + k0 * view.stride_k;
            if (view.dots())
                packed_rows<D>(w, view.stride_n, n, x, tokens.stride, own, k0, part, turned, TURNED_STRIDE,
                               k0 + block < k ? w + block : next);
            else
                packed_columns<D>(w, view.stride_k, n, x, tokens.stride, own, k0, part, turned, TURNED_STRIDE,
                                  tokens.panel);
        }
        for (int j = 0; j < n; j += LANES)
            for (int t = 0; t < own; t += LANES)
                transpose(reinterpret_cast<uint32_t*>(turned) + j * TURNED_STRIDE + t, TURNED_STRIDE,
                          reinterpret_cast<uint32_t*>(c) + (i + t) * ldc + j, ldc);
    }
}

// c [count][ldc], columns 0..n-1 = bias + token rows times the view's first n features. `next` is read afterwards.
// c has room for whole blocks of tokens and whole vectors of columns.
template <class D>
static void multiply(const View<D>& view, int n, const Tokens<D>& tokens, int64_t k, float* c, ptrdiff_t ldc,
                     const D* next) {
    const int64_t most = BLOCK_BYTES / int64_t(sizeof(typename Mac<D>::X)), blocks = (k + most - 1) / most;
    const int64_t block = round_up((k + blocks - 1) / blocks, 32);
    int done = 0;
    if constexpr (PACKS<D>) {
        const D* after = tokens.in_blocks < tokens.count ? view.w : next;
        for (int j = 0; tokens.in_blocks && j < n; j += PANEL)
            multiply_packed(view.from(j), n - j < PANEL ? n - j : PANEL, tokens, k, view.dots() && sizeof(D) < 4 ? block : CHAIN<D>,
                            c + j, ldc, after);
        done = tokens.in_blocks;
    }
    const int left = tokens.count - done;
    if (left <= 0) return;
    const typename Mac<D>::X* x = tokens.rows + done * tokens.stride;
    c += done * ldc;
    start(view, n, left, c, ldc);
    for (int64_t k0 = 0; k0 < k; k0 += block) {
        const int own = int(k - k0 < block ? k - k0 : block);
        if (!view.dots()) {
            outer_panel<D>(view.w + k0 * view.stride_k, view.stride_k, n, x + k0, tokens.stride, left, own, c, ldc);
            continue;
        }
        const D* after = k0 + block < k ? view.w + k0 + block : next;
        for (int i = 0; i < left; i += BLOCK_TOKENS)
            dot_panel<D>(view.w + k0, view.stride_n, n, x + i * tokens.stride + k0, tokens.stride,
                         left - i < BLOCK_TOKENS ? left - i : BLOCK_TOKENS, own, c + i * ldc, ldc, after);
    }
}

}  // namespace moefuse
