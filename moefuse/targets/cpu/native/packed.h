// C[t][n] += sum over k of W[n][k] * X[t][k] for many tokens: lanes are tokens.
//
// In: rows of W as they lie where k is contiguous, or a panel copied by interleave() where n is; and the token rows packed by pack(): blocks of WIDE tokens (the last may be half of
// that), for each 32 bits of k the tokens side by side. Out: float32 sums. Values of W are repeated over the lanes, so that no sum over lanes is left
// and a tile runs at the speed of its multiplications; worth the packing from about WIDE tokens on. Only where W
// needs no conversion (Mac<D>::X is D).
#pragma once

#include <type_traits>

#include "amx.h"
#include "dot.h"
#include "outer.h"

namespace moefuse {

constexpr int WIDE = 2 * LANES;
#if defined(MOEFUSE_ISA_AVX512)
constexpr int STRIP = 12;  // 24 sums, two vectors of tokens and a repeated weight in 32 registers
#else
constexpr int STRIP = 6;
#endif

template <class D>
constexpr bool PACKS = sizeof(typename Mac<D>::X) == sizeof(D);

// How many of t tokens are computed here, a multiple of LANES. Beyond whole blocks: as many as are cheaper in a half or
// a whole block, filled up with zeros, than as dot products (measured); all where the other form would read a whole
// panel again, and all where tiles read the weights as they lie.
template <class D>
static inline int packed_tokens(int t, bool dots) {
    const int rest = t % WIDE, blocks = t - rest;
    if (TILES<D> && dots) return (t + LANES - 1) / LANES * LANES;
    if (4 * rest <= 3 * LANES && (dots || !blocks || !rest)) return blocks;
    return blocks + (rest <= LANES || (dots && 16 * rest <= 22 * LANES) ? LANES : WIDE);
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
        const __m512i low = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), high = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), high2 = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
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

// Columns of W copied so that the words of one k (or pair of k) of neighbouring columns lie side by side: [k / PAIR]
// rows of PANEL words, of which a tile reads STRIP.
constexpr int PANEL = 192;
constexpr int PANEL_STRIDE = PANEL + 16;  // in words of 32 bits: no power of two
constexpr int PANEL_K = 512;

// How many k one lane sums up before its sum is added to the others: float32 needs shorter chains to be as precise as
// its peers; for half precision the rounding of the rows hides it.
template <class D>
constexpr int CHAIN = sizeof(D) == 4 ? 256 : PANEL_K;

// n <= PANEL columns of W [k][n], k <= PANEL_K.
template <class D>
static void interleave(const D* w, ptrdiff_t ldk, int n, int k, uint32_t* to) {
    using M = Mac<D>;
    constexpr ptrdiff_t ahead = LINES_AHEAD * 64 / (PANEL * sizeof(D));
    constexpr int LINE = 64 / sizeof(D);
    for (int i = 0; i < k; i += M::PAIR, to += PANEL_STRIDE) {
        for (int p = 0; p < M::PAIR; p++)
            for (int column = 0; column < n; column += LINE)
                __builtin_prefetch(w + (i + p + ahead) * ldk + column, 0, 3);
        for (int column = 0; column < n; column += 2 * LANES) {
            typename M::Reg raw[2];
            Columns<D>::read(w + i * ldk + column, ldk, i + 1 < k, n - column, raw);
            f32v two[2] = {bit_cast<f32v>(raw[0]), bit_cast<f32v>(raw[1])};
            Columns<D>::in_order(two);
            std::memcpy(to + column, two, sizeof two);
        }
    }
}

// Where a tile finds W: rows as they lie, `step` values from one PAIR of k to the next.
template <class D>
struct Rows {
    const D* w;
    ptrdiff_t stride;
    static constexpr ptrdiff_t step = Mac<D>::PAIR;
    static constexpr bool whole_pairs = false;  // the last value of an odd k has no partner in memory
};
// Or a panel from interleave().
template <class D>
struct Words {
    const D* w;
    static constexpr ptrdiff_t stride = Mac<D>::PAIR;
    static constexpr ptrdiff_t step = PANEL_STRIDE * Mac<D>::PAIR;
    static constexpr bool whole_pairs = true;
};

// R rows of W against a block of V vectors of tokens; sums [R][ldc] are added to. fetch(i) is called for each 64 bytes
// of k and asks for weights that will be read later.
template <class D, int R, int V, class W, class F>
static inline void packed_tile(W w, const D* x, int k, float* c, ptrdiff_t ldc, F&& fetch) {
    using M = Mac<D>;
    constexpr int LINE = 64 / sizeof(D);
    f32v sums[R][V] = {};
    const auto step = [&](const D* at, const D* block, auto&& value) __attribute__((always_inline)) {
        typename M::Reg tokens[V];
        for (int v = 0; v < V; v++) tokens[v] = M::values(block + v * M::PAIR * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const typename M::Reg weight = value(at + r * w.stride);
            for (int v = 0; v < V; v++) sums[r][v] = M::add(sums[r][v], tokens[v], weight);
        }
    };
    const D *at = w.w, *block = x;
    const int whole = W::whole_pairs ? k : k / M::PAIR * M::PAIR;
    for (int line = 0; line < whole; line += LINE) {
        fetch(line);
        const D* end = x + (line + LINE < whole ? line + LINE : whole) * V * LANES;
        for (; block < end; block += M::PAIR * V * LANES, at += w.step)
            step(at, block, [](const D* p) __attribute__((always_inline)) { return M::repeated(p); });
    }
    if (whole < k)
        step(at, block, [](const D* p) __attribute__((always_inline)) {
            D pair[2] = {*p, D{}};
            return M::repeated(pair);
        });
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float* sum = c + r * ldc + v * LANES;
            store(sum, load(sum) + sums[r][v]);
        }
}

// n rows of W against t packed tokens (`stride` values each) from k0 on; c [n][ldc]. at(row) gives a Rows or Words,
// fetch(row, rows) the function to call during the first block of tokens of a strip.
template <class D, class At, class F>
static void packed_panel(At&& at, int n, const D* x, ptrdiff_t stride, int t, int64_t k0, int k, float* c, ptrdiff_t ldc,
                         F&& fetch) {
    const auto strip = [&](auto rows, int row) {
        constexpr int R = decltype(rows)::value;
        const auto nothing = [](int) {};
        for (int i = 0; i < t; i += WIDE) {
            const D* block = x + i * stride + k0 * (t - i < WIDE ? LANES : WIDE);
            float* sums = c + row * ldc + i;
            if (t - i >= WIDE)
                i ? packed_tile<D, R, 2>(at(row), block, k, sums, ldc, nothing)
                  : packed_tile<D, R, 2>(at(row), block, k, sums, ldc, fetch(row, rows));
            else
                i ? packed_tile<D, R, 1>(at(row), block, k, sums, ldc, nothing)
                  : packed_tile<D, R, 1>(at(row), block, k, sums, ldc, fetch(row, rows));
        }
    };
    int row = 0;
    for (; row + STRIP <= n; row += STRIP) strip(std::integral_constant<int, STRIP>{}, row);
    for (; row + 4 <= n; row += 4) strip(std::integral_constant<int, 4>{}, row);
    for (; row < n; row++) strip(std::integral_constant<int, 1>{}, row);
}

// Weights as they lie, k contiguous, without tiles. `next` is what will be read after this panel.
template <class D>
static void packed_vectors(const D* w, ptrdiff_t ldw, int n, const D* x, ptrdiff_t stride, int t, int64_t k0, int k,
                           float* c, ptrdiff_t ldc, const D* next) {
    packed_panel<D>([=](int row) { return Rows<D>{w + row * ldw, ldw}; }, n, x, stride, t, k0, k, c, ldc,
                    [=](int row, auto rows) {
                        RowsAhead<D> ahead(row + 2 * rows <= n ? w + (row + rows) * ldw : next, ldw, k);
                        return [ahead](int) mutable { ahead.ask(decltype(rows)::value); };
                    });
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

// Weights whose n is contiguous: a panel is copied, then read.
template <class D>
static void packed_columns(const D* w, ptrdiff_t ldk, int n, const D* x, ptrdiff_t stride, int t, int64_t k0, int k,
                           float* c, ptrdiff_t ldc, uint32_t* panel) {
    interleave(w, ldk, n, k, panel);
    const D* words = reinterpret_cast<const D*>(panel);
    packed_panel<D>([=](int row) { return Words<D>{words + row * Mac<D>::PAIR}; }, n, x, stride, t, k0, k, c, ldc,
                    [](int, auto) { return [](int) {}; });
}

}  // namespace moefuse
