// bfloat16 products on AMX tiles: C[n][t] += sum over k of W[n][k] * X[t][k], with W as it lies.
//
// In: rows of W whose k is contiguous (16 of them by 32 k are a left operand as they lie), and token rows packed by
// pack(), which lays out what the right operand has to be. Out: float32 sums, tokens in the columns. Built with
// -DMOEFUSE_AMX. So far it ran in an emulation of the instructions only: correct there, never timed.
#pragma once

#include <type_traits>

#include "mac.h"

#if defined(MOEFUSE_EMULATED_TILES)
#include MOEFUSE_EMULATED_TILES
#endif

namespace moefuse {

#if defined(MOEFUSE_AMX)
template <class D>
constexpr bool TILES = sizeof(D) == 2 && Mac<D>::PAIR == 2;
#else
template <class D>
constexpr bool TILES = false;
#endif

// The tile registers of the calling thread, all of 16 rows of 64 bytes, until it goes; other users set up their own.
template <class D, bool USED = TILES<D>>
struct TileRegisters {
    TileRegisters() {}
};

#if defined(MOEFUSE_AMX)
constexpr int TILE_ROWS = 16, TILE_K = 32;

template <class D>
struct TileRegisters<D, true> {
    TileRegisters() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
};

// R * 16 rows of W by V * 16 tokens over k values, a multiple of 32; fetch(i) asks for weights that are read later.
// Tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 tokens: the instructions want their numbers written out.
template <int R, int V, class F>
static inline void tile_block(const bf16* w, ptrdiff_t ldw, const bf16* x, int k, float* c, ptrdiff_t ldc, F&& fetch) {
    const ptrdiff_t row = ldw * sizeof(bf16), pair = V * 64, out = ldc * sizeof(float);
    float* below = c + TILE_ROWS * ldc;
    _tile_loadd(0, c, out);
    if constexpr (V == 2) _tile_loadd(1, c + TILE_ROWS, out);
    if constexpr (R == 2) _tile_loadd(2, below, out);
    if constexpr (R == 2 && V == 2) _tile_loadd(3, below + TILE_ROWS, out);
    for (int i = 0; i < k; i += TILE_K, w += TILE_K, x += TILE_K * V * TILE_ROWS) {
        fetch(i);
        _tile_loadd(4, w, row);
        _tile_loadd(6, x, pair);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (V == 2) {
            _tile_loadd(7, x + 2 * TILE_ROWS, pair);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (R == 2) {
            _tile_loadd(5, w + TILE_ROWS * ldw, row);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (R == 2 && V == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, out);
    if constexpr (V == 2) _tile_stored(1, c + TILE_ROWS, out);
    if constexpr (R == 2) _tile_stored(2, below, out);
    if constexpr (R == 2 && V == 2) _tile_stored(3, below + TILE_ROWS, out);
}

// Whole tiles of n rows against t packed tokens (`stride` values each; whole blocks of 32, the last may be 16) over k
// values from k0 on. The rows and k that are covered are the largest multiples of 16 and 32. `next` is read afterwards.
static void tile_panel(const bf16* w, ptrdiff_t ldw, int n, const bf16* x, ptrdiff_t stride, int t, int64_t k0, int k,
                       float* c, ptrdiff_t ldc, const bf16* next) {
    constexpr int WIDTH = 2 * TILE_ROWS;
    const int rows = n / TILE_ROWS * TILE_ROWS, whole = k / TILE_K * TILE_K;
    const auto strip = [&](auto tiles, int row) {
        constexpr int R = decltype(tiles)::value;
        const bf16* after = row + (R + 1) * TILE_ROWS <= n ? w + (row + R * TILE_ROWS) * ldw : next;
        for (int i = 0; i < t; i += WIDTH) {
            const bool wide = t - i >= WIDTH;
            const bf16* block = x + i * stride + k0 * (wide ? WIDTH : TILE_ROWS);
            float* sums = c + row * ldc + i;
            const auto fetch = [=](int at) {
                for (int r = 0; i == 0 && r < R * TILE_ROWS; r++) __builtin_prefetch(after + r * ldw + at, 0, 2);
            };
            wide ? tile_block<R, 2>(w + row * ldw, ldw, block, whole, sums, ldc, fetch)
                 : tile_block<R, 1>(w + row * ldw, ldw, block, whole, sums, ldc, fetch);
        }
    };
    int row = 0;
    for (; row + WIDTH <= rows; row += WIDTH) strip(std::integral_constant<int, 2>{}, row);
    if (row < rows) strip(std::integral_constant<int, 1>{}, row);
}
#endif

}  // namespace moefuse
