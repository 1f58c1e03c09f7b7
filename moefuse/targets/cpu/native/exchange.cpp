// Dispatch, experts and combine of one layer over the ranks of a host.
//
// In: a `Step`. Out: y of this rank's tokens. The rank publishes its token rows and its slots sorted by expert in its
// own window and tells every rank where that rank's slots lie; all ranks meet; the GEMMs pull what they need and write
// result rows into the windows of their owners (remote.h, run.cpp); all ranks meet; each sums its own rows. It speaks
// the protocol of comm/shared_memory.py, rank by rank: some may run that and some this.
#include "exchange.h"

#include <omp.h>

#include <climits>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moefuse {

constexpr int64_t NOTES = 2;  // after the edges of a pushed row: token count and fingerprint

static inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Until the word is no longer `seen`, or the time is over. Wakes early, or late by the time of a nap, at a rank that
// arrives without waking anyone.
static void sleep_on(std::atomic<int64_t>& word, int64_t seen, int64_t ns) {
#if defined(__linux__)
    const timespec time{time_t(ns / 1000000000), long(ns % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, int32_t(seen), &time, nullptr, 0);  // its low half: little-endian
#else
    sched_yield();
#endif
}

static void wake(std::atomic<int64_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

enum Choice : uint8_t { NO_EXPERT, SOME_EXPERT, ITSELF };

// Vector n of a token's rows, summed over its slots as one rank does it (run.cpp), so that the bits are the same.
template <class D, bool ROUNDS>
static f32v sum_slots(const Layer& layer, const D* rows, const float* weights, const uint8_t* choices, int64_t slot,
                      int64_t n) {
    const int left = int(std::min<int64_t>(LANES, layer.outputs - n));
    f32v sum = {};
    rows += n;
    for (int64_t j = 0; j < layer.top_k; j++, rows += layer.outputs) {
        if (choices[j] == ITSELF) sum += identity<D>(layer, slot + j, n);
        if (choices[j] != SOME_EXPERT) continue;
        const f32v value = left == LANES ? load(rows) : load_some(rows, left);
        f32v product = value * weights[j];
        if constexpr (ROUNDS) {
            product = rounded<D>(product);
            asm("" : "+m"(product));  // a float32 product is rounded too: no fused multiply-add
        }
        sum += product;
    }
    return sum;
}

template <class D>
static void sum_planes(const Layer& layer, int64_t experts, const D* planes) {
    const int64_t outputs = layer.outputs, top_k = layer.top_k;
    const bool weighs = layer.position == OUTPUT;
    const auto sum = weighs && layer.round_products ? sum_slots<D, true> : sum_slots<D, false>;
    const bool alone = layer.tokens * top_k * outputs < (1 << 15);  // waking threads would take longer
#pragma omp parallel num_threads(alone ? 1 : int(layer.threads))
    {
        std::vector<float> weights(top_k, 1.f);
        std::vector<uint8_t> choices(top_k);
#pragma omp for
        for (int64_t token = 0; token < layer.tokens; token++) {
            for (int64_t j = 0; j < top_k; j++) {
                const int64_t slot = token * top_k + j, id = layer.id(slot);
                const bool nobody = id < 0 || id >= experts + layer.identities;
                choices[j] = nobody ? NO_EXPERT : id < experts ? SOME_EXPERT : ITSELF;
                if (weighs) weights[j] = scalar(layer.topk_weights, slot, layer.weights_type);
            }
            const D* rows = planes + token * top_k * outputs;
            for (int64_t n = 0; n < outputs; n += LANES) {
                const f32v value = sum(layer, rows, weights.data(), choices.data(), token * top_k, n);
                store(layer.y, token * outputs + n, layer.out_type, value, int(outputs - n));
            }
        }
    }
}

class Stepping {
   public:
    Stepping(Step& step, const Layer& layer) : step_(step), ex_(*step.exchange), layer_(layer) {}

    Status go() {
        if (step_.phase == BEGIN) {
            publish();
            arrive();
            step_.phase = AWAIT_ROWS;
        }
        if (step_.phase == AWAIT_ROWS) {
            if (!all_here()) return WAITING;
            if (noted()) return NOTED;
            compute();
            arrive();
            step_.phase = AWAIT_RESULTS;
        }
        if (step_.phase == AWAIT_RESULTS) {
            if (!all_here()) return WAITING;
            const int64_t begin = now();
            combine();
            record(COMBINE, begin);
            step_.phase = DONE;
        }
        return FINISHED;
    }

   private:
    template <class T>
    T* in(int64_t rank, int64_t offset) const {
        return reinterpret_cast<T*>(ex_.windows[rank] + offset);
    }
    std::atomic<int64_t>& epoch(int64_t rank) const { return *in<std::atomic<int64_t>>(rank, ex_.epoch); }
    // What rank `source` pushed into this rank's window.
    const int64_t* edges(int64_t source) const {
        return in<int64_t>(ex_.rank, ex_.edges) + source * (ex_.experts + 1 + NOTES);
    }
    int64_t all_experts() const { return ex_.world * ex_.experts; }

    void publish() {
        const int64_t begin = now(), count = layer_.tokens * layer_.top_k, experts = all_experts();
        std::vector<int64_t> first(experts + 1);
        for (int64_t slot = 0; slot < count; slot++) {
            const int64_t id = layer_.id(slot);
            if (id >= 0 && id < experts) first[id + 1]++;
        }
        for (int64_t e = 0; e < experts; e++) first[e + 1] += first[e];
        if (layer_.tokens <= ex_.max_tokens) {  // otherwise nothing is sent, all ranks are told
            std::vector<int64_t> free(first.begin(), first.end() - 1);
            int32_t* slots = in<int32_t>(ex_.rank, ex_.slots);
            float* weights = in<float>(ex_.rank, ex_.weights);
            for (int64_t slot = 0; slot < count; slot++) {
                const int64_t id = layer_.id(slot);
                if (id < 0 || id >= experts) continue;
                const int64_t at = free[id]++;
                slots[at] = int32_t(slot);
                if (step_.weights_travel) weights[at] = scalar(layer_.topk_weights, slot, layer_.weights_type);
            }
            const int64_t stride = layer_.x_stride * (ex_.x_bytes / layer_.hidden);
            for (int64_t t = 0; t < layer_.tokens; t++)
                std::memcpy(in<char>(ex_.rank, ex_.x + t * ex_.x_bytes),
                            static_cast<const char*>(layer_.x) + t * stride, ex_.x_bytes);
        }
        for (int64_t peer = 0; peer < ex_.world; peer++) {
            int64_t* to = in<int64_t>(peer, ex_.edges) + ex_.rank * (ex_.experts + 1 + NOTES);
            std::memcpy(to, first.data() + peer * ex_.experts, (ex_.experts + 1) * sizeof(int64_t));
            to[ex_.experts + 1] = layer_.tokens, to[ex_.experts + 2] = step_.fingerprint;
        }
        record(PUBLISH, begin);
    }

    void arrive() {
        std::atomic<int64_t>& own = epoch(ex_.rank);
        own.store(own.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
        wake(own);
    }

    bool all_here() {
        const int64_t begin = now(), mine = epoch(ex_.rank).load(std::memory_order_relaxed);
        for (int64_t peer = 0; peer < ex_.world; peer++) {
            if (!here(epoch(peer), mine)) {
                step_.late = peer;
                return false;
            }
        }
        record(WAIT, begin);
        return true;
    }

    bool here(std::atomic<int64_t>& word, int64_t mine) const {
        for (int64_t i = 0; i < ex_.spins; i++) {
            if (word.load(std::memory_order_acquire) >= mine) return true;
            relax();
        }
        const int64_t end = Trace::now() + ex_.patience_ns;
        for (;;) {
            const int64_t seen = word.load(std::memory_order_acquire);
            if (seen >= mine) return true;
            const int64_t left = end - Trace::now();
            if (left <= 0) return false;
            sleep_on(word, seen, std::min<int64_t>(left, 1000000));
        }
    }

    // A rank has too many tokens or is in another layer: every rank reads the same, Python says it.
    bool noted() const {
        for (int64_t source = 0; source < ex_.world; source++) {
            const int64_t* notes = edges(source) + ex_.experts + 1;
            if (notes[0] > ex_.max_tokens || notes[1] != step_.fingerprint) return true;
        }
        return false;
    }

    void compute() {
        Remote remote{ex_.windows, ex_.rank,        ex_.top_k,    ex_.max_tokens, ex_.x,       ex_.x_bytes,
                      ex_.planes,  ex_.plane_bytes, ex_.received, ex_.states,     step_.trace, {}};
        std::vector<int32_t> ids;
        std::vector<float> weights;
        for (int64_t source = 0; source < ex_.world; source++) {
            const int64_t* own = edges(source);
            const int32_t* theirs = in<int32_t>(source, ex_.slots);
            for (int64_t e = 0; e < ex_.experts; e++) {
                for (int64_t i = own[e]; i < own[e + 1]; i++) {
                    remote.slots.push_back({int32_t(source), theirs[i]});
                    ids.push_back(int32_t(e));
                    if (step_.weights_travel) weights.push_back(in<float>(source, ex_.weights)[i]);
                }
            }
            remote.forget(source, own[ex_.experts + 1]);
            if (source != ex_.rank) step_.returned += own[ex_.experts] - own[0];
        }
        Layer layer = layer_;
        layer.topk_ids = ids.data(), layer.ids_are_64 = 0;
        layer.topk_weights = weights.data(), layer.weights_type = FLOAT32;
        layer.tokens = int64_t(ids.size()), layer.top_k = 1, layer.experts = ex_.experts, layer.identities = 0;
        if (layer.position == OUTPUT) layer.round_products = 0;  // weighed at home
        layer.remote = &remote;
        run(layer);
        step_.pulled = remote.pulled;
    }

    void combine() const { sum_planes(layer_, all_experts(), in<MOEFUSE_TYPE>(ex_.rank, ex_.planes)); }

    int64_t now() const { return step_.trace ? Trace::now() : 0; }
    void record(Work kind, int64_t begin) const {
        if (step_.trace) step_.trace->add({kind, 0, -1, begin, Trace::now()});
    }

    Step& step_;
    const Exchange& ex_;
    const Layer& layer_;
};

}  // namespace moefuse

// layer: this rank's tokens and its own experts; ids are those of all ranks; y and nums are written.
extern "C" int64_t moefuse_step(moefuse::Step* step, const moefuse::Layer* layer) {
    try {
        return moefuse::Stepping(*step, *layer).go();
    } catch (const std::bad_alloc&) {
        return moefuse::NO_MEMORY;
    }
}
extern "C" int64_t moefuse_exchange_bytes() { return sizeof(moefuse::Exchange); }
extern "C" int64_t moefuse_step_bytes() { return sizeof(moefuse::Step); }
