// C[t][n] += sum over k of W[n][k] * X[t][k] for weights whose k is contiguous: dot products of rows as they lie.
//
// In: rows of W (unit stride along k, any stride between rows) and of X (Mac<D>::X, zero-padded to STEP).
// Out: float32 sums. One weight row at a time by a few token rows, or a tile of ROWS by up to TOKENS, stays in
// registers along k; neither operand is packed or transposed, and each sum has one order whatever the tile it was in.
#pragma once

#include "ahead.h"
#include "mac.h"

namespace moefuse {

constexpr int DOT_WIDTH = 48;  // output features at a time
constexpr int ROWS = 4;
constexpr int FEW = 8;  // tokens that cost less than reading the weights
#if defined(MOEFUSE_ISA_AVX512)
constexpr int TOKENS = 6;  // 24 sums, 4 weights and a token value in 32 registers
#else
constexpr int TOKENS = 2;  // 8 sums in 16 registers
#endif

#if defined(MOEFUSE_ISA_AVX512)
// The sums of the lanes of four vectors, side by side.
static inline __m128 lane_sums(f32v a, f32v b, f32v c, f32v d) {
    const __m512 ab = bit_cast<__m512>(bit_cast<f32v>(_mm512_unpacklo_ps(bit_cast<__m512>(a), bit_cast<__m512>(b))) +
                                       bit_cast<f32v>(_mm512_unpackhi_ps(bit_cast<__m512>(a), bit_cast<__m512>(b))));
    const __m512 cd = bit_cast<__m512>(bit_cast<f32v>(_mm512_unpacklo_ps(bit_cast<__m512>(c), bit_cast<__m512>(d))) +
                                       bit_cast<f32v>(_mm512_unpackhi_ps(bit_cast<__m512>(c), bit_cast<__m512>(d))));
    const __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xee);
    const __m512 quads = _mm512_add_ps(low, high);
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}
static inline void add_lane_sums(float* c, f32v a, f32v b, f32v d, f32v e) {
    _mm_storeu_ps(c, _mm_add_ps(_mm_loadu_ps(c), lane_sums(a, b, d, e)));
}
static inline float lane_sum(f32v a) { return _mm_cvtss_f32(lane_sums(a, a, a, a)); }
#else
static inline float lane_sum(f32v a) {
    // the order of the pairs is that of halving
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}
static inline void add_lane_sums(float* c, f32v a, f32v b, f32v d, f32v e) {
    c[0] += lane_sum(a), c[1] += lane_sum(b), c[2] += lane_sum(d), c[3] += lane_sum(e);
}
#endif

// One tile; meanwhile the first `rows` rows at `later` are asked for.
template <class D, int R, int T>
static inline void dot_tile(const D* w, ptrdiff_t ldw, const typename Mac<D>::X* x, ptrdiff_t ldx, int k, float* c,
                            ptrdiff_t ldc, const D* later, int rows) {
    using M = Mac<D>;
    RowsAhead<D> ahead(later, ldw, k);
    f32v sums[R][T] = {};
    const int whole = k / M::STEP * M::STEP;
    int i = 0;
    for (; i < whole; i += M::STEP) {
        ahead.ask(rows);
        typename M::Reg few[R < T ? R : T];  // of the side that has fewer
        if constexpr (R < T) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) few[r] = M::weights(w + r * ldw + i);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const typename M::Reg values = M::values(x + t * ldx + i);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sums[r][t] = M::add(sums[r][t], few[r], values);
            }
        } else {
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) few[t] = M::values(x + t * ldx + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const typename M::Reg row = M::weights(w + r * ldw + i);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) sums[r][t] = M::add(sums[r][t], row, few[t]);
            }
        }
    }
    if (i < k) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const typename M::Reg row = M::weights(w + r * ldw + i, k - i);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) sums[r][t] = M::add(sums[r][t], row, M::values(x + t * ldx + i));
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        if constexpr (R % ROWS == 0) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r += ROWS)
                add_lane_sums(c + t * ldc + r, sums[r][t], sums[r + 1][t], sums[r + 2][t], sums[r + 3][t]);
        } else {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) c[t * ldc + r] += lane_sum(sums[r][t]);
        }
    }
}

// Tall tiles stay functions of their own: beside the loops around them the compiler runs out of registers.
template <class D, int R, int T>
__attribute__((noinline)) static void tall_tile(const D* w, ptrdiff_t ldw, const typename Mac<D>::X* x, ptrdiff_t ldx,
                                                int k, float* c, ptrdiff_t ldc, const D* later, int rows) {
    dot_tile<D, R, T>(w, ldw, x, ldx, k, c, ldc, later, rows);
}

template <class D, int R, int MOST, int T = MOST>
static inline void dot_tokens(int tokens, const D* w, ptrdiff_t ldw, const typename Mac<D>::X* x, ptrdiff_t ldx, int k,
                              float* c, ptrdiff_t ldc, const D* later, int rows) {
    if constexpr (T > 2 * MOST / 3) {  // more than FEW tokens in groups of at most MOST: none is smaller
        if (tokens < T) return dot_tokens<D, R, MOST, T - 1>(tokens, w, ldw, x, ldx, k, c, ldc, later, rows);
    }
    if constexpr (R > ROWS)
        tall_tile<D, R, T>(w, ldw, x, ldx, k, c, ldc, later, rows);
    else
        dot_tile<D, R, T>(w, ldw, x, ldx, k, c, ldc, later, rows);
}

// Strips of R rows from `row` on against groups of at most T tokens; gives the first row that is left. The rows of the
// strip to come are fetched evenly over the groups, so that memory and arithmetic overlap.
template <class D, int R, int T>
static int dot_strips(int row, const D* w, ptrdiff_t ldw, int n, const typename Mac<D>::X* x, ptrdiff_t ldx, int t,
                      int k, float* c, ptrdiff_t ldc, const D* next) {
    const int groups = (t + T - 1) / T;
    for (; row + R <= n; row += R) {
        const D* later = row + R < n ? w + (row + R) * ldw : next;
        for (int g = 0; g < groups; g++) {
            const int begin = t * g / groups, end = t * (g + 1) / groups, first = R * g / groups;
            dot_tokens<D, R, T>(end - begin, w + row * ldw, ldw, x + begin * ldx, ldx, k, c + begin * ldc + row, ldc,
                                later + first * ldw, R * (g + 1) / groups - first);
        }
    }
    return row;
}

// As dot_panel, for T tokens. One row of W after the other: a few tokens cost less than reading W, and memory is
// fastest when the loads themselves are in the order of the addresses. `next` are rows that lie as those of W do.
template <class D, int T>
__attribute__((noinline)) static void dot_rows(const D* w, ptrdiff_t ldw, int n, const typename Mac<D>::X* x,
                                               ptrdiff_t ldx, int k, float* c, ptrdiff_t ldc, const D* next) {
    using M = Mac<D>;
    constexpr int LINE = 64 / sizeof(D), LEAD = LEAD_BYTES / int(sizeof(D));
    const int whole = k / M::STEP * M::STEP, rows = LEAD / k, values = LEAD % k / LINE * LINE;
    f32v sums[T][ROWS];
    for (int row = 0; row < n; row++) {
        const D* own = w + row * ldw;
        const auto ahead = [=](int i) { return i < n ? w + i * ldw : next + (i - n) * ldw; };
        const D *before = ahead(row + rows) + values, *after = ahead(row + rows + 1) + values - k;
        f32v sum[T] = {};
        const auto add = [&](int i, typename M::Reg weights) {
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) sum[t] = M::add(sum[t], weights, M::values(x + t * ldx + i));
        };
        int i = 0;
        for (; i < whole; i += M::STEP) {
            if (i % LINE == 0) __builtin_prefetch((values + i < k ? before : after) + i, 0, 3);
            add(i, M::weights(own + i));
        }
        if (i < k) add(i, M::weights(own + i, k - i));
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[t][row % ROWS] = sum[t];
        if (row % ROWS < ROWS - 1 && row < n - 1) continue;
        for (int t = 0; t < T; t++) {
            float* to = c + t * ldc + row / ROWS * ROWS;
            if (row % ROWS == ROWS - 1)
                add_lane_sums(to, sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
            else
                for (int r = 0; r <= row % ROWS; r++) to[r] += lane_sum(sums[t][r]);
        }
    }
}

template <class D, int T>
static inline void few_tokens(const D* w, ptrdiff_t ldw, int n, const typename Mac<D>::X* x, ptrdiff_t ldx, int t,
                              int k, float* c, ptrdiff_t ldc, const D* next) {
    if constexpr (T > 1) {
        if (t < T) return few_tokens<D, T - 1>(w, ldw, n, x, ldx, t, k, c, ldc, next);
    }
    dot_rows<D, T>(w, ldw, n, x, ldx, k, c, ldc, next);
}

// n rows of W against t rows of X over k values; c [t][ldc] is added to. `next` is what will be read afterwards.
template <class D>
static void dot_panel(const D* w, ptrdiff_t ldw, int n, const typename Mac<D>::X* x, ptrdiff_t ldx, int t, int k,
                      float* c, ptrdiff_t ldc, const D* next) {
    if (t <= FEW) return few_tokens<D, FEW>(w, ldw, n, x, ldx, t, k, c, ldc, next);
    int row = 0;
#if defined(MOEFUSE_ISA_AVX512)
    // more rows and fewer tokens per tile read the token rows, which the L1 cache can't hold, half as often
    if (t > TOKENS) row = dot_strips<D, 2 * ROWS, 3>(row, w, ldw, n, x, ldx, t, k, c, ldc, next);
#endif
    row = dot_strips<D, ROWS, TOKENS>(row, w, ldw, n, x, ldx, t, k, c, ldc, next);
    dot_strips<D, 1, 2>(row, w, ldw, n, x, ldx, t, k, c, ldc, next);
}

}  // namespace moefuse
