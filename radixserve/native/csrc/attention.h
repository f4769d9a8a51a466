// Attention of a planned step, as whoever owns a parallel region calls it, once a layer. Knows no types: see dtype in paged_attention.cpp.
#pragma once
#include <cstdint>

namespace radixserve {

// tensors of one layer; strides in elements, the innermost dimension is dense
struct AttentionLayer {
    const void *q, *k, *v;
    void *pool_k, *pool_v, *out;
    const int64_t* out_slots;
    int64_t num_tokens, q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
};

struct Attention;

// Memory for the planned step, before the region begins. False: there is none.
bool attention_reserve(Attention& attention);
// how many threads the plan counts on: a region must have no more
int attention_num_threads(const Attention& attention);
// This thread's share: writes k and v of tokens [num_tokens * id / num_threads, num_tokens * (id + 1) / num_threads), which it may just
// have computed; a barrier; attends. All threads of the team call it, with a barrier of theirs before `out` is read or it is called again.
void attention_attend(Attention& attention, const AttentionLayer& layer, int id, int num_threads);

}  // namespace radixserve
