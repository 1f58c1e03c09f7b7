// C[t][n] += sum over k of X[t][k] * W[k][n] for weights whose n is contiguous: outer products of rows as they lie.
//
// In: rows of W (unit stride along n, any stride along k) and of X (Mac<D>::X, zero-padded to an even k).
// Out: float32 sums. A tile of T token rows by V vectors of columns stays in registers along k; each value of X is
// repeated over the lanes. bf16 dot products take two k at once: two rows of W are interleaved in registers.
#pragma once

#include <cstring>
#include <type_traits>

#include "ahead.h"
#include "mac.h"

namespace moefuse {

#if defined(MOEFUSE_ISA_AVX512)
constexpr int SUMS = 24;
constexpr int MOST_TOKENS = 12;
#else
constexpr int SUMS = 12;
constexpr int MOST_TOKENS = 6;
#endif
constexpr int OUTER_WIDTH = SUMS * LANES;  // columns at a time: the widest tile
constexpr int WIDER = 20;                  // times that for one token, whose sums the L1 cache holds
constexpr int LINES_AHEAD = 144;           // of 64 bytes
constexpr int CUT_TOKENS = 4;              // at a time, in columns that don't fill a vector

// Two vectors of columns, of which n exist, out of the rows at w (and w + ldk where the type pairs k).
template <class D>
struct Columns {
    static inline void read(const D* w, ptrdiff_t, int n, f32v* two) {
        if (n >= 2 * LANES) {
            two[0] = load(w), two[1] = load(w + LANES);
            return;
        }
        two[0] = load_some(w, n < LANES ? n : LANES);
        two[1] = load_some(w + LANES, n < LANES ? 0 : n - LANES);
    }
    static inline void in_order(f32v*) {}
};

#if defined(MOEFUSE_BF16_DOT)
template <>
struct Columns<bf16> {
    static inline void read(const bf16* w, ptrdiff_t ldk, int n, __m512i* two) {
        const __mmask32 mask = n >= 32 ? ~0u : (1u << n) - 1u;
        const __m512i a = _mm512_maskz_loadu_epi16(mask, w), b = _mm512_maskz_loadu_epi16(mask, w + ldk);
        two[0] = _mm512_unpacklo_epi16(a, b), two[1] = _mm512_unpackhi_epi16(a, b);
    }
    // Interleaving works within 128 bits: four columns of the first vector, four of the second, and so on.
    static inline void in_order(f32v* two) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const __m512 a = bit_cast<__m512>(two[0]), b = bit_cast<__m512>(two[1]);
        two[0] = bit_cast<f32v>(_mm512_permutex2var_ps(a, first, b));
        two[1] = bit_cast<f32v>(_mm512_permutex2var_ps(a, second, b));
    }
};
#endif

// SHARED: other tiles read the same columns, too; with every step it asks for so many lines of what comes after.
// ALONE: it asks for its own columns some rows further on. CUT: only its first n columns exist; it asks for nothing.
enum Tile { SHARED, ALONE, CUT };

// V vectors of columns over whole pairs of k; V is even. Not inlined: beside the loops around it the compiler runs out
// of registers.
template <class D, int T, int V, Tile KIND>
__attribute__((noinline)) static RowsAhead<D> outer_tile(const D* w, ptrdiff_t ldk, const typename Mac<D>::X* x,
                                                         ptrdiff_t ldx, int k, float* c, ptrdiff_t ldc, int n,
                                                         RowsAhead<D> ahead, int lines) {
    using M = Mac<D>;
    constexpr int LINE = 64 / sizeof(D), ROW = V * LANES;
    f32v sums[T][V] = {};
    Rows<typename M::X, T> tokens(x, ldx);
    for (int i = 0; i < k; i += M::PAIR) {
        if constexpr (KIND == ALONE) {
#pragma GCC unroll 2
            for (int p = 0; p < M::PAIR; p++)
#pragma GCC unroll 24
                for (int column = 0; column < ROW; column += LINE)
                    __builtin_prefetch(w + (i + p + LINES_AHEAD * LINE / ROW) * ldk + column, 0, 3);
        }
        if constexpr (KIND == SHARED) ahead.ask(lines);
        typename M::Reg row[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v += 2)
            Columns<D>::read(w + i * ldk + v * LANES, ldk, KIND == CUT ? n : ROW, row + v);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
            const typename M::Reg value = M::repeated(tokens[t]);
#pragma GCC unroll 24
            for (int v = 0; v < V; v++) sums[t][v] = M::add(sums[t][v], row[v], value);
        }
        tokens.advance(M::PAIR);
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; t++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v += 2) {
            Columns<D>::in_order(sums[t] + v);
#pragma GCC unroll 2
            for (int j = v; j < v + 2; j++) store(c + t * ldc + j * LANES, load(c + t * ldc + j * LANES) + sums[t][j]);
        }
    return ahead;
}

// Groups of T tokens against whole vectors of columns; as many as tiles of V vectors cover, the rest by narrower ones.
template <class D, int T, int V = SUMS / T / 2 * 2>
static void outer_tokens(const D* w, ptrdiff_t ldk, int n, const typename Mac<D>::X* x, ptrdiff_t ldx, int groups,
                         int k, float* c, ptrdiff_t ldc, RowsAhead<D> ahead) {
    constexpr int LINES = V * LANES * Mac<D>::PAIR * int(sizeof(D)) / 64;  // of W per step
    int column = 0;
    for (; column + V * LANES <= n; column += V * LANES) {
        const D* columns = w + column;
        float* sums = c + column;
        if (groups == 1) {
            outer_tile<D, T, V, ALONE>(columns, ldk, x, ldx, k, sums, ldc, 0, ahead, 0);
            continue;
        }
        if constexpr (2 * T > MOST_TOKENS)  // several groups are large ones
            for (int g = 0; g < groups; g++)
                ahead = outer_tile<D, T, V, SHARED>(columns, ldk, x + g * T * ldx, ldx, k, sums + g * T * ldc, ldc, 0,
                                                    ahead, LINES * (g + 1) / groups - LINES * g / groups);
    }
    if constexpr (V > 2)
        if (column < n)
            outer_tokens<D, T, V / 4 * 2>(w + column, ldk, n - column, x, ldx, groups, k, c + column, ldc, ahead);
}

// As outer_panel, for whole vectors of columns and whole pairs of k.
template <class D>
static void outer_groups(const D* w, ptrdiff_t ldk, int n, const typename Mac<D>::X* x, ptrdiff_t ldx, int t, int k,
                         float* c, ptrdiff_t ldc, RowsAhead<D> ahead) {
    const int groups = (t + MOST_TOKENS - 1) / MOST_TOKENS, group = (t + groups - 1) / groups;
    const auto tokens = [&](auto count) {
        outer_tokens<D, decltype(count)::value>(w, ldk, n, x, ldx, groups, k, c, ldc, ahead);
    };
    if (group <= 1) return tokens(std::integral_constant<int, 1>{});
    if (group <= 2) return tokens(std::integral_constant<int, 2>{});
    if (group <= 4) return tokens(std::integral_constant<int, 4>{});
    if (group <= 6) return tokens(std::integral_constant<int, 6>{});
    if constexpr (MOST_TOKENS > 6) {
        if (group <= 8) return tokens(std::integral_constant<int, 8>{});
        if (group <= 10) return tokens(std::integral_constant<int, 10>{});
        return tokens(std::integral_constant<int, MOST_TOKENS>{});
    }
}

// Whether t tokens are one that is computed as below; for float32 the sums would be too long a chain.
template <class D>
static constexpr bool by_rows(int64_t t) {
    return t == 1 && sizeof(D) < 4;
}

// One token against n columns of W, whole pairs of vectors: rows of W are read to their end, one after the other, which
// memory likes much better than columns. The sums are in memory.
template <class D>
__attribute__((noinline)) static void outer_row(const D* w, ptrdiff_t ldk, int n, const typename Mac<D>::X* x, int k,
                                                float* c) {
    constexpr int LINE = 64 / sizeof(D), LEAD = LEAD_BYTES / int(sizeof(D));
    const int rows = LEAD / n, values = LEAD % n / LINE * LINE;
    for (int i = 0; i < k; i++) {
        const D *row = w + i * ldk, *before = row + rows * ldk + values, *after = before + ldk - n;
        const f32v token = splat(scalar(x + i));
        for (int column = 0; column < n; column += 2 * LANES) {
            if (column % LINE == 0) __builtin_prefetch((values + column < n ? before : after) + column, 0, 3);
#pragma GCC unroll 2
            for (int v = column; v < column + 2 * LANES; v += LANES) store(c + v, load(c + v) + load(row + v) * token);
        }
    }
}

// t rows of X over k values against n columns of W: at most OUTER_WIDTH, or WIDER times that where by_rows<D>(t). x and
// c [..][ldc] have MOST_TOKENS - 1 rows and two vectors of columns to spare: a group of tokens is filled up with rows
// that nobody reads. With several groups `next`, what will be read afterwards, as many rows and columns, is fetched
// evenly over the steps, so that memory and arithmetic overlap.
template <class D>
static void outer_panel(const D* w, ptrdiff_t ldk, int n, const typename Mac<D>::X* x, ptrdiff_t ldx, int t, int k,
                        float* c, ptrdiff_t ldc, const D* next) {
    constexpr int PAIR = Mac<D>::PAIR;
    const int paired = k / PAIR * PAIR, whole = n / (2 * LANES) * (2 * LANES);
    if (whole && by_rows<D>(t))
        outer_row<D>(w, ldk, whole, x, paired, c);
    else if (whole)
        outer_groups<D>(w, ldk, whole, x, ldx, t, paired, c, ldc, RowsAhead<D>(next, ldk, n));
    for (int i = 0; whole < n && i < t; i += CUT_TOKENS)
        outer_tile<D, CUT_TOKENS, 2, CUT>(w + whole, ldk, x + i * ldx, ldx, paired, c + i * ldc + whole, ldc, n - whole,
                                          RowsAhead<D>(next, 0, 0), 0);
    if (paired == k) return;
    D last[PAIR][WIDER * OUTER_WIDTH];  // a row without a partner gets one of zeros
    std::memcpy(last[0], w + paired * ldk, n * sizeof(D));
    std::memset(last[PAIR - 1], 0, n * sizeof(D));
    outer_panel<D>(last[0], WIDER * OUTER_WIDTH, n, x + paired, ldx, t, PAIR, c, ldc, next);
}

}  // namespace moefuse
