// Rows of tokens against a range of one expert's output features, whatever the layout of its weight.
//
// In: a view of the weight, token rows as Mac<D>::X. Out: float32 sums, bias included. Chooses the form (dot products
// or outer products) by the weight's strides and cuts k and tokens into blocks that stay in the caches. Which sums
// are added in which order depends on k and on how many tokens an expert has, never on threads.
#pragma once

#include "dot.h"
#include "outer.h"
#include "packed.h"

namespace moefuse {

constexpr int OUTER_K = 128;               // rows of these at a time: they and the ones to come stay in the L2 cache
constexpr int BLOCK_TOKENS = 48;           // token rows that stay in the L2 cache beside the weights
constexpr int FEW_BYTES = 32768;           // of token rows that stay in the L1 cache while weights pass through it
constexpr int BLOCK_BYTES = 4096;          // of k: one group of token rows and four of weights fit the L1 cache
// How many k one lane sums up before its sum is added to the others: float32 needs shorter chains to be as precise as
// its peers; for half precision the rounding of the rows hides it.
constexpr int64_t CHAIN = 256;

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
    float* turned;  // [DOT_WIDTH][TURNED_STRIDE], sums of packed tokens
};

constexpr int TURNED = 6 * WIDE;  // tokens per block of sums with tokens in the lanes
constexpr int TURNED_STRIDE = TURNED + LANES;

// Packs as many rows as packed_tokens() says, for weights whose k is contiguous; those beyond `count` in the last block
// are zeroed.
template <class D>
void pack_rows(Tokens<D>& tokens, int64_t k) {
    if constexpr (PACKS<D>) {
        using X = typename Mac<D>::X;
        const ptrdiff_t stride = tokens.stride;
        tokens.in_blocks = packed_tokens<D>(tokens.count);
        for (int i = tokens.count; i < tokens.in_blocks; i++)
            std::memset(static_cast<void*>(tokens.rows + i * stride), 0, stride * sizeof(X));
        const int64_t padded = round_up(k, 32);
        int i = 0;
        for (; i + WIDE <= tokens.in_blocks; i += WIDE)
            pack<2>(tokens.rows + i * stride, stride, padded, tokens.packed + i * stride);
        if (i < tokens.in_blocks) pack<1>(tokens.rows + i * stride, stride, padded, tokens.packed + i * stride);
    }
}

// c [t][ldc], columns 0..n-1 = bias, or zero.
template <class D>
static void start(const View<D>& view, int n, int t, float* c, ptrdiff_t ldc) {
    const size_t bytes = size_t(n) * sizeof(float);
    if (!view.bias) std::memset(c, 0, bytes);
    for (int j = 0; view.bias && j < n; j += LANES) {
        if (view.stride_bias == 1 && j + LANES <= n)
            store(c + j, load(view.bias + j));
        else
            for (int i = j; i < n && i < j + LANES; i++) c[i] = scalar(view.bias + i * view.stride_bias);
    }
    for (int i = 1; i < t; i++) std::memcpy(c + i * ldc, c, bytes);
}

// The packed tokens, up to TURNED / 2 at a time (W is read again for each time, out of the L2 cache), against
// n <= DOT_WIDTH features whose k is contiguous: sums come out with tokens in the lanes and are turned.
template <class D>
static void multiply_packed(const View<D>& view, int n, const Tokens<D>& tokens, int64_t k, int64_t block, float* c,
                            ptrdiff_t ldc, const D* next) {
    float* turned = tokens.turned;
    for (int i = 0; i < tokens.in_blocks; i += TURNED / 2) {
        const int own = tokens.in_blocks - i < TURNED / 2 ? tokens.in_blocks - i : TURNED / 2;
        for (int j = 0; j < n; j++) {
            const f32v bias = splat(view.bias ? scalar(view.bias + j * view.stride_bias) : 0.f);
            for (int t = 0; t < own; t += LANES) store(turned + j * TURNED_STRIDE + t, bias);
        }
        for (int64_t k0 = 0; k0 < k; k0 += block)
            packed_rows<D>(view.w + k0, view.stride_n, n, tokens.packed + i * tokens.stride, tokens.stride, own, k0,
                           int(k - k0 < block ? k - k0 : block), turned, TURNED_STRIDE,
                           k0 + block < k ? view.w + k0 + block : next);
        for (int j = 0; j < n; j += LANES)
            for (int t = 0; t < own; t += LANES)
                transpose(reinterpret_cast<uint32_t*>(turned) + j * TURNED_STRIDE + t, TURNED_STRIDE,
                          reinterpret_cast<uint32_t*>(c) + (i + t) * ldc + j, ldc);
    }
}

// multiply() where k is contiguous.
template <class D>
static void multiply_rows(const View<D>& view, int n, const Tokens<D>& tokens, int64_t k, float* c, ptrdiff_t ldc,
                          const D* next) {
    // few token rows leave the L1 cache room for more of each: memory likes long stretches of a weight's row better
    const int64_t bytes = tokens.count <= FEW ? FEW_BYTES / tokens.count : BLOCK_BYTES;
    int64_t most = bytes / int64_t(sizeof(typename Mac<D>::X));
    if (sizeof(D) == 4 && most > CHAIN * LANES) most = CHAIN * LANES;
    const int64_t blocks = (k + most - 1) / most;
    const int64_t block = round_up((k + blocks - 1) / blocks, 32);
    if constexpr (PACKS<D>)
        if (tokens.in_blocks)
            multiply_packed(view, n, tokens, k, sizeof(D) < 4 ? block : CHAIN, c, ldc,
                            tokens.in_blocks < tokens.count ? view.w : next);
    const int left = tokens.count - tokens.in_blocks;
    if (left <= 0) return;
    const typename Mac<D>::X* x = tokens.rows + tokens.in_blocks * tokens.stride;
    c += tokens.in_blocks * ldc;
    start(view, n, left, c, ldc);
    for (int64_t k0 = 0; k0 < k; k0 += block)
        for (int i = 0; i < left; i += BLOCK_TOKENS)
            dot_panel<D>(view.w + k0, view.stride_n, n, x + i * tokens.stride + k0, tokens.stride,
                         left - i < BLOCK_TOKENS ? left - i : BLOCK_TOKENS, int(k - k0 < block ? k - k0 : block),
                         c + i * ldc, ldc, k0 + block < k ? view.w + k0 + block : next);
}

// multiply() where n is contiguous.
template <class D>
static void multiply_columns(const View<D>& view, int n, const Tokens<D>& tokens, int64_t k, float* c, ptrdiff_t ldc,
                             const D* next) {
    // few tokens: a tile goes over many rows
    const int64_t rows = tokens.count <= MOST_TOKENS ? BLOCK_BYTES / int64_t(sizeof(typename Mac<D>::X)) : OUTER_K;
    start(view, n, tokens.count, c, ldc);
    for (int64_t k0 = 0; k0 < k; k0 += rows) {
        const int own = int(k - k0 < rows ? k - k0 : rows);
        const D *w = view.w + k0 * view.stride_k, *then = k0 + rows < k ? w + rows * view.stride_k : next;
        outer_panel<D>(w, view.stride_k, n, tokens.rows + k0, tokens.stride, tokens.count, own, c, ldc, then);
    }
}

// c [count][ldc], columns 0..n-1 = bias + token rows times the view's first n features. `next` is read afterwards.
// c has room for whole blocks of tokens and whole vectors of columns.
template <class D>
void multiply(const View<D>& view, int n, const Tokens<D>& tokens, int64_t k, float* c, ptrdiff_t ldc,
              const D* next) {
    view.dots() ? multiply_rows(view, n, tokens, k, c, ldc, next) : multiply_columns(view, n, tokens, k, c, ldc, next);
}

}  // namespace moefuse
