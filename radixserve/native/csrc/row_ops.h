// What a decoder does to one row of activations between its matrix products. Roundings are where torch's own operations round, so that the
// result stays within theirs; sums run in one fixed order.
#pragma once
#include <cmath>

#include "packed_linear.h"

namespace radixserve {

// to = weight * rounded(x / sqrt(mean of squares + eps)); `to` may be x
template <class T>
inline void rms_norm(const T* x, const T* weight, int64_t width, float eps, T* to) {
    using lanes::WIDTH;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += WIDTH) {
        const __m512 v = lanes::load(x + i, lanes::mask_of(width - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps));
    for (int64_t i = 0; i < width; i += WIDTH) {
        const __mmask16 mask = lanes::mask_of(width - i);
        const __m512 normed = lanes::rounded(_mm512_mul_ps(lanes::load(x + i, mask), scale), T());
        lanes::store(to + i, _mm512_mul_ps(lanes::load(weight + i, mask), normed), mask);
    }
}

// Rotates one head in place, in the half-split layout: element i is paired with i + head_dim / 2. table: cos [head_dim / 2], then sin.
template <class T>
inline void rotate(T* head, const T* table, int64_t head_dim) {
    using lanes::rounded;
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += lanes::WIDTH) {
        const __mmask16 mask = lanes::mask_of(half - i);
        const __m512 first = lanes::load(head + i, mask), second = lanes::load(head + half + i, mask);
        const __m512 cos = lanes::load(table + i, mask), sin = lanes::load(table + half + i, mask);
        const T kind{};
        const __m512 low = _mm512_sub_ps(rounded(_mm512_mul_ps(first, cos), kind), rounded(_mm512_mul_ps(second, sin), kind));
        const __m512 high = _mm512_add_ps(rounded(_mm512_mul_ps(second, cos), kind), rounded(_mm512_mul_ps(first, sin), kind));
        lanes::store(head + i, low, mask);
        lanes::store(head + half + i, high, mask);
    }
}

// One row of packed weights, which is one row of a tied embedding.
inline void unpack_row(const PackedLinear& w, int64_t row, uint32_t* to) {
    const uint32_t* from = w.packed + row / PANEL * w.num_words * PANEL + row % PANEL;
    for (int64_t word = 0; word < w.num_words; ++word) to[word] = from[word * PANEL];
}

// What becomes of 32 sums (see multiply): y = rounded(sums + bias)
template <class T>
struct StoreSums {
    T* y;
    int64_t stride, width;
    const T* bias;  // may be null
    void operator()(int64_t row, int64_t panel, const float* sums) const {
        for (int64_t at = panel * PANEL, part = 0; part < 2 && at < width; ++part, at += lanes::WIDTH) {
            const __mmask16 mask = lanes::mask_of(width - at);
            __m512 sum = _mm512_loadu_ps(sums + part * lanes::WIDTH);
            if (bias != nullptr) sum = _mm512_add_ps(sum, lanes::load(bias + at, mask));
            lanes::store(y + row * stride + at, sum, mask);
        }
    }
};

// y = rounded(y + rounded(sums))
template <class T>
struct AddSums {
    T* y;
    int64_t stride, width;
    void operator()(int64_t row, int64_t panel, const float* sums) const {
        for (int64_t at = panel * PANEL, part = 0; part < 2 && at < width; ++part, at += lanes::WIDTH) {
            const __mmask16 mask = lanes::mask_of(width - at);
            const __m512 sum = lanes::rounded(_mm512_loadu_ps(sums + part * lanes::WIDTH), T());
            T* place = y + row * stride + at;
            lanes::store(place, _mm512_add_ps(lanes::load(place, mask), sum), mask);
        }
    }
};

// y = rounded(silu(gate)) * up, of weights packed interleaved: gate in the left half of a panel, up in the right
template <class T>
struct SiluTimesUp {
    T* y;
    int64_t stride, width;
    void operator()(int64_t row, int64_t panel, const float* sums) const {
        const int64_t at = panel * lanes::WIDTH;
        const T kind{};
        const __m512 gate = lanes::rounded(_mm512_loadu_ps(sums), kind), up = lanes::rounded(_mm512_loadu_ps(sums + lanes::WIDTH), kind);
        lanes::store(y + row * stride + at, _mm512_mul_ps(lanes::rounded(lanes::silu_of(gate), kind), up), lanes::mask_of(width - at));
    }
};

}  // namespace radixserve
