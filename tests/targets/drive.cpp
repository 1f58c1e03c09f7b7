// Drives the kernel over shapes and layouts with every tensor in a heap block of exactly its size, so that a sanitizer
// sees each access that is out of bounds. In: the number of the library's dtype. Prints the number of layers.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../moefuse/targets/cpu/native/layer.h"

extern "C" int moefuse_run(const moefuse::Layer*);
extern "C" void moefuse_release_workspace();

using moefuse::Layer;
using moefuse::Tensors;

static unsigned state = 1;
static unsigned draw() { return state = state * 1664525u + 1013904223u, state >> 8; }

struct Block {
    explicit Block(size_t bytes) : data(static_cast<unsigned char*>(std::malloc(bytes ? bytes : 1))) {
        for (size_t i = 0; i < bytes; i++) data[i] = draw() & 0x3b;  // small numbers in every dtype
    }
    ~Block() { std::free(data); }
    unsigned char* data;
};

static int drive(int64_t type, int64_t tokens, int64_t top_k, int64_t experts, int64_t h, int64_t i, int64_t o,
                 int64_t gate_up, bool rows, bool bias, int64_t position, int64_t threads) {
    const int64_t size = type == moefuse::FLOAT32 ? 4 : 2;
    const int64_t n = gate_up == moefuse::NONE || gate_up == moefuse::SEPARATE ? i : 2 * i;
    const int parts = gate_up == moefuse::SEPARATE ? 2 : 1;
    Block x(tokens * h * size), weights(tokens * top_k * 4), y(tokens * o * size), nums(experts * 4);
    std::vector<int64_t> ids(tokens * top_k);
    for (auto& id : ids) id = int64_t(draw() % (experts + 2)) - 1;
    Block w1a(experts * n * h * size), w1b(experts * n * h * size), w2(experts * o * i * size);
    Block b1a(experts * n * size), b1b(experts * n * size), b2(experts * o * size);
    const auto weight = [&](Block& block, int64_t out, int64_t in) {
        return Tensors{nullptr, reinterpret_cast<char*>(block.data), out * in * size, rows ? in : 1, rows ? 1 : out};
    };
    const auto vector = [&](Block& block, int64_t out) {
        return bias ? Tensors{nullptr, reinterpret_cast<char*>(block.data), out * size, 1, 0} : Tensors{};
    };
    Layer layer{};
    layer.x = x.data, layer.x_stride = h;
    layer.topk_ids = ids.data(), layer.ids_are_64 = 1;
    layer.topk_weights = weights.data, layer.weights_type = moefuse::FLOAT32;
    layer.tokens = tokens, layer.top_k = top_k, layer.experts = experts;
    layer.hidden = h, layer.inner = i, layer.outputs = o;
    layer.type = type, layer.out_type = type;
    layer.gate_up = gate_up, layer.activation = gate_up == moefuse::NONE ? 11 : 0;
    layer.params[0] = __builtin_inf();
    layer.position = position, layer.round_products = tokens & 1;
    layer.weight1[0] = weight(w1a, n, h), layer.weight1[1] = weight(parts == 2 ? w1b : w1a, n, h);
    layer.weight2 = weight(w2, o, i);
    Block scale(experts * o * 4);
    layer.row_norm = tokens % 3, layer.row_norm_eps = 0.5;
    if (layer.row_norm) layer.row_scale = scale.data, layer.row_scale_type = moefuse::FLOAT32;
    layer.row_scale_stride = 1, layer.row_scale_expert = o;
    layer.identities = h == o;
    layer.bias1[0] = vector(b1a, n), layer.bias1[1] = vector(parts == 2 ? b1b : b1a, n), layer.bias2 = vector(b2, o);
    layer.y = y.data, layer.nums = reinterpret_cast<int32_t*>(nums.data), layer.threads = threads;
    return moefuse_run(&layer);
}

int main(int, char** arguments) {
    const int64_t type = std::atoi(arguments[1]);
    const int64_t shapes[][6] = {{0, 2, 3, 5, 4, 6},     {1, 1, 1, 1, 1, 1},       {5, 3, 4, 33, 7, 49},
                                 {17, 2, 3, 31, 50, 13}, {60, 1, 2, 70, 97, 35},   {230, 1, 1, 40, 12, 200},
                                 {9, 2, 2, 1100, 3, 5},  {11, 2, 2, 37, 5, 37}};
    int layers = 0;
    for (const auto& s : shapes)
        for (int64_t gate_up = 0; gate_up < 6; gate_up++)
            for (int rows = 0; rows < 2; rows++) {
                const int one = layers++ % 3;
                if (drive(type, s[0], s[1], s[2], s[3], s[4], s[5], gate_up, rows, one != 0, one, 1 + one)) return 1;
            }
    moefuse_release_workspace();
    std::printf("%d layers\n", layers);
    return 0;
}
