// The description of one call, as Python packs it: 8 bytes per field, in this order (see kernel.py).
#pragma once

#include <cstdint>

#include "vec.h"

namespace moefuse {

struct Remote;

enum GateUp : int64_t { NONE, CONCAT, INTERLEAVED, CONCAT_SWAPPED, INTERLEAVED_SWAPPED, SEPARATE };
enum Position : int64_t { OUTPUT, MID, INPUT };
enum RowNorm : int64_t { PLAIN, RMS, SCALED_RMS };

// One expert's tensors of one part: through a table of pointers (per-expert lists), or base + e * expert_bytes.
struct Tensors {
    const void* const* table;
    const char* base;
    int64_t expert_bytes;
    int64_t stride_n;  // in elements, between output features
    int64_t stride_k;  // between input features; unused by biases

    bool present() const { return table || base; }
    template <class D>
    const D* of(int64_t expert) const {
        return static_cast<const D*>(table ? table[expert] : base + expert * expert_bytes);
    }
};

struct Layer {
    const void* x;  // [tokens, hidden], unit stride along hidden
    int64_t x_stride;
    const void* topk_ids;  // [tokens, top_k], contiguous, int32 or int64
    int64_t ids_are_64;
    const void* topk_weights;  // [tokens, top_k], contiguous
    int64_t weights_type;
    int64_t tokens, top_k, experts, hidden, inner, outputs;
    int64_t type, out_type;
    int64_t gate_up;
    int64_t activation;
    double params[3];
    int64_t round_activation;  // after each of its operators
    void (*custom)(const float* gate, const float* up, float* out, int n);  // the activation if it is CUSTOM
    int64_t position;
    int64_t round_products;
    Tensors weight1[2], weight2;
    Tensors bias1[2], bias2;
    int64_t row_norm;
    double row_norm_eps;
    const void* row_scale;  // null: none
    int64_t row_scale_type;
    int64_t row_scale_expert;  // in elements: from one expert to the next, 0 where they share it
    int64_t row_scale_stride;
    int64_t identities;  // experts behind the last one that return the token's row
    void* y;        // [tokens, outputs], contiguous
    int32_t* nums;  // [experts]
    int64_t threads;
    // Expert-parallel: token rows come from and result rows go to other ranks, one slot per token; x and y are unused,
    // and the sum over slots is left to them. Null on one rank.
    Remote* remote;

    int64_t id(int64_t slot) const {
        return ids_are_64 ? static_cast<const int64_t*>(topk_ids)[slot] : static_cast<const int32_t*>(topk_ids)[slot];
    }
};

// What an identity expert adds: LANES values of the slot's token row from n on, weighted.
template <class D>
inline f32v identity(const Layer& layer, int64_t slot, int64_t n) {
    const D* x = static_cast<const D*>(layer.x) + slot / layer.top_k * layer.x_stride + n;
    const int64_t left = layer.hidden - n;
    const f32v own = left >= LANES ? load(x) : load_some(x, int(left));
    f32v product = own * scalar(layer.topk_weights, slot, layer.weights_type);
    asm("" : "+m"(product));  // no fused multiply-add where it is summed: the same bits on one rank and on several
    return layer.position != OUTPUT || layer.round_products ? rounded<D>(product) : product;
}

// Computes a layer of the library's dtype. Throws std::bad_alloc.
void run(const Layer& layer);

}  // namespace moefuse
