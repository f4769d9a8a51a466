// Products with weights of 8 bits. A column of y has one scale: w[n, k] is about scale[n] q[n, k], with q from -127 to 127.
//
//   packed  [panels][words][32 columns][1 float or 2 bfloat16 neighbours along k], int8 where packed_linear.h has those numbers
//
// Such integers are exact in both types. They are widened in registers, or a panel at a time where many tiles of rows want it, and
// multiplied as packed_linear.h does; a sum is scaled when it is complete. So a row's bits depend on neither, nor on the rows beside it.
#pragma once
#include <cmath>
#include <limits>
#include <new>

#include "packed_linear.h"
#include "scratch.h"

namespace radixserve {

constexpr int MAX_QUANTIZED = 127;
constexpr int64_t QUANTIZED_AHEAD_BYTES = 4096;
// Widening in registers hides behind the products of even one tile on some processors and takes their ports on others; once for so many
// tiles costs little on either.
constexpr int64_t LEAST_TILES_WIDENED = 16;

template <class T>
constexpr int64_t quantized_word_bytes() {
    return PANEL * 4 / int64_t(sizeof(T));
}

struct Word32 {  // one word of a panel
    __m512i left, right;
};

inline Word32 widen_word(const int8_t* from, float) {
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    const auto floats = [](const __m128i* q) { return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q)))); };
    return {floats(at), floats(at + 1)};
}
#if defined(__AVX512BF16__)
inline Word32 widen_word(const int8_t* from, Bf16) {
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    const auto floats = [](const __m128i* q) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q))); };
    return {__m512i(_mm512_cvtne2ps_pbh(floats(at + 1), floats(at))), __m512i(_mm512_cvtne2ps_pbh(floats(at + 3), floats(at + 2)))};
}
#endif

// a panel as packed_linear.h has it
template <class T>
inline void widen_panel(const int8_t* panel, int64_t num_words, uint32_t* to) {
    for (int64_t word = 0; word < num_words; ++word) {
        const int8_t* from = panel + word * quantized_word_bytes<T>();
        _mm_prefetch(reinterpret_cast<const char*>(from) + QUANTIZED_AHEAD_BYTES, _MM_HINT_T1);
        const Word32 wide = widen_word(from, T());
        _mm512_storeu_si512(to + word * PANEL, wide.left);
        _mm512_storeu_si512(to + word * PANEL + lanes::WIDTH, wide.right);
    }
}

// multiply_tile over integers: the same chains
template <class T, int ROWS>
inline void multiply_quantized_tile(const uint32_t* x, int64_t stride, const int8_t* panel, int64_t num_words, float* sums) {
    __m512 left[ROWS], right[ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) left[row] = right[row] = _mm512_setzero_ps();
    for (int64_t word = 0; word < num_words; ++word) {
        const int8_t* from = panel + word * quantized_word_bytes<T>();
        _mm_prefetch(reinterpret_cast<const char*>(from) + QUANTIZED_AHEAD_BYTES, _MM_HINT_T1);
        const Word32 wide = widen_word(from, T());
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            uint32_t pair;
            std::memcpy(&pair, x + row * stride + word, 4);
            left[row] = multiply_add(left[row], pair, wide.left, T());
            right[row] = multiply_add(right[row], pair, wide.right, T());
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
        _mm512_storeu_ps(sums + row * PANEL, left[row]);
        _mm512_storeu_ps(sums + row * PANEL + lanes::WIDTH, right[row]);
    }
}

template <class T>
inline void multiply_quantized_rows(int64_t rows, const T* x, int64_t stride, const int8_t* panel, int64_t num_words, float* sums) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(x);
    const int64_t word_stride = stride * int64_t(sizeof(T)) / 4;
    switch (rows) {
#define RADIXSERVE_CASE(n) \
    case n: return multiply_quantized_tile<T, n>(words, word_stride, panel, num_words, sums);
        RADIXSERVE_CASE(1) RADIXSERVE_CASE(2) RADIXSERVE_CASE(3) RADIXSERVE_CASE(4) RADIXSERVE_CASE(5) RADIXSERVE_CASE(6)
        RADIXSERVE_CASE(7) RADIXSERVE_CASE(8) RADIXSERVE_CASE(9) RADIXSERVE_CASE(10) RADIXSERVE_CASE(11) RADIXSERVE_CASE(12)
#undef RADIXSERVE_CASE
    }
}

// whether integers can be widened on the way into a product; the matrix unit's own chains need a whole panel
constexpr bool widens_in_registers(float) { return true; }
#if defined(RADIXSERVE_BRGEMM)
constexpr bool widens_in_registers(Bf16) { return false; }
#else
constexpr bool widens_in_registers(Bf16) { return true; }
#endif

// room for one widened panel of each worker of a team
class WidenedPanels {
public:
    void reserve(int num_workers, int64_t num_words) {
        num_words_ = num_words;
        at_ = memory_.of(num_workers * num_words * PANEL);
    }
    uint32_t* of(int worker) const { return at_ + worker * num_words_ * PANEL; }

private:
    Scratch<uint32_t> memory_;
    uint32_t* at_ = nullptr;
    int64_t num_words_ = 0;
};

// see multiply(), which this is for w.scales; `widened`: room for one panel
template <class T, class Finish>
void multiply_quantized(const T* x, int64_t stride, const Tiles<T>& tiles, int64_t begin, int64_t end, uint32_t* widened, const Finish& finish) {
    const PackedLinear& w = tiles.w;
    alignas(64) float sums[MOST_TILE_ROWS * PANEL];
    const int64_t per_block = w.num_panels * tiles.per_panel(tiles.block);
    for (int64_t index = begin; index < end;) {
        const int64_t first = index / per_block * tiles.block, rows = std::min(tiles.block, tiles.m - first);
        const int64_t num_pieces = tiles.per_panel(rows), in_block = index % per_block, panel = in_block / num_pieces;
        const int64_t last = std::min(end, index + num_pieces - in_block % num_pieces);  // of this panel
        const int8_t* integers = reinterpret_cast<const int8_t*>(w.packed) + panel * w.num_words * quantized_word_bytes<T>();
        const bool is_widened = last - index >= LEAST_TILES_WIDENED || !widens_in_registers(T());
        if (is_widened) widen_panel<T>(integers, w.num_words, widened);
        const __m512 left = _mm512_loadu_ps(w.scales + panel * PANEL), right = _mm512_loadu_ps(w.scales + panel * PANEL + lanes::WIDTH);
        const int64_t of_piece = tiles.tiles_of(rows) / num_pieces, num_tiles = of_piece * num_pieces;
        for (int64_t tile = in_block % num_pieces * of_piece, past = tile + (last - index) * of_piece; tile < past; ++tile) {
            const Share part(rows, int(tile), int(num_tiles));
            const int64_t row = first + part.first, height = part.end - part.first;
            if (is_widened) {
                multiply_panel(height, x + row * stride, stride, widened, w.num_words, true, sums);
            } else {
                multiply_quantized_rows<T>(height, x + row * stride, stride, integers, w.num_words, sums);
            }
            for (int64_t i = 0; i < height; ++i) {
                float* const at = sums + i * PANEL;
                _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), left));
                _mm512_storeu_ps(at + lanes::WIDTH, _mm512_mul_ps(_mm512_loadu_ps(at + lanes::WIDTH), right));
                finish(row + i, panel, at);
            }
        }
        index = last;
    }
#if defined(RADIXSERVE_BRGEMM)
    brgemm_end();
#endif
}

// One row of weights -> its scale, and integers at to[k / PER_WORD][PANEL columns][k % PER_WORD]. What is not finite makes the scale NaN or
// infinite, and so all that is computed with it.
template <class T>
inline float quantize_row(const T* row, int64_t width, int8_t* to) {
    constexpr int64_t PER_WORD = 4 / int64_t(sizeof(T));
    float largest = 0;
    for (int64_t k = 0; k < width; ++k) {
        const float size = std::fabs(to_float(row[k]));
        if (!(size <= largest)) largest = size;
        if (size != size) return std::numeric_limits<float>::quiet_NaN();
    }
    const float scale = largest / MAX_QUANTIZED;
    for (int64_t k = 0; k < width; ++k) {
        const float wanted = scale > 0 && std::isfinite(scale) ? to_float(row[k]) / scale : 0;
        to[k / PER_WORD * PANEL * PER_WORD + k % PER_WORD] = int8_t(std::lrint(std::min(127.0f, std::max(-127.0f, wanted))));
    }
    return scale;
}

// rows [count, width] -> packed, scales [panels * 32], both zeros beforehand. Interleaved: as pack()
template <class T>
void quantize(const T* rows, int64_t count, int64_t width, bool is_interleaved, int8_t* packed, float* scales) {
    constexpr int64_t PER_WORD = 4 / int64_t(sizeof(T));
    const int64_t panel_bytes = width * PANEL, half = count / 2;
#pragma omp parallel for
    for (int64_t row = 0; row < count; ++row) {
        const bool is_second = is_interleaved && row >= half;
        const int64_t place = is_second ? row - half : row, per_panel = is_interleaved ? lanes::WIDTH : PANEL;
        const int64_t panel = place / per_panel, column = place % per_panel + (is_second ? lanes::WIDTH : 0);
        scales[panel * PANEL + column] = quantize_row(rows + row * width, width, packed + panel * panel_bytes + column * PER_WORD);
    }
}

}  // namespace radixserve
