// Rows of other ranks: where the GEMMs of an expert-parallel layer find their token rows and leave their results.
//
// In: for each incoming slot its source rank and its number there, and the ranks' windows. Out: a token row, pulled out
// of its owner's window by the first thread that needs it and by no other, and the place in the owner's window that a
// result row belongs to. A call may keep times of what it does.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

namespace moefuse {

enum Work : int64_t { PUBLISH, WAIT, PULL, FIRST_GEMM, SECOND_GEMM, COMBINE };

// Nanoseconds of the clock that Python's time.monotonic_ns() reads, the same for all processes of a host.
struct Event {
    int64_t kind, thread, expert, begin, end;
};

// Events of one call, the first `capacity` of them; `count` may run on.
struct Trace {
    Event* events;
    int64_t capacity;
    std::atomic<int64_t> count;

    void add(const Event& event) {
        const int64_t i = count.fetch_add(1, std::memory_order_relaxed);
        if (i < capacity) events[i] = event;
    }
    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }
};

struct Remote {
    struct Slot {
        int32_t source, slot;  // slot: token * top_k + choice, at its source
    };

    char* const* windows;
    int64_t rank, top_k, max_tokens;
    int64_t x, x_bytes;            // offset in a window, bytes per row
    int64_t planes, plane_bytes;   // likewise
    char* received;                // [world * max_tokens] rows
    std::atomic<uint8_t>* states;  // of each of them
    Trace* trace;                  // null: no times are kept
    std::vector<Slot> slots;       // incoming
    std::atomic<int64_t> pulled{0};

    // Have the token row of incoming slot i here; true where this call brought it.
    bool pull(int64_t i) {
        const Slot& at = slots[i];
        if (at.source == rank) return false;
        std::atomic<uint8_t>& state = states[place(at)];
        uint8_t seen = state.load(std::memory_order_acquire);
        if (seen == ABSENT && state.compare_exchange_strong(seen, COMING, std::memory_order_acquire)) {
            std::memcpy(received + place(at) * x_bytes, theirs(at), x_bytes);
            state.store(HERE, std::memory_order_release);
            pulled.fetch_add(1, std::memory_order_relaxed);
            return true;
        }
        while (state.load(std::memory_order_acquire) != HERE) sched_yield();
        return false;
    }
    const void* row(int64_t i) const {
        const Slot& at = slots[i];
        return at.source == rank ? theirs(at) : received + place(at) * x_bytes;
    }
    void* plane(int64_t i) const { return windows[slots[i].source] + planes + slots[i].slot * plane_bytes; }

    void forget(int64_t source, int64_t tokens) {
        for (int64_t t = 0; t < tokens; t++) states[source * max_tokens + t].store(ABSENT, std::memory_order_relaxed);
    }
    int64_t now() const { return trace ? Trace::now() : 0; }
    void record(Work kind, int thread, int64_t expert, int64_t begin) const {
        if (trace) trace->add({kind, thread, expert, begin, Trace::now()});
    }

   private:
    enum State : uint8_t { ABSENT, COMING, HERE };

    int64_t place(const Slot& at) const { return at.source * max_tokens + at.slot / top_k; }
    const char* theirs(const Slot& at) const { return windows[at.source] + x + at.slot / top_k * x_bytes; }
};

}  // namespace moefuse
