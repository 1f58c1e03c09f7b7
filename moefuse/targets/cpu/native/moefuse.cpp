// What Python calls.
#include "layer.h"
#include "workspace.h"

static thread_local moefuse::Layer last;
static thread_local int64_t calls = 0;

// 0, or 1 where memory ran out.
extern "C" int moefuse_run(const moefuse::Layer* layer) {
    last = *layer, calls++;
    try {
        switch (layer->type) {
            case moefuse::FLOAT32: moefuse::run<float>(*layer); break;
            case moefuse::BFLOAT16: moefuse::run<moefuse::bf16>(*layer); break;
            default: moefuse::run<moefuse::f16>(*layer);
        }
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
