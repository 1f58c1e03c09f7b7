// The limits that `moefuse bench` compares with: reading memory, and the multiplications of the kernel's own form.
#include "packed.h"

using moefuse::f32v;

// One pass over `bytes` at `from`, each thread a stretch of its own. The result depends on what was read.
extern "C" double probe_read(const char* from, int64_t bytes, int threads) {
    float total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t block = 0; block < bytes / 4096; block++) {
        f32v sums[4] = {};
        const float* at = reinterpret_cast<const float*>(from + block * 4096);
        for (int i = 0; i < 1024; i += 4 * moefuse::LANES)
            for (int j = 0; j < 4; j++) {
                __builtin_prefetch(reinterpret_cast<const char*>(at + i + j * moefuse::LANES) + 8192);
                sums[j] += moefuse::load(at + i + j * moefuse::LANES);
            }
        total += (sums[0] + sums[1] + sums[2] + sums[3])[0];
    }
    return total;
}

// Multiplications and additions with all operands in the L1 cache: how many there were.
template <class D>
static double peak(int threads) {
    // as many sums as there are registers for
    constexpr int ALL = moefuse::LANES == 16 ? 12 : moefuse::STRIP;
    constexpr int K = 256, ROUNDS = 4000, ROWS = moefuse::TILES<D> ? moefuse::WIDE : ALL;
#pragma omp parallel num_threads(threads)
    {
        alignas(64) static thread_local D w[ROWS * (K + 32)], x[K * moefuse::WIDE];
        alignas(64) static thread_local float c[ROWS * moefuse::WIDE];
        const moefuse::TileRegisters<D> tiles;
        for (int i = 0; i < ROUNDS; i++)
#if defined(MOEFUSE_AMX)
            if constexpr (moefuse::TILES<D>)
                moefuse::tile_block<2, 2>(w, K + 32, x, K, c, moefuse::WIDE, [](int) {});
            else
#endif
            moefuse::packed_tile<D, ALL, 2>(w, K + 32, x, K, c, moefuse::WIDE, moefuse::RowsAhead<D>(w, 0, 0), 0);
    }
    return 2.0 * threads * ROUNDS * ROWS * moefuse::WIDE * K;
}
extern "C" double probe_peak(int half, int threads) {
    if constexpr (moefuse::PACKS<moefuse::bf16>)
        if (half) return peak<moefuse::bf16>(threads);
    return peak<float>(threads);
}
