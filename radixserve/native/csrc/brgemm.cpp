// See brgemm.h. The only file that needs torch's headers, and it is empty where there are no matrix units.
#if defined(RADIXSERVE_BRGEMM)
#include "brgemm.h"

#include <ATen/native/CPUBlas.h>

namespace radixserve {

void brgemm_bf16(int num_rows, int num_columns, int depth, int lda, int ldb, int ldc, const void* a, const void* b, float* c) {
    at::native::cpublas::brgemm(num_rows, num_columns, depth, lda, ldb, ldc, false, static_cast<const at::BFloat16*>(a),
                                static_cast<const at::BFloat16*>(b), c, true);
}

void brgemm_end() { at::native::cpublas::brgemm_release(true); }

}  // namespace radixserve
#endif
