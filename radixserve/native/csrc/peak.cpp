// The most that a thread of this build can multiply: operands in registers, or in the first cache where ATen drives the matrix units. Also
// shows whether those can be used at all.
#include "door.h"
#include "pack.h"
#if defined(RADIXSERVE_BRGEMM)
#include "brgemm.h"
#endif

namespace radixserve {
namespace {

#if defined(RADIXSERVE_BRGEMM)

double multiply(int64_t num_rounds) {
    constexpr int SIDE = 32, DEPTH = 256;
    alignas(64) static thread_local Bf16 a[SIDE * DEPTH], b[DEPTH * SIDE];
    alignas(64) static thread_local float c[SIDE * SIDE];
    for (int64_t round = 0; round < num_rounds; ++round) brgemm_bf16(SIDE, SIDE, DEPTH, DEPTH, SIDE, SIDE, a, b, c);
    brgemm_end();
    return 2.0 * SIDE * SIDE * DEPTH * double(num_rounds);
}

#else

#if defined(RADIXSERVE_PAIR_DOT)
typedef PairDot Dot;
#else
typedef FloatDot Dot;
#endif
// independent chains, more than a multiply-add takes cycles, and no more than there are registers
constexpr int NUM_SUMS = VL == 16 ? 24 : 12;

double multiply(int64_t num_rounds) {
    Vec sums[NUM_SUMS], left = broadcast(1.0f);
    const Vec right = broadcast(0.5f);
    for (int i = 0; i < NUM_SUMS; ++i) sums[i] = broadcast(float(i));  // else they are one chain
    for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < NUM_SUMS; ++i) {
#if defined(__x86_64__)
            asm volatile("" : "+x"(left));  // else one product is computed for all
#elif defined(__aarch64__)
            asm volatile("" : "+w"(left));
#endif
            sums[i] = Dot::add(sums[i], left, right);
        }
    }
    Vec total = {};
    for (const Vec& sum : sums) total += sum;
    volatile float sink = sum_of(total);
    (void)sink;
    return 2.0 * NUM_SUMS * VL * Dot::per_word * double(num_rounds);
}

#endif

}  // namespace
}  // namespace radixserve

// `flops`: how many operations the rounds took, an addition and a multiplication being two
RADIXSERVE_DOOR int radixserve_peak(int64_t num_rounds, double* flops) {
    return radixserve::status_of([&] { *flops = radixserve::multiply(num_rounds); });
}

RADIXSERVE_DOOR const char* radixserve_failure() { return radixserve::failure; }
