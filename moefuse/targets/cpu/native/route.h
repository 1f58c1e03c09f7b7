// Slots sorted by expert, and the work cut into tasks.
//
// In: topk_ids. Out: the slots of each expert in slot order (a counting sort), and per GEMM a list of tasks (expert,
// range of output features) with a first owner each: every thread starts on a stretch of neighbouring weights of
// about equal cost, and takes over tasks of others when it is done. Which thread computes a task changes no number.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "layer.h"

namespace moefuse {

constexpr int32_t NOBODY = -1, IDENTITY_EXPERT = -2;

struct Routing {
    std::vector<int32_t> first;     // [experts + 1]: where each expert's slots start
    std::vector<int32_t> slots;     // [rows]: slot (token * top_k + k) of each row
    std::vector<int32_t> position;  // [tokens * top_k]: row of each slot, NOBODY for ids that no expert has

    explicit Routing(const Layer& layer) : first(layer.experts + 1), position(layer.tokens * layer.top_k) {
        const int64_t count = layer.tokens * layer.top_k;
        for (int64_t slot = 0; slot < count; slot++) {
            const int64_t id = layer.id(slot);
            const bool exists = id >= 0 && id < layer.experts;
            const bool identity = id >= layer.experts && id < layer.experts + layer.identities;
            position[slot] = exists ? int32_t(id) : identity ? IDENTITY_EXPERT : NOBODY;
            if (exists) first[id + 1]++;
        }
        for (int64_t e = 0; e < layer.experts; e++) {
            layer.nums[e] = first[e + 1];
            first[e + 1] += first[e];
        }
        slots.resize(first[layer.experts]);
        std::vector<int32_t> free(first.begin(), first.end());
        for (int64_t slot = 0; slot < count; slot++) {
            if (position[slot] < 0) continue;
            const int32_t row = free[position[slot]]++;
            slots[row] = int32_t(slot);
            position[slot] = row;
        }
    }
};

struct Task {
    int32_t expert;
    int32_t begin, end;  // output features (of the gate part, in the first GEMM)
};

// A cache line each, so that counting one thread's tasks doesn't slow another's.
struct alignas(64) Stretch {
    std::atomic<int32_t> next{0};
    int32_t end = 0;
};

class Tasks {
   public:
    // features: output features of each expert; width: of the smallest block; whole: tasks of a single token row are as
    // large as can be, at the price that threads may wait for each other; threads >= 1.
    Tasks(const Routing& routing, int64_t experts, int64_t features, int64_t width, bool whole, int threads)
        : stretches_(threads) {
        const int64_t blocks = (features + width - 1) / width;
        int64_t cost = 0, done = 0;
        for (int64_t e = 0; e < experts; e++) cost += blocks * cost_of(routing.first[e + 1] - routing.first[e]);
        int owner = 0;
        for (int64_t e = 0; e < experts; e++) {
            const int64_t rows = routing.first[e + 1] - routing.first[e], each = cost_of(rows);
            for (int64_t block = 0, next; each && block < blocks; block = next) {
                while (owner + 1 < threads && done >= cost * (owner + 1) / threads) stretches_[owner++].end = size();
                // large ones first: they read memory in long stretches; small ones at the end even things out
                const int64_t left = (cost * (owner + 1) / threads - done) / each;
                const int64_t most = whole && rows == 1 ? left : std::min(MOST_BLOCKS, left / PARTS);
                next = std::min(blocks, block + std::max<int64_t>(1, most));
                tasks_.push_back({int32_t(e), int32_t(block * width), int32_t(std::min(features, next * width))});
                done += (next - block) * each;
            }
        }
        for (; owner < threads; owner++) stretches_[owner].end = size();
        for (int i = 1; i < threads; i++) stretches_[i].next = stretches_[i - 1].end;
    }

    // run(task, the task after it in memory or null) for every task, called by each thread once.
    template <class Run>
    void work(int thread, Run&& run) {
        const int threads = int(stretches_.size());
        for (int i = 0; i < threads; i++) {
            Stretch& stretch = stretches_[(thread + i) % threads];
            for (int32_t task; (task = stretch.next.fetch_add(1, std::memory_order_relaxed)) < stretch.end;)
                run(tasks_[task], task + 1 < stretch.end ? &tasks_[task + 1] : nullptr);
        }
    }

   private:
    int32_t size() const { return int32_t(tasks_.size()); }
    static constexpr int64_t MOST_BLOCKS = 8, PARTS = 4;

    // Of a block. Reading a weight costs as much as computing with it for about 16 token rows.
    static int64_t cost_of(int64_t rows) { return rows ? 16 + rows : 0; }

    std::vector<Task> tasks_;
    std::vector<Stretch> stretches_;
};

}  // namespace moefuse
