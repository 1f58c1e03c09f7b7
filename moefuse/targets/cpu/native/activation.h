// The activations between the two GEMMs, in float32.
//
// In: gate and up values of one token's row (up unread by plain experts) and the parameters. Out: the activated row.
// The formulas are those of moefuse/ops/activations.py; the polynomials below were fitted for float32.
#pragma once

#include "vec.h"

namespace moefuse {

// In the order of KINDS in kernel.py.
enum Kind : int64_t {
    SWIGLU, SWIGLUSTEP, SWIGLUOAI, SITUGLU, GEGLU, GEGLU_TANH, QUICK_GEGLU, REGLU, RELU2GLU, SIGMOIDGLU, BILINEAR,
    SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, SIGMOID, TANH, IDENTITY, CUSTOM
};

// Error about 1 ulp; 0 below exp(-87.3), infinity above exp(88.7), NaN for NaN.
static inline f32v exp_of(f32v x) {
    const f32v inside = at_least(at_most(x, 88.7f), -87.3f);
    const f32v magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32v shifted = inside * 1.44269504f + magic;
    const f32v n = shifted - magic;
    const f32v r = inside - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    f32v p = 1.9899275e-4f * r + 1.39336433e-3f;
    p = p * r + 8.33329848e-3f;
    p = p * r + 4.16664650e-2f;
    p = p * r + 0.166666667f;
    p = p * r + 0.5f;
    p = (p * r) * r + r + 1.f;
    const u32v exponent = bit_cast<u32v>(shifted) << 23;  // the low bits of `shifted` are n
    const f32v result = bit_cast<f32v>(bit_cast<u32v>(p) + exponent);
    const f32v low = select(x < splat(-87.3f), splat(0.f), result);
    return select(x > splat(88.7f), splat(__builtin_inff()), low);
}

// Infinities end as they do in torch: silu(-inf) is NaN.
static inline f32v sigmoid_of(f32v x) { return 1.f / (1.f + exp_of(-x)); }
static inline f32v silu_of(f32v g) { return g / (1.f + exp_of(-g)); }
static inline f32v relu_of(f32v g) { return at_least(g, 0.f); }

static inline f32v tanh_of(f32v x) {
    const f32v large = 1.f - 2.f / (exp_of(2.f * x) + 1.f);
    const f32v s = x * x;
    f32v p = 2.37350346e-3f * s - 8.41254221e-3f;
    p = p * s + 2.17891034e-2f;
    p = p * s - 5.39616527e-2f;
    p = p * s + 0.133333133f;
    p = p * s - 0.333333332f;
    const f32v small = x + x * s * p;  // where 1 - 2 / .. would cancel
    return select(s < splat(0.36f), small, large);
}

// (1 - erf(x)) / 2 for x >= 0.
static inline f32v half_erfc_of(f32v x) {
    const f32v t = select(x > splat(1e18f), splat(1.f), (x - 3.f) / (x + 3.f));
    f32v p = -9.25451668e-5f * t - 5.13850513e-4f;
    p = p * t + 1.87507912e-3f;
    p = p * t + 2.2865137e-3f;
    p = p * t - 2.37635764e-2f;
    p = p * t + 6.84095817e-2f;
    p = p * t - 0.119275275f;
    p = p * t + 0.129627505f;
    p = p * t - 4.75621569e-2f;
    p = p * t - 0.135620239f;
    p = p * t + 1.25300806f;
    return 0.5f * exp_of(-x * x) * p / (1.f + 2.f * x);
}

// g * (1 + erf(g / sqrt 2)) / 2 through erfc, which keeps the precision of the negative tail.
static inline f32v gelu_of(f32v g) {
    const f32v half_erfc = half_erfc_of(bit_cast<f32v>(bit_cast<i32v>(g) & 0x7fffffff) * 0.707106781f);
    return g * select(g < splat(0.f), half_erfc, 1.f - half_erfc);
}

// As torch writes it: another form is no worse, but its roundings aren't those of the model.
static inline f32v gelu_tanh_of(f32v g) {
    return 0.5f * g * (1.f + tanh_of(0.797884561f * (g + 0.044715f * g * g * g)));
}

static inline f32v clamp(f32v value, float limit) { return at_least(at_most(value, limit), -limit); }

// n values, rounded up to whole vectors: g, u and out have room for them. The GEMM's result counts as a D; with `steps`
// the result of every operator is rounded to D, as a model has it that doesn't cast up for its activation.
template <class D>
static void activate(int64_t kind, const double* params, bool steps, const float* gate, const float* up, float* out,
                     int n) {
    const float a = float(params[0]), b = float(params[1]), c = float(params[2]);
    const i32v rounds = i32v{} - int32_t(steps);  // chosen by lane: a second copy of all this takes as long to build
    const auto r = [=](f32v value) { return select(rounds, rounded<D>(value), value); };
    const float limit = r(splat(a))[0];  // clamping gives a D
    const auto quick = [=](f32v g) { return g * r(sigmoid_of(r(1.702f * g))); };
    const auto each = [&](auto&& function) {
        for (int i = 0; i < n; i += LANES)
            store(out + i, function(rounded<D>(load(gate + i)), rounded<D>(load(up + i))));
    };
    switch (kind) {
        case SWIGLU:
            if (a == __builtin_inff()) return each([=](f32v g, f32v u) { return r(silu_of(g)) * u; });
            return each([=](f32v g, f32v u) { return r(silu_of(at_most(g, limit))) * clamp(u, limit); });
        case SWIGLUSTEP: return each([=](f32v g, f32v u) { return at_most(r(silu_of(g)), limit) * clamp(u, limit); });
        case SWIGLUOAI:
            return each([=](f32v g, f32v u) {
                const f32v low = at_most(g, limit);
                return r(low * r(sigmoid_of(r(b * low)))) * r(clamp(u, limit) + c);
            });
        case SITUGLU:
            return each([=](f32v g, f32v u) {
                return r(r(a * r(tanh_of(r(g / a)))) * r(sigmoid_of(g))) * r(b * r(tanh_of(r(u / b))));
            });
        case GEGLU: return each([=](f32v g, f32v u) { return r(gelu_of(g)) * u; });
        case GEGLU_TANH: return each([=](f32v g, f32v u) { return r(gelu_tanh_of(g)) * u; });
        case QUICK_GEGLU: return each([=](f32v g, f32v u) { return r(quick(g)) * u; });
        case REGLU: return each([](f32v g, f32v u) { return relu_of(g) * u; });
        case RELU2GLU: return each([=](f32v g, f32v u) { return r(relu_of(g) * relu_of(g)) * u; });
        case SIGMOIDGLU: return each([=](f32v g, f32v u) { return r(sigmoid_of(g)) * u; });
        case BILINEAR: return each([](f32v g, f32v u) { return g * u; });
        case SILU: return each([](f32v g, f32v) { return silu_of(g); });
        case GELU: return each([](f32v g, f32v) { return gelu_of(g); });
        case GELU_TANH: return each([](f32v g, f32v) { return gelu_tanh_of(g); });
        case QUICK_GELU: return each([=](f32v g, f32v) { return quick(g); });
        case RELU: return each([](f32v g, f32v) { return relu_of(g); });
        case RELU2: return each([](f32v g, f32v) { return relu_of(g) * relu_of(g); });
        case SIGMOID: return each([](f32v g, f32v) { return sigmoid_of(g); });
        case TANH: return each([](f32v g, f32v) { return tanh_of(g); });
        default: return each([](f32v g, f32v) { return g; });
    }
}

}  // namespace moefuse
