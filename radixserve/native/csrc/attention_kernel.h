// Attention over paged K and V, read in place: what one thread does of one layer. See attention_plan.h for how the work is cut.
//
// One order of summation: a query's result is the fold, in position order, of partial results over blocks of BLOCK tokens at absolute
// positions, and every partial is computed the same way however many other queries are in its tile. It depends neither on the rest of
// the batch nor on threads, groups, chunks, or where a cached part ended.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "attention_plan.h"
#include "narrow.h"
#include "partial.h"

namespace radixserve {

constexpr int MARGIN = 16;  // floats behind a partial's values: its max, its sum, and up to a cache line

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim, page_size;
    int group_size() const { return num_heads / num_kv_heads; }
};

template <class T, class Dot>
class Kernel {
    typedef typename PackedType<Dot>::type Packed;
    // where one block of one KV head lies
    struct Rows {
        const T *keys[BLOCK], *values[BLOCK];
        int num_tokens;
        void go_to_next_head(int head_dim) {
            for (int i = 0; i < num_tokens; ++i) keys[i] += head_dim, values[i] += head_dim;
        }
    };

  public:
    Kernel(const AttentionShape& shape, const Plan& plan, const Step& step, const AttentionLayer& layer, float* partials)
        : shape_(shape), plan_(plan), step_(step), layer_(layer), partials_(partials) {
        padded_dim_ = round_up(shape.head_dim, VL * Dot::per_word);
        stride_ = padded_dim_ + MARGIN;
        scale_ = float(1.4426950408889634 / std::sqrt(double(shape.head_dim)));
    }

    static int64_t partial_floats(const AttentionShape& shape) { return round_up(shape.head_dim, VL * Dot::per_word) + MARGIN; }
    static size_t scratch_floats(const AttentionShape& shape, int max_rows) {
        const size_t dim = round_up(shape.head_dim, VL * Dot::per_word);
        // a unit with several heads is narrow, or a single query
        const size_t all_rows = max_rows + size_t(shape.num_kv_heads) * std::max(MAX_NARROW_ROWS, shape.group_size());
        return BLOCK * dim + VL * dim + 2 * max_rows * BLOCK + max_rows * dim + 2 * all_rows * dim + 2 * all_rows + 8 * 16;
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
        Word* const packed = take(scratch, int64_t(BLOCK) * dim);
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
        const int head_bytes = shape_.head_dim * int(sizeof(T)), num_cells = num_heads * (unit.block_end - unit.block_begin);
        for (int cell = 0; cell < num_cells; ++cell) {
            const int in_unit = cell % num_heads, kv_head = unit.kv_begin + in_unit, block = unit.block_begin + cell / num_heads;
            const Word* const queries = all_queries + int64_t(in_unit) * num_rows * dim_words;
            float* const sums = all_sums + int64_t(in_unit) * num_rows * dim;
            MaxAndSum* const states = all_states + in_unit * num_rows;
            if (in_unit == 0) {
                find_rows(tile, unit.kv_begin, block, rows);
                touch(rows.keys, rows.num_tokens, num_heads * head_bytes, shape_.num_kv_heads * head_bytes);
                touch(rows.values, rows.num_tokens, num_heads * head_bytes, shape_.num_kv_heads * head_bytes);
            } else {
                rows.go_to_next_head(shape_.head_dim);
            }
            const int num_tokens = rows.num_tokens, width = round_up(num_tokens, 32);
            multiply_keys(rows, num_rows, width, queries, converted, packed, scores);
            MaxAndSum of_rows[MAX_GROUP_SIZE];  // a tile of several queries has less
            int seen_by_all = num_tokens;
            for (int row = 0; row < num_rows; ++row) {
                const int visible = num_visible(tile, row / group, block, num_tokens);
                Packed* to = reinterpret_cast<Packed*>(weights + row * (BLOCK / Dot::per_word));
                of_rows[row] = to_weights(scores + row * BLOCK, visible, width, scale_, to);
                seen_by_all = std::min(seen_by_all, visible);
            }
            float* to = is_folding ? values : partial(tile, kv_head, block, 0);
            const int to_stride = is_folding ? dim : stride_;
            // a weight of 0 does not take away what is infinite or NaN: then each query is multiplied with what it sees, to the same bits
            const int num_hidden = num_tokens - seen_by_all;
            const bool is_apart = num_hidden > 0 && has_no_number(rows.values + seen_by_all, num_hidden, shape_.head_dim);
            for (int row = 0, num_together = is_apart ? group : num_rows; row < num_rows; row += num_together) {
                if (is_apart) rows.num_tokens = num_visible(tile, row / group, block, num_tokens);
                multiply_values(rows, num_together, width, weights + row * (BLOCK / Dot::per_word), packed, to + row * to_stride, to_stride);
            }
            rows.num_tokens = num_tokens;
            for (int row = 0; row < num_rows; ++row) {
                if (is_folding) {
                    fold(sums + row * dim, states[row], values + row * dim, of_rows[row], dim);
                } else {
                    std::memcpy(to + row * stride_ + dim, &of_rows[row], sizeof(MaxAndSum));
                }
            }
            if (!is_folding || block + 1 < unit.block_end) continue;
            for (int row = 0; row < num_rows; ++row)
                finish(sums + row * dim, states[row], out_of(plan_.tokens[tile.first_query + row / group], kv_head, row % group),
                       shape_.head_dim);
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
    // scores [num_rows, BLOCK] of one block's keys
    void multiply_keys(const Rows& rows, int num_rows, int width, const Word* queries, float* converted, Word* packed, float* scores) const {
        const int dim = padded_dim_, words = dim / Dot::per_word;
#if defined(RADIXSERVE_PAIR_DOT)
        if constexpr (sizeof(T) == 2 && Dot::per_word == 2)
            if (is_narrow_product(num_rows, shape_.head_dim))
                return score_narrow(num_rows, rows.keys, rows.num_tokens, width, shape_.head_dim, dim, queries, scores, BLOCK);
#endif
        pack_keys<Dot>(rows.keys, rows.num_tokens, width, shape_.head_dim, dim, converted, packed);
        product<Dot>(num_rows, width, words, queries, words, packed, scores, BLOCK);
    }
    // weights [num_rows, BLOCK] times one block's values
    void multiply_values(const Rows& rows, int num_rows, int width, const Word* weights, Word* packed, float* out, int stride) const {
        const int steps = BLOCK / Dot::per_word;
#if defined(RADIXSERVE_PAIR_DOT)
        if constexpr (sizeof(T) == 2 && Dot::per_word == 2)
            if (is_narrow_product(num_rows, shape_.head_dim))
                return mix_narrow(num_rows, rows.values, rows.num_tokens, width, shape_.head_dim, padded_dim_, weights, steps, out, stride);
#endif
        pack_values(Dot(), rows.values, rows.num_tokens, width, shape_.head_dim, padded_dim_, packed);
        product<Dot>(num_rows, padded_dim_, width / Dot::per_word, weights, steps, packed, out, stride);
    }
    // how many of a block's tokens a query sees
    int num_visible(const Tile& tile, int query, int block, int num_tokens) const {
        return std::clamp(plan_.positions[tile.first_query + query] + 1 - block * BLOCK, 0, num_tokens);
    }
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

    const AttentionShape& shape_;
    const Plan& plan_;
    const Step& step_;
    const AttentionLayer& layer_;
    float* partials_;
    int padded_dim_, stride_;
    float scale_;
};

}  // namespace radixserve
