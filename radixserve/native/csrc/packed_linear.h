// Products of activations with weights that were packed once:   y[m, n] = sum over k of x[m, k] w[n, k].
//
//   packed  [panels][words][32]   a word is one float, or a pair of bfloat16 that are neighbours along k; panel p holds 32 rows of w
//
// Every y[m, n] is one chain of multiply-adds over k in order, from zero, whatever the tile it falls into: its bits do not depend on how
// many other rows there are, nor on the number of threads.
#pragma once
#include <algorithm>
#include <cstring>

#include "lanes.h"
#if defined(RADIXSERVE_BRGEMM)
#include "brgemm.h"
#endif

namespace radixserve {

constexpr int PANEL = 32;      // columns of y, two vectors
constexpr int TILE_ROWS = 12;  // 24 sums in registers, which leaves room for a word of each half of a panel
constexpr int MOST_TILE_ROWS = 32;
#if defined(RADIXSERVE_BRGEMM)
constexpr int tile_rows(Bf16) { return 32; }  // two by two tiles of the matrix unit
#else
constexpr int tile_rows(Bf16) { return TILE_ROWS; }
#endif
constexpr int tile_rows(float) { return TILE_ROWS; }
// rows of x that are multiplied with one panel after another while they stay in the second-level cache
constexpr int64_t BLOCK_BYTES = 384 << 10;
// Weights are asked for so far ahead of their use, into the second-level cache: into the first one a core has fewer requests under way,
// and less than 4 KB ahead they come too late.
constexpr int64_t AHEAD_BYTES = 8192;
// where a panel comes from the second-level cache, the first one
constexpr int64_t NEAR_BYTES = 2048;
// Up to so many tiles of rows take a panel in turn, AHEAD_BYTES of it at a time: else the first would wait for memory, and the others
// leave it idle.
constexpr int64_t MOST_STACKED = 4;
#if defined(RADIXSERVE_BRGEMM)
constexpr int64_t most_stacked(Bf16) { return 1; }
#else
constexpr int64_t most_stacked(Bf16) { return MOST_STACKED; }
#endif
constexpr int64_t most_stacked(float) { return MOST_STACKED; }
constexpr int64_t MOST_SUMS = std::max<int64_t>(MOST_TILE_ROWS, MOST_STACKED * TILE_ROWS) * PANEL;

struct PackedLinear {
    const uint32_t* packed;
    int64_t num_panels;
    int64_t num_words;  // of one row of x
    const float* scales = nullptr;  // [panels * 32]: `packed` holds integers, see quantized_linear.h
};

// of one product, as the caller keeps them
struct Weights {
    const uint32_t* packed;
    const float* scales;  // null: not quantized
};

inline int64_t num_panels_of(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

// part `id` of `count`, cut into `num_parts`
struct Share {
    int64_t first, end;
    Share(int64_t count, int id, int num_parts) : first(count * id / num_parts), end(count * (id + 1) / num_parts) {}
};

inline __m512 multiply_add(__m512 sum, uint32_t x, __m512i w, float) {
    float value;
    std::memcpy(&value, &x, 4);
    return _mm512_fmadd_ps(_mm512_set1_ps(value), _mm512_castsi512_ps(w), sum);
}
#if defined(__AVX512BF16__)
inline __m512 multiply_add(__m512 sum, uint32_t x, __m512i w, Bf16) {
    return _mm512_dpbf16_ps(sum, __m512bh(_mm512_set1_epi32(int(x))), __m512bh(w));
}
#endif

// What a tile asks for: a half of each word that follows, or all, or what is near. It stands at a fixed distance from what is in use: a
// pointer more would be one too many for 12 rows.
enum class Ask { FIRST_HALF, SECOND_HALF, ALL, NEAR };

// sums [ROWS][32] of rows x, x + stride, ... (strides in words) with one panel; those that ask for a half add a part of a panel to them
template <class T, int ROWS, Ask ASK>
inline void multiply_tile(const uint32_t* x, int64_t stride, const uint32_t* panel, int64_t num_words, float* sums) {
    constexpr bool is_more = ASK == Ask::FIRST_HALF || ASK == Ask::SECOND_HALF;
    __m512 left[ROWS], right[ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
        left[row] = is_more ? _mm512_loadu_ps(sums + row * PANEL) : _mm512_setzero_ps();
        right[row] = is_more ? _mm512_loadu_ps(sums + row * PANEL + lanes::WIDTH) : _mm512_setzero_ps();
    }
    for (int64_t word = 0; word < num_words; ++word) {
        const __m512i a = _mm512_loadu_si512(panel + word * PANEL), b = _mm512_loadu_si512(panel + word * PANEL + lanes::WIDTH);
        const char* at = reinterpret_cast<const char*>(panel + word * PANEL);
        if (ASK == Ask::NEAR) _mm_prefetch(at + NEAR_BYTES, _MM_HINT_T0), _mm_prefetch(at + NEAR_BYTES + 64, _MM_HINT_T0);
        if (ASK == Ask::FIRST_HALF || ASK == Ask::ALL) _mm_prefetch(at + AHEAD_BYTES, _MM_HINT_T1);
        if (ASK == Ask::SECOND_HALF || ASK == Ask::ALL) _mm_prefetch(at + AHEAD_BYTES + 64, _MM_HINT_T1);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            uint32_t pair;
            std::memcpy(&pair, x + row * stride + word, 4);
            left[row] = multiply_add(left[row], pair, a, T());
            right[row] = multiply_add(right[row], pair, b, T());
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
        _mm512_storeu_ps(sums + row * PANEL, left[row]);
        _mm512_storeu_ps(sums + row * PANEL + lanes::WIDTH, right[row]);
    }
}

template <class T, Ask ASK>
inline void multiply_rows(int64_t rows, const uint32_t* x, int64_t stride, const uint32_t* panel, int64_t num_words, float* sums) {
    switch (rows) {
#define RADIXSERVE_CASE(n) \
    case n: return multiply_tile<T, n, ASK>(x, stride, panel, num_words, sums);
        RADIXSERVE_CASE(1) RADIXSERVE_CASE(2) RADIXSERVE_CASE(3) RADIXSERVE_CASE(4) RADIXSERVE_CASE(5) RADIXSERVE_CASE(6)
        RADIXSERVE_CASE(7) RADIXSERVE_CASE(8) RADIXSERVE_CASE(9) RADIXSERVE_CASE(10) RADIXSERVE_CASE(11) RADIXSERVE_CASE(12)
#undef RADIXSERVE_CASE
    }
}

// sums [rows][32] of a whole tile; K at once, so that the order of a sum is one and the same for every height. `is_near`: the panel is in a
// cache by now
template <class T>
inline void multiply_panel(int64_t rows, const T* x, int64_t stride, const uint32_t* panel, int64_t num_words, bool is_near, float* sums) {
    const auto multiply = is_near ? multiply_rows<T, Ask::NEAR> : multiply_rows<T, Ask::ALL>;
    multiply(rows, reinterpret_cast<const uint32_t*>(x), stride * int64_t(sizeof(T)) / 4, panel, num_words, sums);
}

// Sums [rows][32] of several tiles: the same chains, left off and taken up again. The first tile asks for one half of the next words, the
// second for the other.
template <class T>
inline void multiply_stack(int64_t rows, int64_t num_tiles, const T* x, int64_t stride, const uint32_t* panel, int64_t num_words,
                           float* sums) {
    constexpr int64_t STEP = AHEAD_BYTES / (PANEL * 4);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(x);
    const int64_t word_stride = stride * int64_t(sizeof(T)) / 4;
    std::fill_n(sums, rows * PANEL, 0.0f);
    for (int64_t word = 0; word < num_words; word += STEP) {
        const int64_t n = std::min(STEP, num_words - word);
        const uint32_t* from = panel + word * PANEL;
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const Share part(rows, int(tile), int(num_tiles));
            const auto multiply = tile == 0 ? multiply_rows<T, Ask::FIRST_HALF> : multiply_rows<T, Ask::SECOND_HALF>;
            multiply(part.end - part.first, words + part.first * word_stride + word, word_stride, from, n, sums + part.first * PANEL);
        }
    }
}
#if defined(RADIXSERVE_BRGEMM)
inline void multiply_panel(int64_t rows, const Bf16* x, int64_t stride, const uint32_t* panel, int64_t num_words, bool, float* sums) {
    brgemm_bf16(int(rows), PANEL, int(num_words * 2), int(stride), PANEL, PANEL, x, panel, sums);
}
#endif

// x [m, k] times w is done in pieces of some rows and one panel; blocks of rows one after the other, in each of them panel after panel. A
// piece is a tile, or where there are few of them all tiles of a panel.
template <class T>
struct Tiles {
    static constexpr int64_t HEIGHT = tile_rows(T());
    int64_t m, block;
    const PackedLinear& w;

    Tiles(int64_t rows, const PackedLinear& weights)
        : m(rows), block(std::max<int64_t>(HEIGHT, BLOCK_BYTES / (weights.num_words * 4) / HEIGHT * HEIGHT)), w(weights) {}
    int64_t count() const { return w.num_panels * (m / block * per_panel(block) + per_panel(m % block)); }
    static int64_t tiles_of(int64_t rows) { return (rows + HEIGHT - 1) / HEIGHT; }
    static int64_t per_panel(int64_t rows) {
        const int64_t num_tiles = tiles_of(rows);
        return num_tiles <= most_stacked(T()) ? std::min<int64_t>(num_tiles, 1) : num_tiles;
    }
};

// Pieces [begin, end) of x [m, k] (stride in elements) times w. `finish(row, panel, sums)` gets the 32 sums of a row and a panel.
template <class T, class Finish>
void multiply(const T* x, int64_t stride, const Tiles<T>& tiles, int64_t begin, int64_t end, const Finish& finish) {
    const PackedLinear& w = tiles.w;
    alignas(64) float sums[MOST_SUMS];
    const int64_t per_block = w.num_panels * tiles.per_panel(tiles.block);
    for (int64_t index = begin; index < end; ++index) {
        const int64_t first = index / per_block * tiles.block, rows = std::min(tiles.block, tiles.m - first);
        const int64_t num_pieces = tiles.per_panel(rows), in_block = index % per_block, panel = in_block / num_pieces;
        const Share part(rows, int(in_block % num_pieces), int(num_pieces));  // of equal height: 16 rows are 8 and 8
        const int64_t row = first + part.first, height = part.end - part.first, num_tiles = tiles.tiles_of(height);
        const uint32_t* packed = w.packed + panel * w.num_words * PANEL;
        if (num_tiles > 1) {
            multiply_stack(height, num_tiles, x + row * stride, stride, packed, w.num_words, sums);
        } else {
            multiply_panel(height, x + row * stride, stride, packed, w.num_words, num_pieces > 1, sums);
        }
        for (int64_t i = 0; i < height; ++i) finish(row + i, panel, sums + i * PANEL);
    }
#if defined(RADIXSERVE_BRGEMM)
    brgemm_end();
#endif
}

// rows [count, words] -> packed. Interleaved: the first half of the rows in the left of each panel, the second half in the right.
inline void pack(const uint32_t* rows, int64_t count, int64_t words, bool is_interleaved, uint32_t* packed) {
    const int64_t half = count / 2, per_panel = is_interleaved ? lanes::WIDTH : PANEL;
    const int64_t num_panels = ((is_interleaved ? half : count) + per_panel - 1) / per_panel;
#pragma omp parallel for
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        for (int64_t column = 0; column < PANEL; ++column) {
            const bool is_second = is_interleaved && column >= lanes::WIDTH;
            const int64_t place = panel * per_panel + (is_second ? column - lanes::WIDTH : column);
            const bool is_there = place < (is_interleaved ? half : count);
            const uint32_t* from = rows + (is_second ? half + place : place) * words;
            uint32_t* to = packed + panel * words * PANEL + column;
            for (int64_t word = 0; word < words; ++word) to[word * PANEL] = is_there ? from[word] : 0;
        }
    }
}

}  // namespace radixserve
