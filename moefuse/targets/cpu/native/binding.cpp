// mega_moe called without Python: the operator's plain calls on the CPU go from the dispatcher straight to the kernel.
//
// In: what the dispatcher has on its stack. Out: the kernel's results, or the same call handed on to the operator in
// Python (mega_moe_in_python), which checks everything, raises the errors, records gradients, serves modes and
// subclasses, and runs what the kernel doesn't take. Constants are trusted once a call with them went through Python
// and reached the kernel; tensors are looked at in each call, and whatever is unusual about one means Python.
// Built on its own, against torch's headers, once per torch version.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <cstdlib>
#include <set>

#include "layer.h"

namespace at {
TORCH_API int get_num_threads();
}

namespace {

using c10::IValue;
using c10::TensorImpl;
using moefuse::Layer;
using moefuse::Tensors;
using torch::jit::Stack;

// Of the schema; tests compare it with the operator's.
constexpr size_t ARGUMENTS = 25, TENSORS = 9;
enum Argument : size_t {
    CONTEXT, X, IDS, WEIGHTS, WEIGHT1, WEIGHT2, BIAS1, BIAS2, ROW_SCALE, EXPERTS, RANKS, TRANSPOSED1, TRANSPOSED2
};

constexpr int64_t MOST_DENSE_TOKENS = 64;  // of one bfloat16 expert; targets/cpu/__init__.py says why

struct Kernel {
    int (*run)(const Layer*) = nullptr;
    const Layer* (*last)(int64_t* calls) = nullptr;  // of this thread
};

struct Accepted {
    std::vector<IValue> constants;
    c10::ScalarType type;
    Layer layer;  // what follows from the constants; the rest is filled in per call
    Kernel kernel;
};

std::mutex mutex;  // of what follows
std::vector<std::shared_ptr<const Accepted>> accepted;
std::set<std::pair<const void*, const void*>> seen;  // weights that Python has met: it asks for huge pages under them
constexpr size_t MOST_ACCEPTED = 256, MOST_SEEN = 1 << 16;
std::atomic<bool> enabled{false};
Kernel kernels[moefuse::FLOAT64];  // one for each dtype that has one
std::string isa;                   // MOEFUSE_CPU_ISA that they were chosen by

bool same(const IValue& a, const IValue& b) {
    if (a.isInt()) return b.isInt() && a.toInt() == b.toInt();
    if (a.isBool()) return b.isBool() && a.toBool() == b.toBool();
    if (a.isString()) return b.isString() && a.toStringRef() == b.toStringRef();
    if (a.isDouble()) return b.isDouble() && a.toDouble() == b.toDouble();
    if (a.isNone()) return b.isNone();
    if (a.isDoubleList() && b.isDoubleList()) return a.toDoubleVector() == b.toDoubleVector();
    return false;
}

bool active() {
    const char* now = std::getenv("MOEFUSE_CPU_ISA");
    return enabled.load(std::memory_order_acquire) && isa == (now ? now : "");
}

std::shared_ptr<const Accepted> find(const IValue* arguments, c10::ScalarType type) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& known : accepted) {
        if (known->type != type) continue;
        bool equal = true;
        for (size_t i = 0; equal && i < known->constants.size(); i++)
            equal = same(known->constants[i], arguments[TENSORS + i]);
        if (equal) return known;
    }
    return nullptr;
}

bool met(const void* first, const void* last) {
    const std::lock_guard<std::mutex> lock(mutex);
    return seen.count({first, last});
}

// A plain tensor in memory.
const TensorImpl* plain(const IValue& value) {
    if (!value.isTensor()) return nullptr;
    const TensorImpl* tensor = value.unsafeToTensorImpl();
    return tensor->is_cpu() && tensor->layout() == c10::kStrided ? tensor : nullptr;
}

c10::ScalarType type_of(const TensorImpl* tensor) { return c10::typeMetaToScalarType(tensor->dtype()); }
int64_t code_of(c10::ScalarType type) {
    switch (type) {
        case c10::kFloat: return moefuse::FLOAT32;
        case c10::kBFloat16: return moefuse::BFLOAT16;
        case c10::kHalf: return moefuse::FLOAT16;
        case c10::kDouble: return moefuse::FLOAT64;
        default: return -1;
    }
}

// One that can't run where there is none.
Kernel kernel_of(c10::ScalarType type) {
    const int64_t code = code_of(type);
    if (code < 0 || code >= moefuse::FLOAT64) return {};
    const std::lock_guard<std::mutex> lock(mutex);
    return kernels[code];
}

// Tensors of one role: `parts` stacked ones of `dim` dimensions, or one of dim - 1 for each part and expert.
struct Role {
    std::vector<const TensorImpl*> tensors;
    bool stacked = false;
    std::vector<const void*> table;  // pointers, parts after one another

    // False where anything differs from that, or among the tensors.
    bool read(const IValue& list, c10::ScalarType type, int64_t dim, int64_t parts, int64_t experts) {
        if (!list.isList()) return false;
        const auto values = list.toListRef();
        if (values.empty()) return false;
        tensors.clear(), table.clear();
        for (const IValue& value : values) {
            const TensorImpl* tensor = plain(value);
            if (!tensor || type_of(tensor) != type) return false;
            if (!tensors.empty() &&
                (tensor->sizes() != tensors[0]->sizes() || tensor->strides() != tensors[0]->strides()))
                return false;
            tensors.push_back(tensor);
        }
        stacked = tensors[0]->dim() == dim;
        if (!stacked && tensors[0]->dim() != dim - 1) return false;
        if (stacked && tensors[0]->size(0) != experts) return false;
        if (int64_t(tensors.size()) != (stacked ? parts : parts * experts)) return false;
        if (!stacked)
            for (const TensorImpl* tensor : tensors) table.push_back(tensor->data());
        return true;
    }
    int64_t size(int64_t i) const { return tensors[0]->size(tensors[0]->dim() - i); }
    int64_t stride(int64_t i) const { return tensors[0]->stride(tensors[0]->dim() - i); }
    Tensors part(int64_t which, int64_t experts, int64_t stride_n, int64_t stride_k) const {
        if (!stacked) return {table.data() + which * experts, nullptr, 0, stride_n, stride_k};
        const TensorImpl* tensor = tensors[which];
        return {nullptr, static_cast<const char*>(tensor->data()),
                tensor->stride(0) * int64_t(tensor->itemsize()), stride_n, stride_k};
    }
};

struct Roles {
    Role weight1, weight2, bias1, bias2;
};

// Strides as the kernel wants them; 0 where neither is 1.
bool strides_of(const Role& weight, bool transposed, int64_t* n, int64_t* k) {
    const int64_t last_n = transposed ? 2 : 1, last_k = 3 - last_n;
    *n = weight.size(last_n) == 1 ? 1 : weight.stride(last_n);
    *k = weight.size(last_k) == 1 ? 1 : weight.stride(last_k);
    return *n == 1 || *k == 1;
}

bool biases(const IValue& list, Role& role, c10::ScalarType type, int64_t parts, int64_t experts, int64_t features,
            Tensors* to) {
    to[0] = to[parts - 1] = {};
    if (list.isNone() || (list.isList() && list.toListRef().empty())) return true;
    if (!role.read(list, type, 2, parts, experts) || role.size(1) != features) return false;
    for (int64_t part = 0; part < parts; part++) to[part] = role.part(part, experts, role.stride(1), 0);
    return true;
}

// Another target may call the kernel as well, and do more than it does.
bool for_this_target(const IValue* a) { return a[ARGUMENTS - 1].isString() && a[ARGUMENTS - 1].toStringRef() == "cpu"; }

// The call as a Layer, but for its results. False: Python has to see it.
bool describe(const IValue* a, Roles& roles, Layer& layer, Kernel& kernel) {
    if (!for_this_target(a)) return false;
    const TensorImpl *x = plain(a[X]), *ids = plain(a[IDS]), *weights = plain(a[WEIGHTS]);
    if (!x || !ids || !weights || !a[CONTEXT].isNone() || !a[ROW_SCALE].isNone()) return false;
    const auto type = type_of(x), id_type = type_of(ids);
    const auto known = find(a, type);
    if (!known) return false;
    layer = known->layer, kernel = known->kernel;
    layer.row_scale = nullptr, layer.remote = nullptr;
    const int64_t experts = a[EXPERTS].toInt();
    if (experts == 1 && type == c10::kBFloat16 && x->dim() == 2 && x->size(0) > MOST_DENSE_TOKENS) return false;
    if (x->dim() != 2 || ids->dim() != 2 || weights->dim() != 2 || ids->sizes() != weights->sizes() ||
        ids->size(0) != x->size(0) || !ids->is_contiguous() || !weights->is_contiguous() ||
        (x->stride(1) != 1 && x->size(1) > 1) || (id_type != c10::kInt && id_type != c10::kLong) ||
        code_of(type_of(weights)) < 0 || ids->numel() > INT32_MAX)
        return false;
    layer.x = x->data(), layer.x_stride = x->stride(0);
    layer.topk_ids = ids->data(), layer.ids_are_64 = id_type == c10::kLong;
    layer.topk_weights = weights->data(), layer.weights_type = code_of(type_of(weights));
    layer.tokens = x->size(0), layer.top_k = ids->size(1), layer.experts = experts, layer.hidden = x->size(1);

    const int64_t parts = layer.gate_up == moefuse::SEPARATE ? 2 : 1;
    const bool transposed1 = a[TRANSPOSED1].toBool(), transposed2 = a[TRANSPOSED2].toBool();
    if (!roles.weight1.read(a[WEIGHT1], type, 3, parts, experts) ||
        !roles.weight2.read(a[WEIGHT2], type, 3, 1, experts))
        return false;
    const int64_t features = roles.weight1.size(transposed1 ? 2 : 1);
    const bool halves = parts == 1 && layer.gate_up != moefuse::NONE;
    layer.inner = halves ? features / 2 : features;
    layer.outputs = roles.weight2.size(transposed2 ? 2 : 1);
    if (roles.weight1.size(transposed1 ? 1 : 2) != layer.hidden || (halves && features % 2) ||
        roles.weight2.size(transposed2 ? 1 : 2) != layer.inner ||
        (layer.identities && layer.outputs != layer.hidden))
        return false;
    int64_t n, k;
    if (!strides_of(roles.weight1, transposed1, &n, &k)) return false;
    layer.weight1[0] = roles.weight1.part(0, experts, n, k);
    layer.weight1[1] = roles.weight1.part(parts - 1, experts, n, k);
    if (!strides_of(roles.weight2, transposed2, &n, &k)) return false;
    layer.weight2 = roles.weight2.part(0, experts, n, k);
    Tensors bias1[2], bias2[1];
    if (!biases(a[BIAS1], roles.bias1, type, parts, experts, features, bias1) ||
        !biases(a[BIAS2], roles.bias2, type, 1, experts, layer.outputs, bias2))
        return false;
    layer.bias1[0] = bias1[0], layer.bias1[1] = bias1[parts - 1], layer.bias2 = bias2[0];
    return met(roles.weight1.tensors.front()->data(), roles.weight1.tensors.back()->data()) &&
           met(roles.weight2.tensors.front()->data(), roles.weight2.tensors.back()->data());
}

c10::ScalarType out_type(int64_t code) {
    return code == moefuse::FLOAT32 ? c10::kFloat : code == moefuse::BFLOAT16 ? c10::kBFloat16 : c10::kHalf;
}

bool fast(Stack* stack) {
    if (!active()) return false;
    thread_local Roles roles;  // keeps its memory from call to call
    Layer layer;
    Kernel kernel;
    if (!describe(&torch::jit::peek(*stack, 0, ARGUMENTS), roles, layer, kernel)) return false;
    at::Tensor y = at::detail::empty_cpu({layer.tokens, layer.outputs}, out_type(layer.out_type));
    at::Tensor nums = at::detail::empty_cpu({layer.experts}, c10::kInt);
    layer.y = y.mutable_data_ptr(), layer.nums = nums.mutable_data_ptr<int32_t>();
    layer.threads = at::get_num_threads();
    if (kernel.run(&layer)) return false;  // out of memory: Python has the words for it
    torch::jit::drop(*stack, ARGUMENTS);
    stack->emplace_back(std::move(y));
    stack->emplace_back(std::move(nums));
    return true;
}

const void* end_of(const IValue& list, bool last) {
    const auto values = list.toListRef();
    return (last ? values.back() : values.front()).unsafeToTensorImpl()->data();
}

// The call in Python. If it ended in the kernel, its constants and weights are known from now on.
void slow(c10::DispatchKeySet keys, Stack* stack, bool learn) {
    static const auto in_python = c10::Dispatcher::singleton().findSchemaOrThrow("moefuse::mega_moe_in_python", "");
    if (!learn || !active() || !for_this_target(&torch::jit::peek(*stack, 0, ARGUMENTS)))
        return in_python.redispatchBoxed(keys, stack);
    const std::vector<IValue> arguments(stack->end() - ARGUMENTS, stack->end());
    const TensorImpl* x = plain(arguments[X]);
    const Kernel kernel = x ? kernel_of(type_of(x)) : Kernel{};
    if (!kernel.run) return in_python.redispatchBoxed(keys, stack);
    int64_t before, after;
    kernel.last(&before);
    in_python.redispatchBoxed(keys, stack);
    const Layer* layer = kernel.last(&after);
    if (after != before + 1 || !active() || !plain(arguments[X])) return;
    x = plain(arguments[X]);
    if (layer->type != code_of(type_of(x)) || layer->tokens != x->size(0) || layer->remote) return;
    const bool known = find(arguments.data(), type_of(x)) != nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    if (seen.size() > MOST_SEEN) seen.clear();
    for (const Argument role : {WEIGHT1, WEIGHT2})
        seen.insert({end_of(arguments[role], false), end_of(arguments[role], true)});
    if (known) return;
    if (accepted.size() >= MOST_ACCEPTED) accepted.clear();
    accepted.push_back(std::make_shared<Accepted>(
        Accepted{{arguments.begin() + TENSORS, arguments.end()}, type_of(x), *layer, kernel}));
}

bool is_plain(c10::DispatchKeySet keys) {
    return (keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == c10::DispatchKey::CPU;
}

// A gradient would be recorded, or a tangent (of forward mode, in its one level) is to be taken along.
bool differentiated(const IValue& value, bool records) {
    if (!value.isTensor()) return false;
    const TensorImpl* tensor = value.unsafeToTensorImpl();
    return (records && tensor->requires_grad()) || value.toTensor()._fw_grad(0).defined();
}

bool has_gradients(const Stack& stack) {
    const bool records = c10::GradMode::is_enabled();
    for (size_t i = 0; i < TENSORS; i++) {
        const IValue& value = torch::jit::peek(stack, i, ARGUMENTS);
        if (differentiated(value, records)) return true;
        if (!value.isList()) continue;
        for (const IValue& each : value.toListRef())
            if (differentiated(each, records)) return true;
    }
    return false;
}

void above_autograd(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    const bool ours = is_plain(keys) && !has_gradients(*stack);
    if (!ours || !fast(stack)) slow(keys, stack, ours);
}
void below_autograd(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    const bool ours = is_plain(keys);
    if (!ours || !fast(stack)) slow(keys, stack, ours);
}

TORCH_LIBRARY_IMPL(moefuse, AutogradCPU, m) {
    m.impl("mega_moe", torch::CppFunction::makeFromBoxedFunction<&above_autograd>());
}
TORCH_LIBRARY_IMPL(moefuse, CPU, m) {
    m.impl("mega_moe", torch::CppFunction::makeFromBoxedFunction<&below_autograd>());
}

}  // namespace

#define MOEFUSE_EXPORT extern "C" __attribute__((visibility("default")))

// `type`: which dtype's kernel these functions are. `name`: the value of MOEFUSE_CPU_ISA ("": unset) by which it was
// chosen; those of another value are forgotten.
MOEFUSE_EXPORT void moefuse_bind(int64_t type, int (*run)(const Layer*), const Layer* (*last)(int64_t*),
                                 const char* name) {
    enabled.store(false, std::memory_order_release);
    const std::lock_guard<std::mutex> lock(mutex);
    accepted.clear(), seen.clear();
    if (isa != name)
        for (Kernel& kernel : kernels) kernel = {};
    kernels[type] = {run, last}, isa = name;
}
// 0: every call goes through Python.
MOEFUSE_EXPORT void moefuse_enable(int on) { enabled.store(on, std::memory_order_release); }
MOEFUSE_EXPORT int64_t moefuse_arguments() { return ARGUMENTS; }
