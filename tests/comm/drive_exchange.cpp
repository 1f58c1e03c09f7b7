// Drives steps between ranks, threads of this process, with every window and tensor in a heap block of exactly its
// size, so that a sanitizer sees each access that is out of bounds. In: the number of the library's dtype. Prints the
// number of steps, and fails where the ranks' traffic doesn't add up.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "../../moefuse/targets/cpu/native/exchange.h"

extern "C" int64_t moefuse_step(moefuse::Step*, const moefuse::Layer*);
extern "C" void moefuse_release_workspace();

using namespace moefuse;

static int64_t draw(unsigned& state, int64_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
}

struct Block {
    explicit Block(size_t bytes) : data(static_cast<char*>(std::calloc(bytes ? bytes : 1, 1))) {}
    ~Block() { std::free(data); }
    char* data;
};

struct Shape {
    int64_t world, experts, top_k, hidden, inner, outputs, tokens, threads;
};

// One rank's steps; returns rows pulled and results returned, or -1.
static int64_t rank_main(const Shape& s, int64_t rank, char* const* windows, const int64_t* offsets, int64_t type) {
    const int64_t size = type == FLOAT32 ? 4 : 2;
    Block received(s.world * s.tokens * s.hidden * size), states(s.world * s.tokens);
    Exchange exchange{windows, s.world, rank, s.experts, s.top_k, s.tokens, 48, offsets[0], offsets[1], offsets[2],
                      offsets[3], offsets[4], s.hidden * size, s.outputs * size, received.data,
                      reinterpret_cast<std::atomic<uint8_t>*>(states.data), 100, 1000000};
    Block w1(s.experts * 2 * s.inner * s.hidden * size), w2(s.experts * s.outputs * s.inner * size);
    Block nums(s.experts * 4);
    unsigned state = unsigned(rank) + 1;
    int64_t moved = 0;
    for (int64_t step = 0; step < 12; step++) {
        const int64_t tokens = step == 3 ? 0 : draw(state, s.tokens + 1), position = step % 3;
        Block x(tokens * s.hidden * size), weights(tokens * s.top_k * 4), y(tokens * s.outputs * size);
        std::vector<int64_t> ids(tokens * s.top_k);
        for (auto& id : ids) id = step == 5 ? 0 : draw(state, s.world * s.experts + 2) - 1;
        Block copy(ids.size() * 8);
        for (size_t i = 0; i < ids.size(); i++) reinterpret_cast<int64_t*>(copy.data)[i] = ids[i];
        Layer layer{};
        layer.x = x.data, layer.x_stride = s.hidden, layer.topk_ids = copy.data, layer.ids_are_64 = 1;
        layer.topk_weights = weights.data, layer.weights_type = FLOAT32;
        layer.tokens = tokens, layer.top_k = s.top_k, layer.experts = s.experts;
        layer.hidden = s.hidden, layer.inner = s.inner, layer.outputs = s.outputs;
        layer.type = type, layer.out_type = type, layer.gate_up = CONCAT, layer.params[0] = __builtin_inf();
        layer.position = position, layer.round_products = step & 1;
        layer.weight1[0] = layer.weight1[1] = {nullptr, w1.data, 2 * s.inner * s.hidden * size, s.hidden, 1};
        layer.weight2 = {nullptr, w2.data, s.outputs * s.inner * size, s.inner, 1};
        layer.y = y.data, layer.nums = reinterpret_cast<int32_t*>(nums.data), layer.threads = s.threads;
        Step call{&exchange, step, position != OUTPUT, nullptr, BEGIN, 0, 0, 0};
        int64_t status;
        while ((status = moefuse_step(&call, &layer)) == WAITING) {
        }
        if (status != FINISHED) return -1;
        moved += call.pulled + call.returned;
    }
    return moved;
}

int main(int, char** arguments) {
    const int64_t type = std::atoi(arguments[1]);
    const Shape shapes[] = {{1, 3, 2, 33, 20, 37, 9, 1}, {2, 4, 3, 64, 16, 49, 30, 1}, {2, 1, 1, 1, 1, 1, 1, 2},
                            {3, 2, 4, 130, 40, 65, 200, 2}};
    int steps = 0;
    for (const Shape& s : shapes) {
        const int64_t size = type == FLOAT32 ? 4 : 2, slots = s.tokens * s.top_k;
        const int64_t sizes[] = {s.world * (s.experts + 3) * 8, s.tokens * s.hidden * size, slots * 4, slots * 4,
                                 slots * s.outputs * size};
        int64_t offsets[5], end = 64;
        for (int i = 0; i < 5; i++) offsets[i] = end, end += i < 4 ? (sizes[i] + 63) / 64 * 64 : sizes[i];
        std::vector<Block*> blocks;
        std::vector<char*> windows;
        for (int64_t r = 0; r < s.world; r++) {
            blocks.push_back(new Block(end));
            windows.push_back(blocks.back()->data);
        }
        std::vector<int64_t> moved(s.world);
        std::vector<std::thread> ranks;
        for (int64_t r = 0; r < s.world; r++)
            ranks.emplace_back([&, r] { moved[r] = rank_main(s, r, windows.data(), offsets, type); });
        for (auto& each : ranks) each.join();
        for (Block* block : blocks) delete block;
        for (int64_t each : moved)
            if (each < 0 || (s.world == 1 && each)) return 1;
        steps += 12;
    }
    moefuse_release_workspace();
    std::printf("%d steps\n", steps);
    return 0;
}
