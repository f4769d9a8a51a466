// The two products of one block for a few queries, straight from rows of the pool: packing them would cost as much as multiplying. The
// chains of multiply-adds are those of gemm.h over pack.h's operands, step by step, so the bits are the same.
#pragma once
#include <algorithm>

#include "pack.h"

namespace radixserve {

// as many rows as leave room in the registers for 64 columns of values
constexpr int MAX_NARROW_PASS = 6;
// two passes over what the first has brought near still cost less than packing
constexpr int MAX_NARROW_PRODUCT = 2 * MAX_NARROW_PASS;

// Not where the matrix unit multiplies: its chains are its own.
inline bool is_narrow_product(int num_rows, int head_dim) {
#if defined(RADIXSERVE_BRGEMM)
    return false;
#else
    return num_rows <= MAX_NARROW_PRODUCT && head_dim % 2 == 0;
#endif
}

#if defined(RADIXSERVE_PAIR_DOT)
// scores [ROWS][ldc] of queries [ROWS][lda] with `width` keys
template <int ROWS>
void score_rows(const Bf16* const* keys, int num_tokens, int width, int num_words, int padded_words, const Word* queries, int lda,
                float* scores, int ldc) {
    for (int token = 0; token < width; token += VL) {
        const Word* sources[VL];
        for (int i = 0; i < VL; ++i) sources[i] = token + i < num_tokens ? reinterpret_cast<const Word*>(keys[token + i]) : nullptr;
        Vec sum[ROWS] = {};
        for (int first = 0; first < padded_words; first += VL) {
            alignas(64) Word columns[VL * VL];
            transpose_rows(sources, first, num_words - first, columns, VL);
#pragma GCC unroll 16
            for (int word = 0; word < VL; ++word) {
                const Vec right = load(columns + word * VL);
#pragma GCC unroll 6
                for (int row = 0; row < ROWS; ++row) sum[row] = PairDot::add(sum[row], broadcast(queries[row * lda + first + word]), right);
            }
        }
        for (int row = 0; row < ROWS; ++row) store(scores + row * ldc + token, sum[row]);
    }
}

// 16 NUM_VECS columns, from `first` on, of weights [ROWS][lda pairs] times `width` values
template <int ROWS, int NUM_VECS>
void mix_columns(const Bf16* const* values, int num_tokens, int width, int first, int head_dim, const Word* weights, int lda, float* out,
                 int ldc) {
    const __m512i low = _mm512_loadu_si512(LOW_PAIRS), high = _mm512_add_epi16(low, _mm512_set1_epi16(16)), zero = _mm512_setzero_si512();
    __mmask32 masks[NUM_VECS / 2];
    for (int i = 0; i < NUM_VECS / 2; ++i) {
        const int left = head_dim - first - 32 * i;
        masks[i] = left >= 32 ? 0xffffffffu : left <= 0 ? 0 : (1u << left) - 1;
    }
    Vec sum[ROWS][NUM_VECS] = {};
    for (int token = 0; token < width; token += 2) {
        Vec right[NUM_VECS];
#pragma GCC unroll 2
        for (int i = 0; i < NUM_VECS / 2; ++i) {
            const int at = first + 32 * i;
            const __m512i even = token < num_tokens ? _mm512_maskz_loadu_epi16(masks[i], values[token] + at) : zero;
            const __m512i odd = token + 1 < num_tokens ? _mm512_maskz_loadu_epi16(masks[i], values[token + 1] + at) : zero;
            right[2 * i] = Vec(_mm512_castsi512_ps(_mm512_permutex2var_epi16(even, low, odd)));
            right[2 * i + 1] = Vec(_mm512_castsi512_ps(_mm512_permutex2var_epi16(even, high, odd)));
        }
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            const Vec left = broadcast(weights[row * lda + token / 2]);
#pragma GCC unroll 4
            for (int i = 0; i < NUM_VECS; ++i) sum[row][i] = PairDot::add(sum[row][i], left, right[i]);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int i = 0; i < NUM_VECS; ++i) store(out + row * ldc + first + i * VL, sum[row][i]);
}

template <int ROWS>
void mix_rows(const Bf16* const* values, int num_tokens, int width, int head_dim, int padded_dim, const Word* weights, int lda, float* out,
              int ldc) {
    int first = 0;
    for (; first + 64 <= padded_dim; first += 64)
        mix_columns<ROWS, 4>(values, num_tokens, width, first, head_dim, weights, lda, out, ldc);
    for (; first < padded_dim; first += 32) mix_columns<ROWS, 2>(values, num_tokens, width, first, head_dim, weights, lda, out, ldc);
}

#define RADIXSERVE_ROWS(call) \
    switch (num_rows) { \
        case 1: return call(1); \
        case 2: return call(2); \
        case 3: return call(3); \
        case 4: return call(4); \
        case 5: return call(5); \
        default: return call(6); \
    }
inline void score_pass(int num_rows, const Bf16* const* keys, int num_tokens, int width, int head_dim, int padded_dim, const Word* queries,
                       float* scores, int ldc) {
#define RADIXSERVE_SCORE(n) score_rows<n>(keys, num_tokens, width, head_dim / 2, padded_dim / 2, queries, padded_dim / 2, scores, ldc)
    RADIXSERVE_ROWS(RADIXSERVE_SCORE)
#undef RADIXSERVE_SCORE
}
inline void mix_pass(int num_rows, const Bf16* const* values, int num_tokens, int width, int head_dim, int padded_dim, const Word* weights,
                     int lda, float* out, int ldc) {
#define RADIXSERVE_MIX(n) mix_rows<n>(values, num_tokens, width, head_dim, padded_dim, weights, lda, out, ldc)
    RADIXSERVE_ROWS(RADIXSERVE_MIX)
#undef RADIXSERVE_MIX
}
#undef RADIXSERVE_ROWS

inline void score_narrow(int num_rows, const Bf16* const* keys, int num_tokens, int width, int head_dim, int padded_dim, const Word* queries,
                         float* scores, int ldc) {
    for (int row = 0; row < num_rows; row += MAX_NARROW_PASS)
        score_pass(std::min(MAX_NARROW_PASS, num_rows - row), keys, num_tokens, width, head_dim, padded_dim, queries + row * padded_dim / 2,
                   scores + row * ldc, ldc);
}
inline void mix_narrow(int num_rows, const Bf16* const* values, int num_tokens, int width, int head_dim, int padded_dim, const Word* weights,
                       int lda, float* out, int ldc) {
    for (int row = 0; row < num_rows; row += MAX_NARROW_PASS)
        mix_pass(std::min(MAX_NARROW_PASS, num_rows - row), values, num_tokens, width, head_dim, padded_dim, weights + row * lda, lda,
                 out + row * ldc, ldc);
}
#endif

}  // namespace radixserve
