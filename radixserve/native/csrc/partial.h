// The result of one query over one block, and how such results are put together: the arithmetic between the two products.
#pragma once
#include "pack.h"

namespace radixserve {

// Scores of one query over one block to weights, in place or as bfloat16. Only the first `visible` keys count; `scale` brings scores to
// powers of two. Returns the largest scaled score and the sum of the weights as they are stored.
struct MaxAndSum {
    float max, sum;
};
template <class Packed>
__attribute__((noinline)) MaxAndSum to_weights(float* scores, int visible, int width, float scale, Packed* weights) {
    if (visible <= 0) {
        std::memset(static_cast<void*>(weights), 0, width * sizeof(Packed));
        return {MINUS_INFINITY, 0.0f};
    }
    for (int i = visible; i < width; ++i) scores[i] = MINUS_INFINITY;
    Vec highest = load(scores);
    for (int i = VL; i < width; i += VL) highest = max_of(highest, load(scores + i));
    const float max = max_of(highest) * scale;
    Vec sum = {};
    for (int i = 0; i < width; i += VL) {
        const Vec exact = exp2_of(load(scores + i) * broadcast(scale) - broadcast(max));
        if constexpr (sizeof(Packed) == sizeof(float)) {
            store(weights + i, exact);
            sum += exact;
        } else {
#if defined(RADIXSERVE_PAIR_DOT)
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(__m512(exact));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i), rounded);
            sum += Vec(widen(rounded));
#endif
        }
    }
    return {max, sum_of(sum)};
}

inline float exp2_of_one(float x) { return exp2_of(broadcast(x))[0]; }

// what is known of a query so far, and one more block. Never inlined: there must be one sequence of instructions
__attribute__((noinline)) inline void fold(float* values, MaxAndSum& state, const float* more, MaxAndSum block, int n) {
    if (block.max == MINUS_INFINITY && block.sum == 0.0f) return;  // no visible key; the sum of keys that are NaN is one too
    const float max = state.max > block.max ? state.max : block.max;
    const float keep = exp2_of_one(state.max - max), take = exp2_of_one(block.max - max);
    for (int i = 0; i < n; i += VL) store(values + i, load(values + i) * broadcast(keep) + load(more + i) * broadcast(take));
    state.sum = state.sum * keep + block.sum * take;
    state.max = max;
}

template <class T>
__attribute__((noinline)) void finish(const float* values, MaxAndSum state, T* out, int n) {
    for (int i = 0; i < n; ++i) from_float(values[i] / state.sum, out[i]);
}

}  // namespace radixserve
