// Products of bfloat16 tiles by ATen, which reaches the matrix units (AMX) where there are any. Compiled only for processors that have them.
#pragma once

namespace radixserve {

// c [num_rows, ldc] float = a [num_rows, lda] b, b as [depth / 2][num_columns][2]; lda and depth count bfloat16
void brgemm_bf16(int num_rows, int num_columns, int depth, int lda, int ldb, int ldc, const void* a, const void* b, float* c);
// gives the matrix unit's state back; once per thread after its last product
void brgemm_end();

}  // namespace radixserve
