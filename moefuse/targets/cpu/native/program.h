// What generated activations call besides activation.h (see program.py).
#pragma once

#include <cmath>

#include "activation.h"

namespace moefuse {

template <class F>
static inline f32v each_lane(f32v x, F&& function) {
    for (int i = 0; i < LANES; i++) x[i] = function(x[i]);
    return x;
}
static inline f32v abs_of(f32v x) { return bit_cast<f32v>(bit_cast<i32v>(x) & 0x7fffffff); }
// A NaN on either side is the result.
static inline f32v least(f32v a, f32v b) { return select((a < b) | (a != a), a, b); }
static inline f32v greatest(f32v a, f32v b) { return select((a > b) | (a != a), a, b); }
static inline f32v power(f32v x, float exponent) {
    if (exponent == 2.f) return x * x;
    if (exponent == 3.f) return x * x * x;
    if (exponent == 0.5f) return each_lane(x, sqrtf);
    return each_lane(x, [exponent](float value) { return powf(value, exponent); });
}
static inline f32v softplus_of(f32v x, float beta, float threshold) {
    const f32v scaled = x * beta;
    const f32v soft = each_lane(exp_of(at_most(scaled, threshold)), log1pf) / beta;
    return select(scaled > splat(threshold), x, soft);
}
// The series where 1 - erfc would cancel.
static inline f32v erf_of(f32v x) {
    const f32v s = x * x, size = abs_of(x);
    f32v p = 1.20553329e-4f - s * 1.49256504e-5f;
    p = p * s - 8.54832702e-4f;
    p = p * s + 5.22397762e-3f;
    p = p * s - 2.68661706e-2f;
    p = p * s + 0.112837917f;
    p = p * s - 0.376126389f;
    p = p * s + 1.12837917f;
    const f32v large = 1.f - 2.f * half_erfc_of(size);
    return select(size < splat(0.5f), x * p, select(x < splat(0.f), -large, large));
}

}  // namespace moefuse
