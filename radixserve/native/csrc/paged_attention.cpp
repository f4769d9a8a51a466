// One layer's attention in pieces, and its doors: the C interface, and that for the decoder (attention.h).
#include "attention_kernel.h"
#include "door.h"
#include "scratch.h"
#include "team.h"

namespace radixserve {
namespace {

enum DType { FLOAT32 = 0, BFLOAT16 = 1 };

}  // namespace

struct Attention {
    AttentionShape shape;
    int dtype;
    bool is_shared_once;
    Step step{};
    Plan plan;
    Scratch<float> partials, scratch;
    int64_t scratch_per_thread = 0;
    // of radixserve_attention_run alone
    Team team;
    std::vector<Phase> phases;
};

namespace {

template <class T, class Dot>
void reserve(Attention& attention) {
    const Plan& plan = attention.plan;
    const int max_rows = std::max(plan.max_queries, 1) * attention.shape.group_size();
    attention.scratch_per_thread = int64_t(Kernel<T, Dot>::scratch_floats(attention.shape, max_rows) + 15) / 16 * 16;
    attention.partials.of(plan.num_partials * Kernel<T, Dot>::partial_floats(attention.shape));
    attention.scratch.of(attention.scratch_per_thread * attention.step.num_threads);
}

#if defined(RADIXSERVE_PAIR_DOT)
typedef PairDot Bf16Dot;
#else
typedef FloatDot Bf16Dot;
#endif

// calls `use` with the kernel of the type, and a worker's scratch
template <class Use>
void with_kernel(const Attention& attention, const AttentionLayer& layer, int worker, const Use& use) {
    float* const scratch = attention.scratch.data() + attention.scratch_per_thread * worker;
    if (attention.dtype == FLOAT32) {
        use(Kernel<float, FloatDot>(attention.shape, attention.plan, attention.step, layer, attention.partials.data()), scratch);
    } else {
        use(Kernel<Bf16, Bf16Dot>(attention.shape, attention.plan, attention.step, layer, attention.partials.data()), scratch);
    }
}

// the phases of one layer, for a caller without a team
class Run final : public Work {
  public:
    Run(Attention& attention, const AttentionLayer& layer, int64_t num_tokens) : attention_(attention), layer_(layer) {
        attention.team.resize(attention.step.num_threads);
        written_.make(num_tokens, attention.team.size());
        attention.phases.clear();
        const int64_t num_pieces[] = {written_.size(), attention_num_units(attention), attention_num_merges(attention)};
        for (int kind = WRITE; kind <= MERGE; ++kind)
            if (num_pieces[kind] > 0) attention.phases.push_back({kind, 0, num_pieces[kind], &seconds_});
        attention.team.run(attention.phases, *this);
    }

  private:
    enum Kind { WRITE, ATTEND, MERGE };
    void run(const Phase& phase, int worker, int64_t piece) override {
        switch (Kind(phase.kind)) {
            case WRITE: return attention_write(attention_, layer_, written_.first(piece), written_.end(piece));
            case ATTEND: return attention_attend(attention_, layer_, int(piece), worker);
            case MERGE: return attention_merge(attention_, layer_, int(piece), worker);
        }
    }
    Attention& attention_;
    const AttentionLayer& layer_;
    Cuts written_;
    double seconds_ = 0;
};

}  // namespace

void attention_reserve(Attention& attention) {
    attention.dtype == FLOAT32 ? reserve<float, FloatDot>(attention) : reserve<Bf16, Bf16Dot>(attention);
}

int attention_num_threads(const Attention& attention) { return attention.step.num_threads; }

int attention_num_units(const Attention& attention) { return int(attention.plan.units.size()); }
int attention_num_merges(const Attention& attention) { return int(attention.plan.merges.size()); }

void attention_write(const Attention& attention, const AttentionLayer& layer, int64_t begin, int64_t end) {
    with_kernel(attention, layer, 0, [&](const auto& kernel, float*) { kernel.write(begin, end); });
}

void attention_attend(const Attention& attention, const AttentionLayer& layer, int unit, int worker) {
    with_kernel(attention, layer, worker, [&](const auto& kernel, float* scratch) { kernel.attend(attention.plan.units[unit], scratch); });
#if defined(RADIXSERVE_BRGEMM)
    brgemm_end();
#endif
}

void attention_merge(const Attention& attention, const AttentionLayer& layer, int merge, int worker) {
    with_kernel(attention, layer, worker, [&](const auto& kernel, float* scratch) { kernel.merge(attention.plan.merges[merge], scratch); });
}

}  // namespace radixserve

// The C interface that attention/cpu_backend.py calls.
using namespace radixserve;

// null: no memory, or more query heads to a KV head than MAX_GROUP_SIZE
RADIXSERVE_DOOR void* radixserve_attention_new(int num_heads, int num_kv_heads, int head_dim, int page_size, int dtype, int is_shared_once) {
    if (num_heads / num_kv_heads > MAX_GROUP_SIZE) return nullptr;
    Attention* attention = nullptr;
    status_of([&] {
        attention = new Attention;
        attention->shape = {num_heads, num_kv_heads, head_dim, page_size};
        attention->dtype = dtype, attention->is_shared_once = is_shared_once;
    });
    return attention;
}

RADIXSERVE_DOOR void radixserve_attention_delete(void* handle) { delete static_cast<Attention*>(handle); }

// The arrays must live until the last run of the step. A Status (door.h).
RADIXSERVE_DOOR int radixserve_attention_plan(void* handle, int num_rows, int num_threads, const int32_t* qo_indptr, const int32_t* kv_indptr,
                                             const int32_t* kv_indices, const int32_t* seq_lens) {
    return status_of([&] {
        auto& attention = *static_cast<Attention*>(handle);
        const AttentionShape& shape = attention.shape;
        attention.step = {num_rows, num_threads, shape.page_size, shape.group_size(), shape.num_kv_heads, attention.is_shared_once,
                          qo_indptr, kv_indptr, kv_indices, seq_lens};
        attention.plan.make(attention.step);
    });
}

// tiles of the planned step that serve more than one row
RADIXSERVE_DOOR int radixserve_attention_num_shared_tiles(void* handle) { return static_cast<Attention*>(handle)->plan.num_shared_tiles; }

// a Status
RADIXSERVE_DOOR int radixserve_attention_run(void* handle, const AttentionLayer* layer, int64_t num_tokens) {
    return status_of([&] {
        auto& attention = *static_cast<Attention*>(handle);
        attention_reserve(attention);
        Run(attention, *layer, num_tokens);
    });
}
