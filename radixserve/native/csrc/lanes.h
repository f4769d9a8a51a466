// 16 lanes of float in AVX-512, loaded from and rounded to the two storage types. A tail of n < 16 elements is a mask, so that an element
// is computed by the same instructions wherever it lies in a row.
#pragma once
#include "vec.h"

namespace radixserve::lanes {

constexpr int WIDTH = 16;

inline __mmask16 mask_of(int64_t n) { return n >= WIDTH ? __mmask16(0xffff) : __mmask16((1u << n) - 1); }

inline __m512 load(const float* from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }
inline void store(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }
inline __m512 rounded(__m512 x, float) { return x; }

#if defined(__AVX512BF16__)
inline __m512 load(const Bf16* from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }
inline void store(Bf16* to, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, __m256i(_mm512_cvtneps_pbh(x))); }
inline __m512 rounded(__m512 x, Bf16) { return widen(__m256i(_mm512_cvtneps_pbh(x))); }
#endif

// within 2 units in the last place; overflows to infinity and underflows to 0 as exp does
inline __m512 exp_of(__m512 x) {
    const __m512 clamped = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-104.0f)), _mm512_set1_ps(104.0f));
    const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), clamped);  // ln 2 in two parts, the first exact in few bits
    rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    const __m512 result = _mm512_scalef_ps(p, power);
    return _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

inline __m512 silu_of(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exp_of(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

}  // namespace radixserve::lanes
