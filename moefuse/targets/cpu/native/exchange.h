// One step of an expert-parallel layer between ranks of one host, as Python describes it: 8 bytes per field, in this
// order (comm/native.py).
#pragma once

#include "layer.h"
#include "remote.h"

namespace moefuse {

// What holds for all steps of a context. Offsets are in bytes from the start of a window, whose layout is that of
// Capacity in comm/capacity.py.
struct Exchange {
    char* const* windows;  // [world], mapped
    int64_t world, rank, experts, top_k, max_tokens;
    int64_t epoch, edges, x, slots, weights, planes;
    int64_t x_bytes, plane_bytes;  // per row
    char* received;                // [world * max_tokens] rows
    std::atomic<uint8_t>* states;  // [world * max_tokens], zero at first
    int64_t spins;                 // looks at a rank that isn't there before sleeping
    int64_t patience_ns;           // sleep before going back to Python, who looks after signals, deaths and deadlines
};

enum Phase : int64_t { BEGIN, AWAIT_ROWS, AWAIT_RESULTS, DONE };
enum Status : int64_t { FINISHED, WAITING, NOTED, NO_MEMORY };

struct Step {
    const Exchange* exchange;
    int64_t fingerprint;
    int64_t weights_travel;
    Trace* trace;
    // The call is made again with the same Step while it answers WAITING.
    int64_t phase;
    int64_t late;  // WAITING: the rank that isn't here
    // FINISHED: token rows pulled from other ranks, and result rows that went to them.
    int64_t pulled, returned;
};

}  // namespace moefuse
