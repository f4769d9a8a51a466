// From rows of the pool, wherever their pages lie, to the packed operands of gemm.h. Only tokens that are asked for are read; the rest of a
// block is zeros.
#pragma once
#include <algorithm>

#include "gemm.h"

namespace radixserve {

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// words that hold n numbers along the summed dimension
template <class Dot>
constexpr int words_of(int n) {
    return (n + Dot::per_word - 1) / Dot::per_word;
}

inline void copy_row(const float* from, int n, float* to) { std::memcpy(to, from, n * sizeof(float)); }
inline void copy_row(const Bf16* from, int n, float* to) {
    for (int i = 0; i < n; ++i) to[i] = to_float(from[i]);
}
inline void copy_row(const Bf16* from, int n, Bf16* to) { std::memcpy(to, from, n * sizeof(Bf16)); }

inline uint32_t magnitude_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}
inline uint16_t magnitude_bits(Bf16 x) { return x.bits & 0x7fff; }
template <class T>
__attribute__((noinline)) bool has_no_number(const T* const* rows, int num_rows, int head_dim) {
    decltype(magnitude_bits(T())) largest = 0;  // as integers they are in the order of their magnitude, infinity and then NaN last
    for (int row = 0; row < num_rows; ++row)
        for (int i = 0; i < head_dim; ++i) largest = std::max(largest, magnitude_bits(rows[row][i]));
    return largest >= (sizeof(T) == 2 ? 0x7f80u : 0x7f800000u);
}

// the type of one number inside of a packed operand
template <class Dot>
struct PackedType {
    typedef float type;
};
#if defined(RADIXSERVE_PAIR_DOT)
template <>
struct PackedType<PairDot> {
    typedef Bf16 type;
};
#endif

// out[j * stride + i] = rows[i][j] for VL rows of VL words
#if RADIXSERVE_VL == 16
inline void transpose(const __m512i* rows, Word* out, int stride) {
    __m512i t[16], u[16];
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
        _mm512_storeu_si512(out + (4 + i) * stride, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
        _mm512_storeu_si512(out + (8 + i) * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
        _mm512_storeu_si512(out + (12 + i) * stride, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
    }
}
inline void transpose_rows(const Word* const* rows, int first, int num_words, Word* out, int stride) {
    const __mmask16 mask = num_words >= 16 ? 0xffff : (1u << num_words) - 1;
    __m512i loaded[16];
    for (int i = 0; i < 16; ++i) loaded[i] = rows[i] ? _mm512_maskz_loadu_epi32(mask, rows[i] + first) : _mm512_setzero_si512();
    transpose(loaded, out, stride);
}
#else
inline void transpose_rows(const Word* const* rows, int first, int num_words, Word* out, int stride) {
    for (int j = 0; j < VL; ++j)
        for (int i = 0; i < VL; ++i) {
            // as bits: a word may be a pair of bfloat16
            const float zero = 0;
            std::memcpy(out + j * stride + i, rows[i] && j < num_words ? rows[i] + first + j : &zero, 4);
        }
}
#endif

// Bring rows into the cache, in the order in which they lie. Plain reads, since those set the processor's own prefetching going, which
// a run of prefetch instructions does not: it gets several times as much from memory. But that follows what lies side by side, so where
// tokens do not (`token_bytes` from one to the next), the later ones are asked for as well, into the second-level cache.
constexpr int SCATTERED_AHEAD = 16;
template <class T>
void touch(const T* const* rows, int num_tokens, int num_bytes, int token_bytes) {
    uint32_t all = 0;
    for (int token = 0; token < num_tokens; ++token) {
        const char* first = reinterpret_cast<const char*>(rows[token]);
        if (token + SCATTERED_AHEAD < num_tokens) {
            const char* later = reinterpret_cast<const char*>(rows[token + SCATTERED_AHEAD]);
            if (later != reinterpret_cast<const char*>(rows[token + SCATTERED_AHEAD - 1]) + token_bytes)
                for (int i = 0; i < num_bytes; i += 64) __builtin_prefetch(later + i, 0, 2);
        }
        for (int i = 0; i < num_bytes; i += 64) all ^= static_cast<unsigned char>(first[i]);
        all ^= static_cast<unsigned char>(first[num_bytes - 1]);  // a row need not begin at a cache line
    }
    asm volatile("" : : "r"(all));
}

// `rows` are num_tokens pointers to K; packed [panel of tokens][padded_dim / per_word][width] words
template <class Dot, class T>
void pack_keys(
    const T* const* rows, int num_tokens, int width, int head_dim, int padded_dim, float* converted, Word* out
) {
    typedef typename PackedType<Dot>::type Packed;
    const int num_words = words_of<Dot>(head_dim), padded_words = padded_dim / Dot::per_word;
    // an odd head_dim would end in half a word
    const bool is_in_place = sizeof(T) == sizeof(Packed) && head_dim % Dot::per_word == 0;
    for (int token = 0; token < width; token += VL) {
        const Word* sources[VL];
        for (int i = 0; i < VL; ++i) {
            if (token + i >= num_tokens) {
                sources[i] = nullptr;
            } else if (is_in_place) {
                sources[i] = reinterpret_cast<const Word*>(rows[token + i]);
            } else {
                Packed* copy = reinterpret_cast<Packed*>(converted + i * padded_dim);
                copy[Dot::per_word * num_words - 1] = Packed{};
                copy_row(rows[token + i], head_dim, copy);
                sources[i] = reinterpret_cast<const Word*>(copy);
            }
        }
        const int panel = token / KV_PANEL * KV_PANEL, panel_width = width - panel < KV_PANEL ? width - panel : KV_PANEL;
        Word* at = out + int64_t(panel) * padded_words + token - panel;
        for (int word = 0; word < padded_words; word += VL)
            transpose_rows(sources, word, num_words - word, at + word * panel_width, panel_width);
    }
}

// packed [panel of dimensions][num_tokens / per_word, padded with zeros to `width` tokens][panel width] words
template <class T>
void pack_values(
    FloatDot, const T* const* rows, int num_tokens, int width, int head_dim, int padded_dim, Word* out
) {
    for (int first = 0; first < padded_dim; first += KV_PANEL) {
        const int panel_width = padded_dim - first < KV_PANEL ? padded_dim - first : KV_PANEL;
        const int n = head_dim - first < panel_width ? head_dim - first : panel_width;
        float* to = reinterpret_cast<float*>(out + int64_t(first) * width);
        for (int token = 0; token < width; ++token, to += panel_width) {
            const int filled = token < num_tokens ? n : 0;
            if (filled) copy_row(rows[token] + first, filled, to);
            std::memset(to + filled, 0, (panel_width - filled) * sizeof(float));
        }
    }
}

#if defined(RADIXSERVE_PAIR_DOT)
// of two rows of 32 bfloat16, pairs of the first 16 (permutex2var); 16 more are those of the last 16
constexpr uint16_t LOW_PAIRS[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

inline void pack_values(
    PairDot, const Bf16* const* rows, int num_tokens, int width, int head_dim, int padded_dim, Word* out
) {
    const __m512i low = _mm512_loadu_si512(LOW_PAIRS), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int first = 0; first < padded_dim; first += KV_PANEL) {
        const int panel_width = padded_dim - first < KV_PANEL ? padded_dim - first : KV_PANEL;
        Word* to = out + int64_t(first) * (width / 2);
        for (int token = 0; token < width; token += 2, to += panel_width) {
            for (int d = 0; d < panel_width; d += 32) {
                const int left = head_dim - first - d;
                const __mmask32 mask = left >= 32 ? 0xffffffffu : left <= 0 ? 0 : (1u << left) - 1;
                const __m512i zero = _mm512_setzero_si512();
                const __m512i even = token < num_tokens ? _mm512_maskz_loadu_epi16(mask, rows[token] + first + d) : zero;
                const __m512i odd = token + 1 < num_tokens ? _mm512_maskz_loadu_epi16(mask, rows[token + 1] + first + d) : zero;
                _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(even, low, odd));
                if (d + 16 < panel_width) _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(even, high, odd));
            }
        }
    }
}
#endif

}  // namespace radixserve
