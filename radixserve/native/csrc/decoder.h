// A decoder's step. Whole, with attention.h, in one parallel region: forward(). Or between attentions of another kind, each stretch a
// region of its own: begin() up to the first q, k, v; then for every layer advance() from its attention's result to the next q, k, v, or to
// the final norm. The bits are the same. Knows nothing of requests or logits wanted.
#pragma once
#include <omp.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "attention.h"
#include "row_ops.h"

namespace radixserve {

// memory that only grows: fresh pages from the operating system cost more than what is written to them
template <class T>
class Scratch {
public:
    T* of(int64_t count) {  // null: no memory
        if (count > size_) {
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
            size_ = memory_ ? count : 0;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(T* at) const { std::free(at); }
    };
    std::unique_ptr<T, Free> memory_;
    int64_t size_ = 0;
};

// wall seconds so far, as thread 0 sees them: waiting for the other threads counts to the part that is waited for
struct Seconds {
    double attention = 0, products = 0, row_ops = 0, head = 0;
};

// K and V of every layer, and where those of this step's tokens go
struct Pools {
    void* const* k;  // [layers]
    void* const* v;
    const int64_t* out_slots;  // [n]
};

// up to here every thread norms all rows for itself, which takes less time than to wait for the others
constexpr int64_t MAX_ROWS_NORMED_BY_ALL = 16;

struct Shape {
    int64_t hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab;
    float eps;
    int64_t heads_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
    int64_t q_width() const { return num_heads * head_dim; }
};

template <class T>
class Decoder {
    static constexpr int64_t PER_WORD = 4 / sizeof(T);
    // rows of an operand are so far apart that many of them do not fall into one set of the cache
    static constexpr int64_t PADDING = 64 / sizeof(T);

public:
    struct Layer {
        const T* input_norm;
        PackedLinear qkv;
        const T* qkv_bias;  // or null
        const T* qk_norm;   // or null; a weight for each head of q, then of k
        PackedLinear output;
        const T* post_attention_norm;
        PackedLinear gate_up, down;
    };

    Decoder(const Shape& shape, const T* rotary, const T* embedding, const T* final_norm, const uint32_t* head)
        : shape_(shape), rotary_(rotary), embedding_(embedding), final_norm_(final_norm), head_(linear(head, shape.vocab, shape.hidden)) {}

    void add_layer(const T* input_norm, const uint32_t* qkv, const T* qkv_bias, const T* qk_norm, const uint32_t* output,
                   const T* post_attention_norm, const uint32_t* gate_up, const uint32_t* down) {
        const Shape& s = shape_;
        const int64_t num_gate_panels = (s.intermediate + lanes::WIDTH - 1) / lanes::WIDTH;
        layers_.push_back({input_norm, linear(qkv, s.heads_width(), s.hidden), qkv_bias, qk_norm, linear(output, s.hidden, s.q_width()),
                           post_attention_norm, PackedLinear{gate_up, num_gate_panels, s.hidden / PER_WORD},
                           linear(down, s.hidden, s.intermediate)});
    }

    // ids, positions [n] -> `out` [n, hidden], normed, through attention as it was planned. False: no memory.
    bool forward(int64_t n, const int64_t* ids, const int64_t* positions, Attention& attention, const Pools& pools, T* out) {
        const int num_threads = attention_num_threads(attention);
        T* const heads = heads_memory_.of(n * shape_.heads_width());
        T* const attended = attended_memory_.of(n * shape_.q_width());
        if (heads == nullptr || attended == nullptr || !reserve(n, num_threads) || !attention_reserve(attention)) return false;
#pragma omp parallel num_threads(num_threads)
        {
            Team team(omp_get_thread_num(), omp_get_num_threads());
            embed(n, ids, team);
            for (int64_t layer = 0; layer < num_layers(); ++layer) {
                start_layer(layers_[layer], n, positions, heads, team);
                // this thread has rotated the rows that it writes
                attention_attend(attention, arguments(layer, n, heads, attended, pools), team.id, team.size);
#pragma omp barrier
                team.lap(seconds_.attention);
                finish_layer(layers_[layer], n, attended, team);
            }
            norm_own_rows(final_norm_, n, out, shape_.hidden, team);
        }
        return true;
    }

    // ids, positions [n] -> heads [n, num_heads + 2 num_kv_heads, head_dim] of layer 0: q and k rotated, then v. False: no memory.
    bool begin(int64_t n, const int64_t* ids, const int64_t* positions, T* heads) {
        if (!reserve(n, omp_get_max_threads())) return false;
#pragma omp parallel
        {
            Team team(omp_get_thread_num(), omp_get_num_threads());
            embed(n, ids, team);
            start_layer(layers_[0], n, positions, heads, team);
        }
        return true;
    }

    // attended [n, num_heads * head_dim] of `layer` -> heads of the next one; after the last, `out` [n, hidden], normed
    void advance(int64_t layer, int64_t n, const T* attended, const int64_t* positions, T* heads, T* out) {
#pragma omp parallel
        {
            Team team(omp_get_thread_num(), omp_get_num_threads());
            finish_layer(layers_[layer], n, attended, team);
            if (layer + 1 < num_layers()) {
                start_layer(layers_[layer + 1], n, positions, heads, team);
            } else {
                norm_own_rows(final_norm_, n, out, shape_.hidden, team);
            }
        }
    }

    // rows [n, hidden] after the final norm -> float32 [n, vocab], not rounded to T in between
    void logits(int64_t n, const T* rows, float* to) {
        const double start = omp_get_wtime();
#pragma omp parallel
        multiply<T>(rows, n, shape_.hidden, head_, omp_get_thread_num(), omp_get_num_threads(),
                    StoreSums<float>{to, shape_.vocab, shape_.vocab, nullptr});
        seconds_.head += omp_get_wtime() - start;
    }

    const Seconds& seconds() const { return seconds_; }
    int64_t num_layers() const { return int64_t(layers_.size()); }

private:
    static PackedLinear linear(const uint32_t* packed, int64_t rows, int64_t columns) {
        return PackedLinear{packed, num_panels_of(rows), columns / PER_WORD};
    }

    int64_t hidden_stride() const { return shape_.hidden + PADDING; }

    bool reserve(int64_t n, int num_threads) {
        const int64_t num_copies = n <= MAX_ROWS_NORMED_BY_ALL ? num_threads : 1;
        hidden_ = hidden_memory_.of(n * shape_.hidden);
        normed_ = normed_memory_.of(num_copies * n * hidden_stride());
        mlp_ = mlp_memory_.of(n * (shape_.intermediate + PADDING));
        return hidden_ != nullptr && normed_ != nullptr && mlp_ != nullptr;
    }

    // a thread among those of its region, and its stopwatch, which only the first one carries
    struct Team {
        const int id, size;
        Team(int thread, int num_threads) : id(thread), size(num_threads), last_(omp_get_wtime()) {}
        Share rows(int64_t n) const { return Share(n, id, size); }
        // adds the time since the last call to one of the counters
        void lap(double& counter) {
            if (id != 0) return;
            const double now = omp_get_wtime();
            counter += now - last_;
            last_ = now;
        }

    private:
        double last_;
    };

    void embed(int64_t n, const int64_t* ids, Team& team) {
        const Share rows = team.rows(n);
        for (int64_t row = rows.first; row < rows.end; ++row) {
            T* to = hidden_ + row * shape_.hidden;
            if (embedding_ != nullptr) {
                std::memcpy(to, embedding_ + ids[row] * shape_.hidden, shape_.hidden * sizeof(T));
            } else {
                unpack_row(head_, ids[row], reinterpret_cast<uint32_t*>(to));
            }
        }
#pragma omp barrier
    }

    // q, k, v of a layer, whose input all threads have finished. At the end a thread may read the rows of its own share only.
    // Never inlined, here and below: whoever calls, it is one sequence of instructions.
    __attribute__((noinline)) void start_layer(const Layer& layer, int64_t n, const int64_t* positions, T* heads, Team& team) {
        const Shape& s = shape_;
        const T* normed = norm(layer.input_norm, n, team);
        multiply<T>(normed, n, hidden_stride(), layer.qkv, team.id, team.size,
                    StoreSums<T>{heads, s.heads_width(), s.heads_width(), layer.qkv_bias});
#pragma omp barrier
        team.lap(seconds_.products);
        const Share rows = team.rows(n);
        for (int64_t row = rows.first; row < rows.end; ++row) {
            for (int64_t head = 0; head < s.num_heads + s.num_kv_heads; ++head) {
                T* at = heads + row * s.heads_width() + head * s.head_dim;
                if (layer.qk_norm != nullptr) rms_norm(at, layer.qk_norm + head * s.head_dim, s.head_dim, s.eps, at);
                rotate(at, rotary_ + positions[row] * s.head_dim, s.head_dim);
            }
        }
        team.lap(seconds_.row_ops);
    }

    // from the attention's result to the layer's, which all threads have finished at the end
    __attribute__((noinline)) void finish_layer(const Layer& layer, int64_t n, const T* attended, Team& team) {
        const Shape& s = shape_;
        const int64_t mlp_stride = s.intermediate + PADDING;
        const AddSums<T> add_to_hidden{hidden_, s.hidden, s.hidden};
        multiply<T>(attended, n, s.q_width(), layer.output, team.id, team.size, add_to_hidden);
#pragma omp barrier
        team.lap(seconds_.products);
        const T* normed = norm(layer.post_attention_norm, n, team);
        multiply<T>(normed, n, hidden_stride(), layer.gate_up, team.id, team.size, SiluTimesUp<T>{mlp_, mlp_stride, s.intermediate});
#pragma omp barrier
        multiply<T>(mlp_, n, mlp_stride, layer.down, team.id, team.size, add_to_hidden);
#pragma omp barrier
        team.lap(seconds_.products);
    }

    // hidden, normed, all rows of it: [n, hidden_stride()]
    const T* norm(const T* weight, int64_t n, Team& team) {
        if (n <= MAX_ROWS_NORMED_BY_ALL) {
            T* const to = normed_ + team.id * n * hidden_stride();
            norm_rows(weight, Share(n, 0, 1), to, hidden_stride());
            team.lap(seconds_.row_ops);
            return to;
        }
        norm_own_rows(weight, n, normed_, hidden_stride(), team);
#pragma omp barrier
        team.lap(seconds_.row_ops);
        return normed_;
    }

    void norm_own_rows(const T* weight, int64_t n, T* to, int64_t stride, Team& team) {
        norm_rows(weight, team.rows(n), to, stride);
        team.lap(seconds_.row_ops);
    }

    __attribute__((noinline)) void norm_rows(const T* weight, Share rows, T* to, int64_t stride) const {
        for (int64_t row = rows.first; row < rows.end; ++row) {
            rms_norm(hidden_ + row * shape_.hidden, weight, shape_.hidden, shape_.eps, to + row * stride);
        }
    }

    AttentionLayer arguments(int64_t layer, int64_t n, const T* heads, T* attended, const Pools& pools) const {
        const Shape& s = shape_;
        const T *k = heads + s.q_width(), *v = k + s.num_kv_heads * s.head_dim;
        const int64_t width = s.heads_width(), dim = s.head_dim;
        return {heads, k, v, pools.k[layer], pools.v[layer], attended, pools.out_slots, n, width, dim, width, dim, width, dim};
    }

    Shape shape_;
    Seconds seconds_;
    const T *rotary_, *embedding_, *final_norm_;
    PackedLinear head_;
    std::vector<Layer> layers_;
    Scratch<T> hidden_memory_, normed_memory_, mlp_memory_, heads_memory_, attended_memory_;
    T *hidden_ = nullptr, *normed_ = nullptr, *mlp_ = nullptr;
};

}  // namespace radixserve
