// Attention of a planned step, in pieces for whoever owns a team. Knows no types: see dtype in paged_attention.cpp.
#pragma once
#include <cstdint>

namespace radixserve {

// tensors of one layer; strides in elements, the innermost dimension is dense
struct AttentionLayer {
    const void *q, *k, *v;
    void *pool_k, *pool_v, *out;
    const int64_t* out_slots;
    int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
};

struct Attention;

// Memory for the planned step, before the first piece. Throws std::bad_alloc.
void attention_reserve(Attention& attention);
// how many threads the plan counts on: `worker` below is less
int attention_num_threads(const Attention& attention);

// Three phases of a layer. First k and v of all tokens are written where they belong:
void attention_write(const Attention& attention, const AttentionLayer& layer, int64_t begin, int64_t end);
// then all units are computed, in any order, at best in this one:
int attention_num_units(const Attention& attention);
void attention_attend(const Attention& attention, const AttentionLayer& layer, int unit, int worker);
// then what was computed in parts is merged; after that `out` is whole
int attention_num_merges(const Attention& attention);
void attention_merge(const Attention& attention, const AttentionLayer& layer, int merge, int worker);

}  // namespace radixserve
