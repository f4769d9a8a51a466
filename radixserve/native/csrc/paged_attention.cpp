// One layer's attention by a team of threads, and its doors: the C interface, and that for the decoder (attention.h).
#include <omp.h>

#include <atomic>
#include <memory>
#include <new>

#include "attention_kernel.h"

namespace radixserve {
namespace {

struct AlignedFloats {
    std::unique_ptr<char[]> memory;
    float* data = nullptr;
    size_t size = 0;
    void grow(size_t n) {
        if (n <= size) return;
        memory.reset(new char[n * sizeof(float) + 64]);
        data = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t(63));
        size = n;
    }
};

enum DType { FLOAT32 = 0, BFLOAT16 = 1 };

}  // namespace

struct Attention {
    AttentionShape shape;
    int dtype;
    bool is_shared_once;
    Step step{};
    Plan plan;
    AlignedFloats partials, scratch;
    int64_t scratch_per_thread = 0;
    std::atomic<int> next_unit{0};
};

namespace {

template <class T, class Dot>
bool reserve(Attention& attention) {
    const Plan& plan = attention.plan;
    const int max_rows = std::max(plan.max_queries, 1) * attention.shape.group_size();
    attention.scratch_per_thread = int64_t(Kernel<T, Dot>::scratch_floats(attention.shape, max_rows) + 15) / 16 * 16;
    try {
        attention.partials.grow(plan.num_partials * Kernel<T, Dot>::partial_floats(attention.shape));
        attention.scratch.grow(attention.scratch_per_thread * attention.step.num_threads);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

template <class T, class Dot>
void attend(Attention& attention, const AttentionLayer& layer, int id, int num_threads) {
    const Plan& plan = attention.plan;
    const Kernel<T, Dot> kernel(attention.shape, plan, attention.step, layer, attention.partials.data);
    float* const scratch = attention.scratch.data + attention.scratch_per_thread * id;
    const int num_units = int(plan.units.size()), num_merges = int(plan.merges.size());
    kernel.write(layer.num_tokens * id / num_threads, layer.num_tokens * (id + 1) / num_threads);
    // nobody takes units of the last layer any more: the caller's barrier lies between
    if (id == 0) attention.next_unit.store(0, std::memory_order_relaxed);
#pragma omp barrier
    for (int unit; (unit = attention.next_unit.fetch_add(1, std::memory_order_relaxed)) < num_units;) kernel.attend(plan.units[unit], scratch);
#if defined(RADIXSERVE_BRGEMM)
    brgemm_end();
#endif
    if (num_merges == 0) return;
#pragma omp barrier
    const int end = int(int64_t(num_merges) * (id + 1) / num_threads);
    for (int i = int(int64_t(num_merges) * id / num_threads); i < end; ++i) kernel.merge(plan.merges[i], scratch);
}

#if defined(RADIXSERVE_PAIR_DOT)
typedef PairDot Bf16Dot;
#else
typedef FloatDot Bf16Dot;
#endif

}  // namespace

bool attention_reserve(Attention& attention) {
    return attention.dtype == FLOAT32 ? reserve<float, FloatDot>(attention) : reserve<Bf16, Bf16Dot>(attention);
}

int attention_num_threads(const Attention& attention) { return attention.step.num_threads; }

void attention_attend(Attention& attention, const AttentionLayer& layer, int id, int num_threads) {
    if (attention.dtype == FLOAT32) return attend<float, FloatDot>(attention, layer, id, num_threads);
    attend<Bf16, Bf16Dot>(attention, layer, id, num_threads);
}

}  // namespace radixserve

// The C interface that attention/cpu_backend.py calls. Non-zero means no memory.
extern "C" {

void* radixserve_attention_new(int num_heads, int num_kv_heads, int head_dim, int page_size, int dtype, int is_shared_once) {
    using namespace radixserve;
    auto* attention = new (std::nothrow) Attention;
    if (attention) {
        attention->shape = {num_heads, num_kv_heads, head_dim, page_size};
        attention->dtype = dtype, attention->is_shared_once = is_shared_once;
    }
    return attention;
}

void radixserve_attention_delete(void* handle) { delete static_cast<radixserve::Attention*>(handle); }

// the arrays must live until the last run of the step
int radixserve_attention_plan(
    void* handle, int num_rows, int num_threads, const int32_t* qo_indptr, const int32_t* kv_indptr, const int32_t* kv_indices,
    const int32_t* seq_lens
) {
    using namespace radixserve;
    auto& attention = *static_cast<Attention*>(handle);
    const AttentionShape& shape = attention.shape;
    attention.step = {num_rows,           num_threads,    shape.page_size,          shape.group_size(),
                      shape.num_kv_heads, shape.head_dim, attention.is_shared_once, qo_indptr,
                      kv_indptr,          kv_indices,     seq_lens};
    try {
        attention.plan.make(attention.step);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// tiles of the planned step that serve more than one row
int radixserve_attention_num_shared_tiles(void* handle) { return static_cast<radixserve::Attention*>(handle)->plan.num_shared_tiles; }

int radixserve_attention_run(void* handle, const radixserve::AttentionLayer* layer) {
    using namespace radixserve;
    auto& attention = *static_cast<Attention*>(handle);
    if (!attention_reserve(attention)) return 1;
#pragma omp parallel num_threads(attention.step.num_threads)
    attention_attend(attention, *layer, omp_get_thread_num(), omp_get_num_threads());
    return 0;
}
}
