// Vectors of float for whatever the compiler was told the machine has, and the two storage types. No kernel knows an instruction set but
// through this file. Nothing here may depend on how many rows a caller works on: equal inputs give equal bits.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace radixserve {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define RADIXSERVE_VL 16
#elif defined(__AVX__)
#define RADIXSERVE_VL 8
#else
#define RADIXSERVE_VL 4
#endif
constexpr int VL = RADIXSERVE_VL;
typedef float Vec __attribute__((vector_size(RADIXSERVE_VL * 4)));
typedef int32_t IntVec __attribute__((vector_size(RADIXSERVE_VL * 4)));
// 32 bits of a packed operand: one float, or two bfloat16
typedef float Word __attribute__((may_alias));

struct Bf16 {
    uint16_t bits;
};

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

inline Vec load(const void* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline void store(void* to, Vec v) { std::memcpy(to, &v, sizeof v); }
// moves bits, computes nothing: a word may be a pair of bfloat16
inline Vec broadcast(Word x) {
#if RADIXSERVE_VL == 16
    return Vec(_mm512_set1_ps(x));
#elif RADIXSERVE_VL == 8
    return Vec(_mm256_set1_ps(x));
#else
    return Vec{x, x, x, x};
#endif
}

#if RADIXSERVE_VL == 16
inline __m512 widen(__m256i bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16)); }
#endif
inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
}
inline void from_float(float x, float& to) { to = x; }
inline void from_float(float x, Bf16& to) {  // to the nearest, ties to even; a NaN stays one
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    if ((wide & 0x7fffffff) > 0x7f800000) {
        to.bits = uint16_t(wide >> 16) | 0x40;
    } else {
        to.bits = uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
}

inline float max_of(Vec v) {
#if RADIXSERVE_VL == 16
    return _mm512_reduce_max_ps(__m512(v));
#else
    float best = v[0];
    for (int i = 1; i < VL; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}
inline float sum_of(Vec v) {
#if RADIXSERVE_VL == 16
    return _mm512_reduce_add_ps(__m512(v));
#else
    float total = v[0];
    for (int i = 1; i < VL; ++i) total += v[i];
    return total;
#endif
}
inline Vec max_of(Vec a, Vec b) { return a > b ? a : b; }

// 2^x within 2e-7 of it for x <= 0; exactly 0 below -126, minus infinity included; a NaN stays one
inline Vec exp2_of(Vec x) {
    const Vec lowest = broadcast(-126.0f);
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Vec clamped = max_of(lowest, x);  // in this order it is x where that is a NaN
    const Vec shifted = clamped + magic;
    const Vec f = clamped - (shifted - magic);
    Vec p = broadcast(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    const IntVec exponent = (IntVec)shifted << 23;  // only the low 9 bits survive, and they are the integer's
    const Vec result = (Vec)((IntVec)p + exponent);
    return x >= lowest ? result : max_of(Vec{}, x);
}

}  // namespace radixserve
