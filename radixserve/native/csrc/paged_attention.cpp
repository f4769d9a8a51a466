// Attention over paged K and V, read in place. See attention_plan.h for how the work is cut.
//
// One order of summation: a query's result is the fold, in position order, of partial results over blocks of BLOCK tokens at absolute
// positions, and every partial is computed the same way however many other queries are in its tile. It depends neither on the rest of
// the batch nor on threads, groups, chunks, or where a cached part ended.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "attention_plan.h"
#include "pack.h"

namespace radixserve {
namespace {

constexpr int MARGIN = 16;  // floats behind a partial's values: its max, its sum, and up to a cache line

struct Shape {
    int num_heads, num_kv_heads, head_dim, page_size;
    int group_size() const { return num_heads / num_kv_heads; }
};

// tensors of one layer; strides in elements, the innermost dimension is dense. k and v share their strides
struct Layer {
    const void *q, *k, *v;
    void *pool_k, *pool_v, *out;
    const int64_t* out_slots;
    int64_t num_tokens, q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
};

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

// Scores of one query over one block to weights, in place or as bfloat16. Only the first `visible` keys count; `scale` brings scores to
// powers of two. Returns the largest scaled score and the sum of the weights as they are stored.
struct MaxAndSum {
    float max, sum;
};
template <class Packed>
__attribute__((noinline)) MaxAndSum to_weights(float* scores, int visible, int width, float scale, Packed* weights) {
    if (visible <= 0) {
        std::memset(static_cast<void*>(weights), 0, width * sizeof(Packed));
        return {MINUS_INFINITY, 0.0f};
    }
    for (int i = visible; i < width; ++i) scores[i] = MINUS_INFINITY;
    Vec highest = load(scores);
    for (int i = VL; i < width; i += VL) highest = max_of(highest, load(scores + i));
    const float max = max_of(highest) * scale;
    Vec sum = {};
    for (int i = 0; i < width; i += VL) {
        const Vec exact = exp2_of(load(scores + i) * broadcast(scale) - broadcast(max));
        if constexpr (sizeof(Packed) == sizeof(float)) {
            store(weights + i, exact);
            sum += exact;
        } else {
#if defined(RADIXSERVE_PAIR_DOT)
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(__m512(exact));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i), rounded);
            sum += Vec(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
#endif
        }
    }
    return {max, sum_of(sum)};
}

float exp2_of_one(float x) { return exp2_of(broadcast(x))[0]; }

// what is known of a query so far, and one more block. Never inlined: there must be one sequence of instructions
__attribute__((noinline)) void fold(float* values, MaxAndSum& state, const float* more, MaxAndSum block, int n) {
    if (block.max == MINUS_INFINITY) return;
    const float max = state.max > block.max ? state.max : block.max;
    const float keep = exp2_of_one(state.max - max), take = exp2_of_one(block.max - max);
    for (int i = 0; i < n; i += VL) store(values + i, load(values + i) * broadcast(keep) + load(more + i) * broadcast(take));
    state.sum = state.sum * keep + block.sum * take;
    state.max = max;
}

template <class T>
__attribute__((noinline)) void finish(const float* values, MaxAndSum state, T* out, int n) {
    for (int i = 0; i < n; ++i) from_float(values[i] / state.sum, out[i]);
}

template <class T, class Dot>
class Kernel {
    typedef typename PackedType<Dot>::type Packed;

  public:
    Kernel(const Shape& shape, const Plan& plan, const Step& step, const Layer& layer, float* partials)
        : shape_(shape), plan_(plan), step_(step), layer_(layer), partials_(partials) {
        padded_dim_ = round_up(shape.head_dim, VL * Dot::per_word);
        stride_ = padded_dim_ + MARGIN;
        scale_ = float(1.4426950408889634 / std::sqrt(double(shape.head_dim)));
    }

    static int64_t partial_floats(const Shape& shape) { return round_up(shape.head_dim, VL * Dot::per_word) + MARGIN; }
    static size_t scratch_floats(const Shape& shape, int max_rows) {
        const size_t dim = round_up(shape.head_dim, VL * Dot::per_word);
        // a unit with several heads is narrow, or a single query
        const size_t all_rows = max_rows + size_t(shape.num_kv_heads) * std::max(MAX_NARROW_ROWS, shape.group_size());
        return 2 * BLOCK * dim + VL * dim + 2 * max_rows * BLOCK + max_rows * dim + 2 * all_rows * dim + 2 * all_rows + 8 * 16;
    }

    void write(int64_t begin, int64_t end) const {
        const size_t num_bytes = shape_.head_dim * sizeof(T);
        for (int64_t token = begin; token < end; ++token)
            for (int head = 0; head < shape_.num_kv_heads; ++head) {
                const int64_t to = place(layer_.out_slots[token], head);
                std::memcpy(static_cast<T*>(layer_.pool_k) + to,
                            static_cast<const T*>(layer_.k) + token * layer_.k_token_stride + head * layer_.k_head_stride, num_bytes);
                std::memcpy(static_cast<T*>(layer_.pool_v) + to,
                            static_cast<const T*>(layer_.v) + token * layer_.v_token_stride + head * layer_.v_head_stride, num_bytes);
            }
    }

    void attend(const Unit& unit, float* scratch) const {
        const Tile& tile = plan_.tiles[unit.tile];
        const int group = shape_.group_size(), num_rows = tile.num_queries * group;
        const int dim = padded_dim_, dim_words = dim / Dot::per_word;
        const int num_heads = unit.kv_end - unit.kv_begin;
        Word* const keys = take(scratch, int64_t(BLOCK) * dim_words);
        Word* const packed_values = take(scratch, int64_t(BLOCK) * dim);
        float* const converted = take(scratch, VL * dim);
        float* const scores = take(scratch, num_rows * BLOCK);
        Word* const weights = take(scratch, num_rows * BLOCK);
        float* const values = take(scratch, num_rows * dim);
        Word* const all_queries = take(scratch, int64_t(num_heads) * num_rows * dim_words);
        float* const all_sums = take(scratch, int64_t(num_heads) * num_rows * dim);
        MaxAndSum* const all_states = reinterpret_cast<MaxAndSum*>(take(scratch, 2 * num_heads * num_rows));
        const bool is_folding = tile.partials < 0;
        for (int i = 0; i < num_heads; ++i) gather_queries(tile, unit.kv_begin + i, all_queries + int64_t(i) * num_rows * dim_words);
        if (is_folding) std::memset(all_sums, 0, sizeof(float) * num_heads * num_rows * dim);
        for (int i = 0; i < num_heads * num_rows; ++i) all_states[i] = {MINUS_INFINITY, 0.0f};
        Rows rows;
        const int num_bytes = num_heads * shape_.head_dim * int(sizeof(T)), num_cells = num_heads * (unit.block_end - unit.block_begin);
        for (int cell = 0; cell < num_cells; ++cell) {
            const int in_unit = cell % num_heads, kv_head = unit.kv_begin + in_unit, block = unit.block_begin + cell / num_heads;
            const Word* const queries = all_queries + int64_t(in_unit) * num_rows * dim_words;
            float* const sums = all_sums + int64_t(in_unit) * num_rows * dim;
            MaxAndSum* const states = all_states + in_unit * num_rows;
            if (in_unit == 0) {
                find_rows(tile, unit.kv_begin, block, rows);
                touch(rows.keys, rows.num_tokens, num_bytes);
                touch(rows.values, rows.num_tokens, num_bytes);
            } else {
                rows.go_to_next_head(shape_.head_dim);
            }
            const int num_tokens = rows.num_tokens, width = round_up(num_tokens, 32);
            pack_keys<Dot>(rows.keys, num_tokens, width, shape_.head_dim, dim, converted, keys);
            product<Dot>(num_rows, width, dim_words, queries, dim_words, keys, scores, BLOCK);
            pack_values(Dot(), rows.values, num_tokens, width, shape_.head_dim, dim, packed_values);
            MaxAndSum of_rows[MAX_LOCAL_ROWS];
            for (int row = 0; row < num_rows; ++row) {
                const int visible = plan_.positions[tile.first_query + row / group] + 1 - block * BLOCK;
                Packed* to = reinterpret_cast<Packed*>(weights + row * (BLOCK / Dot::per_word));
                of_rows[row] = to_weights(scores + row * BLOCK, std::min(visible, num_tokens), width, scale_, to);
            }
            float* to = is_folding ? values : partial(tile, kv_head, block, 0);
            const int to_stride = is_folding ? dim : stride_;
            product<Dot>(num_rows, dim, width / Dot::per_word, weights, BLOCK / Dot::per_word, packed_values, to, to_stride);
            for (int row = 0; row < num_rows; ++row) {
                if (is_folding) {
                    fold(sums + row * dim, states[row], values + row * dim, of_rows[row], dim);
                } else {
                    std::memcpy(to + row * stride_ + dim, &of_rows[row], sizeof(MaxAndSum));
                }
            }
            if (!is_folding || block + 1 < unit.block_end) continue;
            for (int row = 0; row < num_rows; ++row)
                finish(sums + row * dim, states[row], out_of(plan_.tokens[tile.first_query + row / group], kv_head, row % group), shape_.head_dim);
        }
    }

    void merge(const Merge& merge, float* sums) const {
        const int group = shape_.group_size();
        for (int head = 0; head < shape_.num_heads; ++head) {
            MaxAndSum state = {MINUS_INFINITY, 0.0f};
            std::memset(sums, 0, sizeof(float) * padded_dim_);
            for (int i = 0; i < merge.num_pieces; ++i) {
                const Piece& piece = plan_.pieces[merge.first_piece + i];
                const Tile& tile = plan_.tiles[piece.tile];
                for (int block = tile.block_begin; block < tile.block_end; ++block) {
                    const float* more = partial(tile, head / group, block, piece.query * group + head % group);
                    MaxAndSum of_block;
                    std::memcpy(&of_block, more + padded_dim_, sizeof of_block);
                    fold(sums, state, more, of_block, padded_dim_);
                }
            }
            finish(sums, state, out_of(merge.token, head / group, head % group), shape_.head_dim);
        }
    }

  private:
    static float* take(float*& scratch, int64_t n) {
        float* const taken = scratch;
        scratch += (n + 15) / 16 * 16;
        return taken;
    }
    int64_t place(int64_t slot, int kv_head) const { return (slot * shape_.num_kv_heads + kv_head) * shape_.head_dim; }
    float* partial(const Tile& tile, int kv_head, int block, int row) const {
        const int64_t num_blocks = tile.block_end - tile.block_begin, num_rows = tile.num_queries * shape_.group_size();
        return partials_ + (tile.partials + (kv_head * num_blocks + block - tile.block_begin) * num_rows + row) * stride_;
    }
    T* out_of(int token, int kv_head, int in_group) const {
        const int64_t head = int64_t(token) * shape_.num_heads + kv_head * shape_.group_size() + in_group;
        return static_cast<T*>(layer_.out) + head * shape_.head_dim;
    }
    void gather_queries(const Tile& tile, int kv_head, Word* to) const {
        const int group = shape_.group_size();
        std::memset(to, 0, sizeof(Packed) * tile.num_queries * group * padded_dim_);
        for (int query = 0; query < tile.num_queries; ++query)
            for (int i = 0; i < group; ++i) {
                const int64_t token = plan_.tokens[tile.first_query + query], head = kv_head * group + i;
                const T* from = static_cast<const T*>(layer_.q) + token * layer_.q_token_stride + head * layer_.q_head_stride;
                copy_row(from, shape_.head_dim, reinterpret_cast<Packed*>(to) + int64_t(query * group + i) * padded_dim_);
            }
    }
    // where one block of one KV head lies
    struct Rows {
        const T *keys[BLOCK], *values[BLOCK];
        int num_tokens;
        void go_to_next_head(int head_dim) {
            for (int i = 0; i < num_tokens; ++i) keys[i] += head_dim, values[i] += head_dim;
        }
    };
    void find_rows(const Tile& tile, int kv_head, int block, Rows& rows) const {
        const int32_t* pages = step_.kv_indices + step_.kv_indptr[tile.row];
        int page = block * BLOCK / shape_.page_size, offset = block * BLOCK % shape_.page_size;
        rows.num_tokens = std::min(BLOCK, tile.num_keys - block * BLOCK);
        for (int i = 0; i < rows.num_tokens; ++i) {
            const int64_t from = place(int64_t(pages[page]) * shape_.page_size + offset, kv_head);
            rows.keys[i] = static_cast<const T*>(layer_.pool_k) + from;
            rows.values[i] = static_cast<const T*>(layer_.pool_v) + from;
            if (++offset == shape_.page_size) ++page, offset = 0;
        }
    }

    static constexpr int MAX_LOCAL_ROWS = 1024;
    const Shape& shape_;
    const Plan& plan_;
    const Step& step_;
    const Layer& layer_;
    float* partials_;
    int padded_dim_, stride_;
    float scale_;
};

enum DType { FLOAT32 = 0, BFLOAT16 = 1 };

struct Attention {
    Shape shape;
    int dtype;
    bool is_shared_once;
    Step step{};
    Plan plan;
    AlignedFloats partials, scratch;
};

template <class T, class Dot>
int run(Attention& attention, const Layer& layer) {
    const Plan& plan = attention.plan;
    const Step& step = attention.step;
    const int max_rows = std::max(plan.max_queries, 1) * attention.shape.group_size();
    const size_t per_thread = (Kernel<T, Dot>::scratch_floats(attention.shape, max_rows) + 15) / 16 * 16;
    try {
        attention.partials.grow(plan.num_partials * Kernel<T, Dot>::partial_floats(attention.shape));
        attention.scratch.grow(per_thread * step.num_threads);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    const Kernel<T, Dot> kernel(attention.shape, plan, step, layer, attention.partials.data);
    std::atomic<int> next{0};
    const int num_units = int(plan.units.size()), num_merges = int(plan.merges.size());
#pragma omp parallel num_threads(step.num_threads)
    {
        float* const scratch = attention.scratch.data + per_thread * omp_get_thread_num();
        const int64_t thread = omp_get_thread_num(), num_threads = omp_get_num_threads();
        kernel.write(layer.num_tokens * thread / num_threads, layer.num_tokens * (thread + 1) / num_threads);
#pragma omp barrier
        for (int unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < num_units;) kernel.attend(plan.units[unit], scratch);
#if defined(RADIXSERVE_BRGEMM)
        brgemm_end();
#endif
        if (num_merges) {
#pragma omp barrier
#pragma omp for schedule(static)
            for (int i = 0; i < num_merges; ++i) kernel.merge(plan.merges[i], scratch);
        }
    }
    return 0;
}

}  // namespace
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
    void* handle, int num_rows, int num_threads, const int32_t* qo_indptr, const int32_t* kv_indptr, const int32_t* kv_indices, const int32_t* seq_lens
) {
    using namespace radixserve;
    auto& attention = *static_cast<Attention*>(handle);
    const Shape& shape = attention.shape;
    attention.step = {num_rows, num_threads, shape.page_size, shape.group_size(), shape.num_kv_heads, shape.head_dim, attention.is_shared_once, qo_indptr, kv_indptr, kv_indices, seq_lens};
    try {
        attention.plan.make(attention.step);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// tiles of the planned step that serve more than one row
int radixserve_attention_num_shared_tiles(void* handle) { return static_cast<radixserve::Attention*>(handle)->plan.num_shared_tiles; }

int radixserve_attention_run(void* handle, const radixserve::Layer* layer) {
    using namespace radixserve;
    auto& attention = *static_cast<Attention*>(handle);
    if (attention.dtype == FLOAT32) return run<float, FloatDot>(attention, *layer);
#if defined(RADIXSERVE_PAIR_DOT)
    return run<Bf16, PairDot>(attention, *layer);
#else
    return run<Bf16, FloatDot>(attention, *layer);
#endif
}
}
