// One MoE layer on the CPU: the order of the work. One dtype per library, -DMOEFUSE_TYPE=float, bf16 or f16.
//
// In: a `Layer`. Out: y and the slots per expert. Slots are sorted by expert; the first GEMM and the activation give
// hidden rows, the second GEMM gives expert rows (both in the layer's dtype), and each token's rows are summed in
// float32 in the order of its slots. Three phases with a barrier between them, threads of the OpenMP runtime that
// torch has loaded.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "activation.h"
#include "gemm.h"
#include "layer.h"
#include "remote.h"
#include "route.h"
#include "workspace.h"

namespace moefuse {

// in gemm.cpp
extern template void multiply(const View<MOEFUSE_TYPE>&, int, const Tokens<MOEFUSE_TYPE>&, int64_t, float*, ptrdiff_t,
                              const MOEFUSE_TYPE*);
extern template void pack_rows(Tokens<MOEFUSE_TYPE>&, int64_t);

constexpr int64_t SPARE_ROWS = std::max(MOST_TOKENS, WIDE);  // what the GEMMs may touch beyond the token rows

template <class D>
class Run {
    using X = typename Mac<D>::X;

   public:
    explicit Run(const Layer& layer, int threads)
        : layer_(layer),
          routing_(layer),
          dots_{layer.weight1[0].stride_k == 1, layer.weight2.stride_k == 1},
          width_{dots_[0] ? DOT_WIDTH : joined() ? OUTER_WIDTH / 2 : OUTER_WIDTH, dots_[1] ? DOT_WIDTH : OUTER_WIDTH},
          first_(routing_, layer.experts, layer.inner, width_[0], whole_rows(0), threads),
          second_(routing_, layer.experts, layer.outputs, width_[1], whole_rows(1), threads),
          rows_(int64_t(routing_.slots.size())),
          // 64 bytes to spare: strides that are a power of two would fall on the same cache lines
          hidden_stride_(round_up(layer.inner, 32) + 32),
          rows_stride_(round_up(layer.outputs, 32) + 32),
          x_stride_(round_up(std::max(layer.hidden, layer.inner), 32) + 32),
          chunk_(std::min<int64_t>(TURNED, longest())),
          x_bytes_(round_up((chunk_ + SPARE_ROWS) * x_stride_ * sizeof(X), 64)),
          packed_bytes_(PACKS<D> && (dots_[0] || dots_[1]) && packed_tokens<D>(int(chunk_)) ? x_bytes_ : 0),
          // two vectors to spare, and no power of two
          sums_stride_((dots_[0] && dots_[1] ? DOT_WIDTH : OUTER_WIDTH) + 3 * LANES),
          widest_(whole_rows(0) || whole_rows(1) ? WIDER * OUTER_WIDTH + 3 * LANES : sums_stride_),
          sums_bytes_(
              round_up(std::max((chunk_ + SPARE_ROWS) * sums_stride_, CUT_TOKENS * widest_) * sizeof(float), 64)),
          row_bytes_(round_up(hidden_stride_ * rows_ * sizeof(D), 64)),
          result_bytes_(layer.remote ? 0 : round_up(rows_stride_ * rows_ * sizeof(D), 64)),
          workspace_(row_bytes_ + result_bytes_ + threads * scratch_bytes()) {}

    void thread(int thread, int threads) {
        const TileRegisters<D> tiles;
        if (layer_.remote && threads > 1 && thread == threads - 1) pull_ahead(thread);
        first_.work(thread, [&](const Task& task, const Task* next) { first_gemm(task, next, thread); });
        meet(threads);
        second_.work(thread, [&](const Task& task, const Task* next) { second_gemm(task, next, thread); });
        if (layer_.remote && layer_.row_norm == PLAIN) return;
        meet(threads);
        if (layer_.row_norm != PLAIN) {
            for (int64_t row = rows_ * thread / threads; row < rows_ * (thread + 1) / threads; row++) normalise(row);
            if (layer_.remote) return;
            meet(threads);
        }
        combine(thread, threads);
    }

   private:
    // All threads are here. One alone has nobody to wake, which GCC's runtime would do all the same: a system call.
    static void meet(int threads) {
        if (threads == 1) return;
#pragma omp barrier
    }

    static constexpr int64_t TURNED_BYTES = round_up(DOT_WIDTH * TURNED_STRIDE * sizeof(float), 64);

    // The weighted rows are rounded, so they can be weighted where they lie.
    bool weighs_rows() const { return layer_.position == OUTPUT && layer_.round_products; }
    bool gated() const { return layer_.gate_up != NONE; }
    // Gate and up columns alternate within each row of the weight: computed as one panel, taken apart afterwards.
    bool joined() const {
        return !dots_[0] && (layer_.gate_up == INTERLEAVED || layer_.gate_up == INTERLEAVED_SWAPPED);
    }
    bool swapped() const { return layer_.gate_up == CONCAT_SWAPPED || layer_.gate_up == INTERLEAVED_SWAPPED; }
    // Does a single token read this weight in whole rows?
    bool whole_rows(int gemm) const { return !dots_[gemm] && by_rows<D>(1); }
    // Output features that are computed at a time for t token rows.
    int panel(int gemm, int t) const { return width_[gemm] * (whole_rows(gemm) && t == 1 ? WIDER : 1); }
    int64_t longest() const {
        int64_t most = 1;
        for (int64_t e = 0; e < layer_.experts; e++)
            most = std::max<int64_t>(most, routing_.first[e + 1] - routing_.first[e]);
        return most;
    }

    char* scratch(int thread) const {
        return workspace_.data() + row_bytes_ + result_bytes_ + thread * scratch_bytes();
    }
    int64_t scratch_bytes() const {
        const int64_t row = round_up(3 * widest_ * sizeof(float), 64);
        return x_bytes_ + packed_bytes_ + 2 * sums_bytes_ + row + TURNED_BYTES;
    }
    // `count` token rows of a thread, to be filled.
    Tokens<D> tokens_of(int thread, int count) const {
        char* from = scratch(thread);
        return {reinterpret_cast<X*>(from), x_stride_, reinterpret_cast<X*>(from + x_bytes_), count, 0,
                reinterpret_cast<float*>(from + scratch_bytes() - TURNED_BYTES)};
    }
    float* sums_of(int thread, int part) const {
        return reinterpret_cast<float*>(scratch(thread) + x_bytes_ + packed_bytes_ + part * sums_bytes_);
    }
    float* row_of(int thread) const { return sums_of(thread, 2); }
    D* hidden(int64_t row) const { return reinterpret_cast<D*>(workspace_.data()) + row * hidden_stride_; }
    D* result(int64_t row) const { return reinterpret_cast<D*>(workspace_.data() + row_bytes_) + row * rows_stride_; }
    D* destination(int64_t row) const {
        return layer_.remote ? static_cast<D*>(layer_.remote->plane(routing_.slots[row])) : result(row);
    }
    const D* token(int64_t row) const {
        if (layer_.remote) return static_cast<const D*>(layer_.remote->row(routing_.slots[row]));
        return static_cast<const D*>(layer_.x) + routing_.slots[row] / layer_.top_k * layer_.x_stride;
    }
    // Rows that aren't here yet, of this expert only: the GEMMs of others run meanwhile.
    void pull(int64_t expert, int64_t row, int64_t count, int thread) const {
        const int64_t begin = layer_.remote->now();
        bool pulled = false;
        for (int64_t i = 0; i < count; i++) pulled |= layer_.remote->pull(routing_.slots[row + i]);
        if (pulled) layer_.remote->record(PULL, thread, expert, begin);
    }
    // One of several threads starts by bringing rows in the order of the experts, while the others multiply.
    void pull_ahead(int thread) const {
        for (int64_t e = 0; e < layer_.experts; e++)
            pull(e, routing_.first[e], routing_.first[e + 1] - routing_.first[e], thread);
    }
    int64_t now() const { return layer_.remote ? layer_.remote->now() : 0; }
    void record(Work kind, int64_t expert, int64_t begin, int thread) const {
        if (layer_.remote) layer_.remote->record(kind, thread, expert, begin);
    }
    float weight_of(int64_t row) const { return scalar(layer_.topk_weights, routing_.slots[row], layer_.weights_type); }

    static View<D> view(const Tensors& weight, const Tensors& bias, int64_t expert) {
        return {weight.of<D>(expert), weight.stride_n, weight.stride_k,
                bias.present() ? bias.of<D>(expert) : nullptr, bias.stride_n};
    }

    // part 0 is the gate (or the only part), part 1 the up part.
    View<D> first_view(int64_t expert, int part) const {
        const bool separate = layer_.gate_up == SEPARATE;
        View<D> all = view(layer_.weight1[separate ? part : 0], layer_.bias1[separate ? part : 0], expert);
        if (!gated() || separate || joined()) return all;
        const bool second = (part == 1) != swapped();
        if (layer_.gate_up == CONCAT || layer_.gate_up == CONCAT_SWAPPED) return all.from(second ? layer_.inner : 0);
        all = all.from(second ? 1 : 0);
        all.stride_n *= 2, all.stride_bias *= 2;
        return all;
    }

    void first_gemm(const Task& task, const Task* next, int thread) {
        const int parts = gated() && !joined() ? 2 : 1;
        const View<D> views[2] = {first_view(task.expert, 0), first_view(task.expert, parts - 1)};
        const D* after = next ? first_view(next->expert, 0).from(next->begin).w : views[0].w;
        const int64_t end = routing_.first[task.expert + 1];
        for (int64_t row = routing_.first[task.expert]; row < end; row += chunk_) {
            const int t = int(std::min(chunk_, end - row));
            Tokens<D> tokens = tokens_of(thread, t);
            if (layer_.remote) pull(task.expert, row, t, thread);
            const int64_t begin = now();
            for (int i = 0; i < t; i++) {
                const float scale = layer_.position == INPUT ? weight_of(row + i) : 1.f;
                gather(tokens.rows + i * x_stride_, token(row + i), layer_.hidden,
                       layer_.position == INPUT ? &scale : nullptr);
            }
            if (dots_[0]) pack_rows(tokens, layer_.hidden);
            const int width = panel(0, t);
            for (int n = task.begin; n < task.end; n += width) {
                const int own = std::min(width, task.end - n), columns = joined() ? 2 * own : own;
                for (int part = 0; part < parts; part++) {
                    const D* then = part + 1 < parts       ? views[1].from(n).w
                                    : n + width < task.end ? views[0].from(n + width).w
                                                           : after;
                    multiply(views[part].from(joined() ? 2 * n : n), columns, tokens, layer_.hidden,
                             sums_of(thread, part), sums_stride_, then);
                }
                for (int i = 0; i < t; i++) activate_row(row + i, i, n, own, thread);
            }
            record(FIRST_GEMM, task.expert, begin, thread);
        }
    }

    void activate_row(int64_t row, int i, int n, int own, int thread) {
        const float* gate = sums_of(thread, 0) + i * sums_stride_;
        const float* up = sums_of(thread, gated() ? 1 : 0) + i * sums_stride_;
        float* out = row_of(thread);
        if (joined()) {
            float *first = out + widest_, *second = first + widest_;
            for (int j = 0; j < own; j++) first[j] = gate[2 * j], second[j] = gate[2 * j + 1];
            gate = swapped() ? second : first, up = swapped() ? first : second;
        }
        if (layer_.activation == CUSTOM)
            layer_.custom(gate, up, out, own);
        else
            activate<D>(layer_.activation, layer_.params, layer_.round_activation, gate, up, out, own);
        const bool scales = layer_.position == MID;
        store_row(hidden(row) + n, out, own, scales ? weight_of(row) : 1.f, scales);
    }

    void second_gemm(const Task& task, const Task* next, int thread) {
        const View<D> all = view(layer_.weight2, layer_.bias2, task.expert);
        const D* after = next ? view(layer_.weight2, layer_.bias2, next->expert).from(next->begin).w : all.w;
        const int64_t end = routing_.first[task.expert + 1];
        for (int64_t row = routing_.first[task.expert]; row < end; row += chunk_) {
            const int t = int(std::min(chunk_, end - row));
            Tokens<D> tokens = tokens_of(thread, t);
            const int64_t begin = now();
            for (int i = 0; i < t; i++) gather(tokens.rows + i * x_stride_, hidden(row + i), layer_.inner, nullptr);
            if (dots_[1]) pack_rows(tokens, layer_.inner);
            const int width = panel(1, t);
            for (int n = task.begin; n < task.end; n += width) {
                const int own = std::min(width, task.end - n);
                multiply(all.from(n), own, tokens, layer_.inner, sums_of(thread, 0), sums_stride_,
                         n + width < task.end ? all.from(n + width).w : after);
                const bool scales = weighs_rows() && layer_.row_norm == PLAIN;
                for (int i = 0; i < t; i++)
                    store_row(destination(row + i) + n, sums_of(thread, 0) + i * sums_stride_, own,
                              scales ? weight_of(row + i) : 1.f, scales);
            }
            record(SECOND_GEMM, task.expert, begin, thread);
        }
    }

    // A row in the GEMM's own type, zero-padded to whole steps; scaled ones are rounded to the layer's dtype first.
    static void gather(X* to, const D* from, int64_t k, const float* scale) {
        const int64_t padded = round_up(k, 32);
        if constexpr (sizeof(X) == sizeof(D)) {
            if (!scale) {
                std::memcpy(to, from, k * sizeof(D));
                std::memset(static_cast<void*>(to + k), 0, (padded - k) * sizeof(X));
                return;
            }
        }
        for (int64_t i = 0; i < padded; i += LANES) {
            f32v value = i + LANES <= k ? load(from + i) : load_some(from + i, int(k - i));
            if (scale) value = rounded<D>(value * *scale);
            store(to + i, value);
        }
    }

    // Rounded to the layer's dtype; then, if asked for, scaled and rounded again.
    static void store_row(D* to, const float* from, int n, float scale, bool scales) {
        for (int i = 0; i < n; i += LANES) {
            f32v value = load(from + i);
            if (scales) value = rounded<D>(value) * scale;
            store_up_to(to + i, value, n - i);
        }
    }

    // One row of the second GEMM over its mean square, in place; weighted as well where weighted rows are rounded.
    void normalise(int64_t row) {
        D* values = destination(row);
        const int64_t n = layer_.outputs;
        const bool first = layer_.row_scale && layer_.row_norm == SCALED_RMS, second = layer_.row_scale && !first;
        const int64_t scales = layer_.row_scale ? expert_of(row) * layer_.row_scale_expert : 0;
        const auto scale = [=](int64_t i) __attribute__((noinline)) {  // beyond the last: 0
            if (layer_.row_scale_stride == 1 && i + LANES <= n)
                return load(layer_.row_scale, scales + i, layer_.row_scale_type);
            f32v found = {};
            for (int64_t j = 0; j < LANES && i + j < n; j++)
                found[j] = scalar(layer_.row_scale, scales + (i + j) * layer_.row_scale_stride, layer_.row_scale_type);
            return found;
        };
        const auto value = [=](int64_t i) __attribute__((noinline)) {
            const f32v own = i + LANES <= n ? load(values + i) : load_some(values + i, int(n - i));
            return first ? rounded<D>(own * scale(i)) : own;
        };
        f32v squares = {};
        for (int64_t i = 0; i < n; i += LANES) {
            const f32v own = value(i);
            squares += own * own;
        }
        const float factor = 1.f / std::sqrt(lane_sum(squares) / float(n) + float(layer_.row_norm_eps));
        const float weight = weighs_rows() ? weight_of(row) : 1.f;
        for (int64_t i = 0; i < n; i += LANES) {
            f32v normal = value(i) * factor;
            if (second) normal *= scale(i);
            if (weighs_rows()) normal = rounded<D>(normal) * weight;
            store_up_to(values + i, normal, int(n - i));
        }
    }
    int64_t expert_of(int64_t row) const {
        const auto& first = routing_.first;
        return std::upper_bound(first.begin(), first.end(), int32_t(row)) - first.begin() - 1;
    }

    void combine(int thread, int threads) {
        constexpr int64_t BLOCK = 512;
        const int64_t blocks = (layer_.outputs + BLOCK - 1) / BLOCK, all = layer_.tokens * blocks;
        const bool weighs = layer_.position == OUTPUT && !weighs_rows();
        std::vector<float> weights(layer_.top_k, 1.f);
        for (int64_t i = all * thread / threads; i < all * (thread + 1) / threads; i++) {
            const int64_t token = i / blocks, begin = i % blocks * BLOCK, end = std::min(layer_.outputs, begin + BLOCK);
            const int32_t* rows = routing_.position.data() + token * layer_.top_k;
            for (int64_t j = 0; weighs && j < layer_.top_k; j++)
                weights[j] = scalar(layer_.topk_weights, token * layer_.top_k + j, layer_.weights_type);
            for (int64_t n = begin; n < end; n += LANES) {
                f32v sum = {};
                for (int64_t j = 0; j < layer_.top_k; j++) {
                    // reads into the padding of the row where fewer than LANES values are left
                    if (rows[j] >= 0)
                        sum += load(result(rows[j]) + n) * weights[j];
                    else if (rows[j] == IDENTITY_EXPERT)
                        sum += identity<D>(layer_, token * layer_.top_k + j, n);
                }
                store(layer_.y, token * layer_.outputs + n, layer_.out_type, sum, int(end - n));
            }
        }
    }

    const Layer& layer_;
    const Routing routing_;
    const bool dots_[2];
    const int width_[2];  // of the smallest task
    Tasks first_, second_;
    const int64_t rows_, hidden_stride_, rows_stride_, x_stride_, chunk_;
    const int64_t x_bytes_, packed_bytes_, sums_stride_, widest_, sums_bytes_, row_bytes_, result_bytes_;
    const Workspace workspace_;
};

void run(const Layer& layer) {
    const int threads = int(layer.threads);
    Run<MOEFUSE_TYPE> run(layer, threads);
    if (threads == 1) return run.thread(0, 1);
#pragma omp parallel num_threads(threads)
    // fewer threads than asked for do the work of all
    run.thread(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace moefuse

static thread_local moefuse::Layer last;
static thread_local int64_t calls = 0;

// What Python calls. 0, or 1 where memory ran out.
extern "C" int moefuse_run(const moefuse::Layer* layer) {
    last = *layer, calls++;
    try {
        moefuse::run(*layer);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
// What this thread ran last, and how many calls it made.
extern "C" const moefuse::Layer* moefuse_last(int64_t* count) {
    *count = calls;
    return &last;
}
extern "C" int64_t moefuse_layer_bytes() { return sizeof(moefuse::Layer); }
extern "C" int64_t moefuse_workspace_bytes() { return int64_t(moefuse::Workspace::held()); }
extern "C" void moefuse_release_workspace() { moefuse::Workspace::release(); }
