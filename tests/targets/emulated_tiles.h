// The AMX tile instructions that native/amx.h uses, in plain C++: for tests on machines without them.
#pragma once

#include <immintrin.h>

#include <cstdlib>
#include <cstring>

namespace emulated {

struct Tiles {
    bool configured = false;
    unsigned short bytes[8];
    unsigned char rows[8];
    unsigned char data[8][1024];
};
inline thread_local Tiles tiles;

inline void must(bool fact) {
    if (!fact) std::abort();
}
inline void loadconfig(const void* config) {
    const auto* at = static_cast<const unsigned char*>(config);
    must(at[0] == 1 && at[1] == 0);
    std::memcpy(tiles.bytes, at + 16, sizeof tiles.bytes);
    std::memcpy(tiles.rows, at + 48, sizeof tiles.rows);
    for (int i = 0; i < 8; i++) must(tiles.bytes[i] <= 64 && tiles.rows[i] <= 16);
    tiles.configured = true;
}
inline void release() { tiles.configured = false; }
inline void load(int tile, const void* from, long stride) {
    must(tiles.configured);
    for (int row = 0; row < tiles.rows[tile]; row++)
        std::memcpy(tiles.data[tile] + 64 * row, static_cast<const char*>(from) + row * stride, tiles.bytes[tile]);
}
inline void store(int tile, void* to, long stride) {
    must(tiles.configured);
    for (int row = 0; row < tiles.rows[tile]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, tiles.data[tile] + 64 * row, tiles.bytes[tile]);
}
inline float widened(const unsigned char* at) {
    const unsigned int bits = (unsigned(at[0]) | unsigned(at[1]) << 8) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline void dpbf16ps(int sums, int left, int right) {
    must(tiles.configured && tiles.bytes[left] / 4 == tiles.rows[right]);
    for (int m = 0; m < tiles.rows[sums]; m++)
        for (int n = 0; n < tiles.bytes[sums] / 4; n++) {
            float sum;
            std::memcpy(&sum, tiles.data[sums] + 64 * m + 4 * n, sizeof sum);
            for (int k = 0; k < tiles.bytes[left] / 4; k++)
                for (int half = 0; half < 4; half += 2)
                    sum += widened(tiles.data[left] + 64 * m + 4 * k + half) *
                           widened(tiles.data[right] + 64 * k + 4 * n + half);
            std::memcpy(tiles.data[sums] + 64 * m + 4 * n, &sum, sizeof sum);
        }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::loadconfig
#define _tile_release emulated::release
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::dpbf16ps
