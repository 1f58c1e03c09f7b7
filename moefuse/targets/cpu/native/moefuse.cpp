// What Python calls.
#include "layer.h"
#include "workspace.h"

// 0, or 1 where memory ran out.
extern "C" int moefuse_run(const moefuse::Layer* layer) {
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
extern "C" int64_t moefuse_layer_bytes() { return sizeof(moefuse::Layer); }
extern "C" int64_t moefuse_workspace_bytes() { return int64_t(moefuse::Workspace::held()); }
extern "C" void moefuse_release_workspace() { moefuse::Workspace::release(); }
