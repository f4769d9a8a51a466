// C = A B for one block of attention. B is packed in panels of 64 columns, [panel][steps][width <= 64] words; a word is one float or a
// pair of bfloat16 that are neighbours along the summed dimension. Every element of C is one chain of multiply-adds over the steps in
// order, so a row's bits depend neither on how many rows A has nor on zeros that follow its own steps.
#pragma once
#include "vec.h"
#if defined(RADIXSERVE_BRGEMM)
#include "brgemm.h"
#endif

namespace radixserve {

constexpr int KV_PANEL = 64;

// FloatDot multiplies floats, PairDot multiplies pairs of bfloat16
struct FloatDot {
    static constexpr int per_word = 1;
    static Vec add(Vec sum, Vec a, Vec b) { return sum + a * b; }
};
#if defined(__AVX512BF16__) && RADIXSERVE_VL == 16
#define RADIXSERVE_PAIR_DOT
struct PairDot {
    static constexpr int per_word = 2;
    static Vec add(Vec sum, Vec a, Vec b) { return Vec(_mm512_dpbf16_ps(__m512(sum), (__m512bh)__m512(a), (__m512bh)__m512(b))); }
};
#endif

template <class Dot, int MR, int NR>
void tile_product(int steps, const Word* a, int lda, const Word* b, int ldb, float* c, int ldc) {
    Vec sum[MR][NR] = {};
    for (int step = 0; step < steps; ++step) {
        Vec right[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) right[n] = load(b + step * ldb + n * VL);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
            const Vec left = broadcast(a[m * lda + step]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) sum[m][n] = Dot::add(sum[m][n], left, right[n]);
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NR; ++n) store(c + m * ldc + n * VL, sum[m][n]);
}

template <class Dot, int NR>
void column_product(int num_rows, int steps, const Word* a, int lda, const Word* b, int ldb, float* c, int ldc) {
    int m = 0;
    for (; m + 6 <= num_rows; m += 6) tile_product<Dot, 6, NR>(steps, a + m * lda, lda, b, ldb, c + m * ldc, ldc);
    const Word* rest = a + m * lda;
    float* out = c + m * ldc;
    switch (num_rows - m) {
        case 1: return tile_product<Dot, 1, NR>(steps, rest, lda, b, ldb, out, ldc);
        case 2: return tile_product<Dot, 2, NR>(steps, rest, lda, b, ldb, out, ldc);
        case 3: return tile_product<Dot, 3, NR>(steps, rest, lda, b, ldb, out, ldc);
        case 4: return tile_product<Dot, 4, NR>(steps, rest, lda, b, ldb, out, ldc);
        case 5: return tile_product<Dot, 5, NR>(steps, rest, lda, b, ldb, out, ldc);
        default: return;
    }
}

// columns that one pass keeps in registers, six rows high
constexpr int WIDE = VL == 16 ? 4 : 2;

// a [num_rows, lda] words, b packed as above, c [num_rows, ldc] floats; num_columns is a multiple of VL
template <class Dot>
void product(int num_rows, int num_columns, int steps, const Word* a, int lda, const Word* b, float* c, int ldc) {
    for (int first = 0; first < num_columns; first += KV_PANEL) {
        const int width = num_columns - first < KV_PANEL ? num_columns - first : KV_PANEL;
        const Word* panel = b + int64_t(first) * steps;
#if defined(RADIXSERVE_BRGEMM)
        if (Dot::per_word == 2) {
            brgemm_bf16(num_rows, width, 2 * steps, 2 * lda, width, ldc, a, panel, c + first);
            continue;
        }
#endif
        int n = 0;
        for (; n + WIDE * VL <= width; n += WIDE * VL)
            column_product<Dot, WIDE>(num_rows, steps, a, lda, panel + n, width, c + first + n, ldc);
        for (; n < width; n += VL) column_product<Dot, 1>(num_rows, steps, a, lda, panel + n, width, c + first + n, ldc);
    }
}

}  // namespace radixserve
