// C[t][n] += sum over k of W[n][k] * X[t][k] for many tokens: lanes are tokens.
//
// In: rows of W as they lie, k contiguous, and the token rows packed by pack(): blocks of WIDE tokens (the last may be
// half of that), for each 32 bits of k the tokens side by side. Out: float32 sums. Values of W are repeated over the
// lanes, so that no sum over lanes is left and a tile runs at the speed of its multiplications; worth the packing from
// about WIDE tokens on. Only where W needs no conversion (Mac<D>::X is D).
#pragma once

#include <type_traits>

#include "amx.h"
#include "dot.h"

namespace moefuse {

constexpr int WIDE = 2 * LANES;
#if defined(MOEFUSE_ISA_AVX512)
constexpr int STRIP = 8;  // rows often lie 4096 bytes apart: one set of the L1 cache, which holds 12 lines
constexpr int MOST_DOTS = 24;  // tokens beyond whole blocks that are cheaper as dot products (measured)
#else
constexpr int STRIP = 6;
constexpr int MOST_DOTS = 6;
#endif

template <class D>
constexpr bool PACKS = sizeof(typename Mac<D>::X) == sizeof(D);

// How many of t tokens are computed here, a multiple of LANES. Beyond whole blocks: none if they are few, else a half
// or a whole block, filled up with zeros; all where tiles read the weights as they lie.
template <class D>
static inline int packed_tokens(int t) {
    const int rest = t % WIDE, blocks = t - rest;
    if (TILES<D>) return (t + LANES - 1) / LANES * LANES;
    if (rest <= MOST_DOTS) return blocks;
    return blocks + (rest <= LANES ? LANES : WIDE);
}

// to[i][j] = from[j][i], LANES x LANES words.
static inline void transpose(const uint32_t* from, ptrdiff_t ldf, uint32_t* to, ptrdiff_t ldt) {
#if defined(MOEFUSE_ISA_AVX512)
    __m512i r[16], s[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * ldf);
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(s[i + j], s[i + 2 + j]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(s[i + j], s[i + 2 + j]);
        }
    // r[4 q + c], 128-bit lane l: words 4 l + c of rows 4 q .. 4 q + 3
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        const __m512i high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        const __m512i high2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        _mm512_storeu_si512(to + c * ldt, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_storeu_si512(to + (4 + c) * ldt, _mm512_shuffle_i32x4(low2, high2, 0x88));
        _mm512_storeu_si512(to + (8 + c) * ldt, _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_storeu_si512(to + (12 + c) * ldt, _mm512_shuffle_i32x4(low2, high2, 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[i * ldt + j] = from[j * ldf + i];
#endif
}

// V * LANES token rows of k values (k a multiple of 32) into one block of as many values.
template <int V, class X>
static void pack(const X* rows, ptrdiff_t ldx, int64_t k, X* to) {
    const ptrdiff_t words = k * sizeof(X) / 4, stride = ldx * sizeof(X) / 4;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(rows);
    uint32_t* block = reinterpret_cast<uint32_t*>(to);
    for (ptrdiff_t i = 0; i < words; i += LANES)
        for (int v = 0; v < V; v++)
            transpose(from + v * LANES * stride + i, stride, block + (i * V + v) * LANES, V * LANES);
}

// R rows of W against a block of V vectors of tokens over whole pairs of k; sums [R][ldc] are added to. Asks for so
// many lines of weights with every 64 bytes of k.
template <class D, int R, int V>
static inline RowsAhead<D> packed_tile(const D* w, ptrdiff_t ldw, const D* x, int k, float* c, ptrdiff_t ldc,
                                       RowsAhead<D> ahead, int lines) {
    using M = Mac<D>;
    constexpr int LINE = 64 / sizeof(D);
    f32v sums[R][V] = {};
    Rows<D, R> weights(w, ldw);
    for (int line = 0; line < k; line += LINE) {
        ahead.ask(lines);
        const D* end = x + (k - line < LINE ? k - line : LINE) * V * LANES;
        for (; x < end; x += M::PAIR * V * LANES) {
            typename M::Reg tokens[V];
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) tokens[v] = M::values(x + v * M::PAIR * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const typename M::Reg weight = M::repeated(weights[r]);
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) sums[r][v] = M::add(sums[r][v], tokens[v], weight);
            }
            weights.advance(M::PAIR);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            float* sum = c + r * ldc + v * LANES;
            store(sum, load(sum) + sums[r][v]);
        }
    return ahead;
}

// n rows of W, at most DOT_WIDTH, against t packed tokens (`stride` values each) from k0 on; c [n][ldc]. `next` is what
// will be read after them: the strip to come is fetched evenly over the blocks of tokens.
template <class D>
static void packed_vectors(const D* w, ptrdiff_t ldw, int n, const D* x, ptrdiff_t stride, int t, int64_t k0, int k,
                           float* c, ptrdiff_t ldc, const D* next) {
    constexpr int PAIR = Mac<D>::PAIR;
    const int blocks = (t + WIDE - 1) / WIDE, paired = k / PAIR * PAIR;
    const auto strip = [&](auto rows, int row) {
        constexpr int R = decltype(rows)::value;
        RowsAhead<D> ahead(row + 2 * R <= n ? w + (row + R) * ldw : next, ldw, paired);
        for (int b = 0; b < blocks; b++) {
            const bool wide = t - b * WIDE >= WIDE;
            const D* block = x + b * WIDE * stride + k0 * (wide ? WIDE : LANES);
            float* sums = c + row * ldc + b * WIDE;
            const int lines = R * (b + 1) / blocks - R * b / blocks;
            ahead = wide ? packed_tile<D, R, 2>(w + row * ldw, ldw, block, paired, sums, ldc, ahead, lines)
                         : packed_tile<D, R, 1>(w + row * ldw, ldw, block, paired, sums, ldc, ahead, lines);
        }
    };
    int row = 0;
    for (; row + STRIP <= n; row += STRIP) strip(std::integral_constant<int, STRIP>{}, row);
    for (; row + 4 <= n; row += 4) strip(std::integral_constant<int, 4>{}, row);
    for (; row < n; row++) strip(std::integral_constant<int, 1>{}, row);
    if (paired == k) return;
    D last[DOT_WIDTH][PAIR] = {};  // values without a partner get one of zero
    for (int i = 0; i < n; i++) last[i][0] = w[i * ldw + paired];
    packed_vectors<D>(last[0], PAIR, n, x, stride, t, k0 + paired, PAIR, c, ldc, next);
}

// The same, in tiles as far as they go.
template <class D>
static void packed_rows(const D* w, ptrdiff_t ldw, int n, const D* x, ptrdiff_t stride, int t, int64_t k0, int k,
                        float* c, ptrdiff_t ldc, const D* next) {
#if defined(MOEFUSE_AMX)
    if constexpr (TILES<D>) {
        tile_panel(w, ldw, n, x, stride, t, k0, k, c, ldc, next);
        const int rows = n / TILE_ROWS * TILE_ROWS, whole = k / TILE_K * TILE_K;
        if (whole < k) packed_vectors<D>(w + whole, ldw, rows, x, stride, t, k0 + whole, k - whole, c, ldc, next);
        w += rows * ldw, n -= rows, c += rows * ldc;
    }
#endif
    packed_vectors<D>(w, ldw, n, x, stride, t, k0, k, c, ldc, next);
}

}  // namespace moefuse
