// How a vector of weights meets a vector of token values: the only arithmetic of the GEMMs.
//
// In: the dtype of the layer. Out: Mac<D>: the type that token rows are kept in (`X`), how many k a step takes
// (`STEP`), and acc += w * x. With bf16 dot products both operands stay bfloat16; otherwise both are float32.
#pragma once

#include "vec.h"

namespace moefuse {

// A place in each of N rows, which move along together. One pointer for three rows: what the compiler chooses, an
// offset for each row, needs more registers than there are.
template <class X, int N>
class Rows {
   public:
    Rows(const X* first, ptrdiff_t stride) : stride_(stride) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i += 3) {
            at_[i / 3] = first + i * stride;
            asm("" : "+r"(at_[i / 3]));
        }
    }
    const X* operator[](int i) const { return at_[i / 3] + i % 3 * stride_; }
    void advance(int values) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i += 3) at_[i / 3] += values;
    }

   private:
    const X* at_[(N + 2) / 3];
    const ptrdiff_t stride_;
};

template <class D>
struct Mac {
    using X = float;
    using Reg = f32v;
    static constexpr int STEP = LANES;
    static constexpr int PAIR = 1;  // consecutive k that one 32-bit lane holds
    static inline Reg weights(const D* w) { return load(w); }
    static inline Reg weights(const D* w, int n) { return load_some(w, n); }
    static inline Reg values(const X* x) { return load(x); }
    static inline Reg repeated(const X* x) { return splat(*x); }
    static inline f32v add(f32v sum, Reg w, Reg x) { return sum + w * x; }
};

#if defined(MOEFUSE_BF16_DOT)
template <>
struct Mac<bf16> {
    using X = bf16;
    using Reg = __m512i;
    static constexpr int STEP = 32;
    static constexpr int PAIR = 2;
    static inline Reg weights(const bf16* w) { return _mm512_loadu_si512(w); }
    static inline Reg weights(const bf16* w, int n) { return _mm512_maskz_loadu_epi16((1u << n) - 1u, w); }
    static inline Reg values(const X* x) { return _mm512_loadu_si512(x); }
    static inline Reg repeated(const X* x) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return _mm512_set1_epi32(pair);
    }
    static inline f32v add(f32v sum, Reg w, Reg x) {
        return bit_cast<f32v>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), (__m512bh)w, (__m512bh)x));
    }
};
#endif

}  // namespace moefuse
