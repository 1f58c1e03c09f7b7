// C[t][n] += sum over k of W[n][k] * X[t][k] for weights whose k is contiguous: dot products of rows as they lie.
//
// In: rows of W (unit stride along k, any stride between rows) and of X (Mac<D>::X, zero-padded to STEP).
// Out: float32 sums. A tile of ROWS weight rows by up to TOKENS token rows stays in registers along k; neither
// operand is packed or transposed, and each sum has one fixed order whatever the tile it was in.
#pragma once

#include "mac.h"

namespace moefuse {

constexpr int ROWS = 4;
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

// Weights to fetch while a tile computes: the first `rows` rows at `from`, with the stride of W.
template <class D>
struct Fetch {
    const D* from;
    int rows;
};

template <class D, int R, int T>
static void dot_tile(const D* w, ptrdiff_t ldw, const typename Mac<D>::X* x, ptrdiff_t ldx, int k, float* c,
                     ptrdiff_t ldc, Fetch<D> fetch) {
    using M = Mac<D>;
    f32v sums[R][T] = {};
    const int whole = k / M::STEP * M::STEP;
    int i = 0;
    for (; i < whole; i += M::STEP) {
        typename M::Reg rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            rows[r] = M::weights(w + r * ldw + i);
            if (r < fetch.rows) __builtin_prefetch(fetch.from + r * ldw + i, 0, 3);
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            const typename M::Reg values = M::values(x + t * ldx + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][t] = M::add(sums[r][t], rows[r], values);
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
        if constexpr (R == ROWS) {
            add_lane_sums(c + t * ldc, sums[0][t], sums[1][t], sums[2][t], sums[3][t]);
        } else {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) c[t * ldc + r] += lane_sum(sums[r][t]);
        }
    }
}

template <class D, int R, int T = TOKENS>
static inline void dot_tokens(int tokens, const D* w, ptrdiff_t ldw, const typename Mac<D>::X* x, ptrdiff_t ldx,
                              int k, float* c, ptrdiff_t ldc, Fetch<D> fetch) {
    if constexpr (T > 1) {
        if (tokens < T) return dot_tokens<D, R, T - 1>(tokens, w, ldw, x, ldx, k, c, ldc, fetch);
    }
    dot_tile<D, R, T>(w, ldw, x, ldx, k, c, ldc, fetch);
}

// n rows of W against t rows of X over k values; c [t][ldc] is added to. `next` is what will be read afterwards:
// the rows to come are fetched evenly over the token groups, so that memory and arithmetic overlap.
template <class D>
static void dot_panel(const D* w, ptrdiff_t ldw, int n, const typename Mac<D>::X* x, ptrdiff_t ldx, int t, int k,
                      float* c, ptrdiff_t ldc, const D* next) {
    const int groups = (t + TOKENS - 1) / TOKENS, group = (t + groups - 1) / groups;
    for (int row = 0; row + ROWS <= n; row += ROWS) {
        const D* after = row + ROWS < n ? w + (row + ROWS) * ldw : next;
        for (int i = 0, g = 0; i < t; i += group, g++) {
            const int from = g * ROWS / groups, to = (g + 1) * ROWS / groups;
            dot_tokens<D, ROWS>(t - i < group ? t - i : group, w + row * ldw, ldw, x + i * ldx, ldx, k,
                                c + i * ldc + row, ldc, {after + from * ldw, to - from});
        }
    }
    for (int row = n / ROWS * ROWS; row < n; row++)
        for (int i = 0; i < t; i += group)
            dot_tokens<D, 1>(t - i < group ? t - i : group, w + row * ldw, ldw, x + i * ldx, ldx, k, c + i * ldc + row,
                             ldc, {next, 0});
}

}  // namespace moefuse
