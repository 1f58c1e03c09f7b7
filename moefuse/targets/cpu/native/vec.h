// A vector of floats, as wide as the instruction set chosen at compile time, and the half precision types.
//
// In: -DMOEFUSE_ISA_<AVX512|AVX2|PLAIN> and the flags that go with it. Out: f32v and its loads, stores, conversions.
// Arithmetic is the compiler's own vector extension, so that everything above this file is written once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(MOEFUSE_ISA_AVX512) || defined(MOEFUSE_ISA_AVX2)
#include <immintrin.h>
#endif

namespace moefuse {

#if defined(MOEFUSE_ISA_AVX512)
constexpr int LANES = 16;
#elif defined(MOEFUSE_ISA_AVX2)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

template <class To, class From>
static inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

static inline f32v splat(float value) { return value - f32v{}; }
static inline f32v select(i32v mask, f32v yes, f32v no) {
    return bit_cast<f32v>((mask & bit_cast<i32v>(yes)) | (~mask & bit_cast<i32v>(no)));
}
// A NaN in `value` stays, as in torch's clamp.
static inline f32v at_most(f32v value, float limit) { return select(value > splat(limit), splat(limit), value); }
static inline f32v at_least(f32v value, float limit) { return select(value < splat(limit), splat(limit), value); }

static inline f32v load(const float* from) {
    f32v value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
static inline void store(float* to, f32v value) { std::memcpy(to, &value, sizeof value); }

static inline f32v load(const bf16* from) {
    u16v narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    return bit_cast<f32v>(__builtin_convertvector(narrow, u32v) << 16);
}
// The upper half is the nearest bfloat16, ties to even; a NaN stays one.
static inline u32v rounded_bits(f32v value) {
    const u32v bits = bit_cast<u32v>(value);
    const u32v nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
    return bit_cast<u32v>(select(value != value, bit_cast<f32v>(bits | 0x400000u), bit_cast<f32v>(nearest)));
}
static inline void store(bf16* to, f32v value) {
    const u16v narrow = __builtin_convertvector(rounded_bits(value) >> 16, u16v);
    std::memcpy(to, &narrow, sizeof narrow);
}

#if defined(MOEFUSE_ISA_AVX512)
static inline f32v load(const f16* from) {
    return bit_cast<f32v>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
static inline void store(f16* to, f32v value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(bit_cast<__m512>(value), 0));
}
#elif defined(MOEFUSE_ISA_AVX2)
static inline f32v load(const f16* from) {
    return bit_cast<f32v>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
static inline void store(f16* to, f32v value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(bit_cast<__m256>(value), 0));
}
#else
static inline float widen(f16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (rest << 13));
    if (rest >= 0x0400u) return bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
    const float small = float(rest) * 0x1p-24f;  // subnormal: a multiple of the smallest
    return sign ? -small : small;
}
static inline f16 narrow(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = uint16_t(bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return {uint16_t(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {                                    // subnormal: the addition rounds
        const float shifted = bit_cast<float>(magnitude) + 0.5f;
        return {uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u))};
    }
    return {uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13))};
}
static inline f32v load(const f16* from) {
    f32v value;
    for (int i = 0; i < LANES; i++) value[i] = widen(from[i]);
    return value;
}
static inline void store(f16* to, f32v value) {
    for (int i = 0; i < LANES; i++) to[i] = narrow(value[i]);
}
#endif

// The first n lanes only; the rest reads as zero and isn't touched.
template <class D>
static inline f32v load_some(const D* from, int n) {
    D lanes[LANES] = {};
    for (int i = 0; i < n; i++) lanes[i] = from[i];
    return load(lanes);
}
template <class D>
static inline void store_some(D* to, f32v value, int n) {
    D lanes[LANES];
    store(lanes, value);
    for (int i = 0; i < n; i++) to[i] = lanes[i];
}

// To the precision of D, still as float32.
template <class D>
static inline f32v rounded(f32v value) {
    D lanes[LANES];
    store(lanes, value);
    return load(lanes);
}
template <>
inline f32v rounded<bf16>(f32v value) {
    return bit_cast<f32v>(rounded_bits(value) & 0xffff0000u);
}
template <>
inline f32v rounded<float>(f32v value) {
    return value;
}

static inline float scalar(const float* from) { return *from; }
template <class D>
static inline float scalar(const D* from) {
    return load_some(from, 1)[0];
}

// A dtype known at run time only; in the order of DTYPES in kernel.py.
enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };

static inline float scalar(const void* base, int64_t index, int64_t type) {
    switch (type) {
        case FLOAT32: return static_cast<const float*>(base)[index];
        case FLOAT64: return float(static_cast<const double*>(base)[index]);
        case BFLOAT16: return scalar(static_cast<const bf16*>(base) + index);
        default: return scalar(static_cast<const f16*>(base) + index);
    }
}

// LANES neighbouring values.
static inline f32v load(const void* base, int64_t index, int64_t type) {
    switch (type) {
        case FLOAT32: return load(static_cast<const float*>(base) + index);
        case BFLOAT16: return load(static_cast<const bf16*>(base) + index);
        case FLOAT16: return load(static_cast<const f16*>(base) + index);
        default: break;
    }
    f32v value;
    for (int i = 0; i < LANES; i++) value[i] = scalar(base, index + i, type);
    return value;
}

template <class D>
static inline void store_up_to(D* to, f32v value, int n) {
    if (n >= LANES)
        store(to, value);
    else
        store_some(to, value, n);
}
// The first n lanes, if there are more than n.
static inline void store(void* base, int64_t index, int64_t type, f32v value, int n) {
    switch (type) {
        case FLOAT32: return store_up_to(static_cast<float*>(base) + index, value, n);
        case BFLOAT16: return store_up_to(static_cast<bf16*>(base) + index, value, n);
        default: return store_up_to(static_cast<f16*>(base) + index, value, n);
    }
}

}  // namespace moefuse
