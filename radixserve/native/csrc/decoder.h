// A decoder's step between its attentions, each stretch one parallel region: begin() up to the first q, k, v; then for every layer
// advance() from its attention's result to the next q, k, v, or to the final norm. Knows nothing of pages, requests or logits wanted.
#pragma once
#include <omp.h>

#include <cstdlib>
#include <memory>
#include <vector>

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
    double products = 0, row_ops = 0, head = 0;
};

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

    // ids, positions [n] -> heads [n, num_heads + 2 num_kv_heads, head_dim] of layer 0: q and k rotated, then v. False: no memory.
    bool begin(int64_t n, const int64_t* ids, const int64_t* positions, T* heads) {
        if (!reserve(n)) return false;
#pragma omp parallel
        {
            const int id = omp_get_thread_num(), count = omp_get_num_threads();
            Lap lap(id);
            const Share rows(n, id, count);
            for (int64_t row = rows.first; row < rows.end; ++row) {
                T* to = hidden_ + row * shape_.hidden;
                if (embedding_ != nullptr) {
                    std::memcpy(to, embedding_ + ids[row] * shape_.hidden, shape_.hidden * sizeof(T));
                } else {
                    unpack_row(head_, ids[row], reinterpret_cast<uint32_t*>(to));
                }
            }
#pragma omp barrier
            start_layer(layers_[0], n, positions, heads, id, count, lap);
        }
        return true;
    }

    // attended [n, num_heads * head_dim] of `layer` -> heads of the next one; after the last, `out` [n, hidden], normed
    void advance(int64_t layer, int64_t n, const T* attended, const int64_t* positions, T* heads, T* out) {
        const Shape& s = shape_;
        const Layer& weights = layers_[layer];
        const int64_t hidden_stride = s.hidden + PADDING, mlp_stride = s.intermediate + PADDING;
#pragma omp parallel
        {
            const int id = omp_get_thread_num(), count = omp_get_num_threads();
            Lap lap(id);
            multiply<T>(attended, n, s.q_width(), weights.output, id, count, AddSums<T>{hidden_, s.hidden, s.hidden});
#pragma omp barrier
            lap.ends(seconds_.products);
            norm_rows(weights.post_attention_norm, n, normed_, hidden_stride, id, count);
#pragma omp barrier
            lap.ends(seconds_.row_ops);
            multiply<T>(normed_, n, hidden_stride, weights.gate_up, id, count, SiluTimesUp<T>{mlp_, mlp_stride, s.intermediate});
#pragma omp barrier
            multiply<T>(mlp_, n, mlp_stride, weights.down, id, count, AddSums<T>{hidden_, s.hidden, s.hidden});
#pragma omp barrier
            lap.ends(seconds_.products);
            if (layer + 1 < int64_t(layers_.size())) {
                start_layer(layers_[layer + 1], n, positions, heads, id, count, lap);
            } else {
                norm_rows(final_norm_, n, out, s.hidden, id, count);
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

private:
    static PackedLinear linear(const uint32_t* packed, int64_t rows, int64_t columns) {
        return PackedLinear{packed, num_panels_of(rows), columns / PER_WORD};
    }

    bool reserve(int64_t n) {
        hidden_ = hidden_memory_.of(n * shape_.hidden);
        normed_ = normed_memory_.of(n * (shape_.hidden + PADDING));
        mlp_ = mlp_memory_.of(n * (shape_.intermediate + PADDING));
        return hidden_ != nullptr && normed_ != nullptr && mlp_ != nullptr;
    }

    // adds the time since the last call to one of the counters, on thread 0
    class Lap {
    public:
        explicit Lap(int id) : is_counted_(id == 0), last_(omp_get_wtime()) {}
        void ends(double& counter) {
            if (!is_counted_) return;
            const double now = omp_get_wtime();
            counter += now - last_;
            last_ = now;
        }

    private:
        bool is_counted_;
        double last_;
    };

    // all of hidden has been written when this is called
    void start_layer(const Layer& layer, int64_t n, const int64_t* positions, T* heads, int id, int count, Lap& lap) {
        const Shape& s = shape_;
        const int64_t stride = s.hidden + PADDING;
        norm_rows(layer.input_norm, n, normed_, stride, id, count);
#pragma omp barrier
        lap.ends(seconds_.row_ops);
        multiply<T>(normed_, n, stride, layer.qkv, id, count, StoreSums<T>{heads, s.heads_width(), s.heads_width(), layer.qkv_bias});
#pragma omp barrier
        lap.ends(seconds_.products);
        const Share rows(n, id, count);
        for (int64_t row = rows.first; row < rows.end; ++row) {
            for (int64_t head = 0; head < s.num_heads + s.num_kv_heads; ++head) {
                T* at = heads + row * s.heads_width() + head * s.head_dim;
                if (layer.qk_norm != nullptr) rms_norm(at, layer.qk_norm + head * s.head_dim, s.head_dim, s.eps, at);
                rotate(at, rotary_ + positions[row] * s.head_dim, s.head_dim);
            }
        }
        lap.ends(seconds_.row_ops);
    }

    void norm_rows(const T* weight, int64_t n, T* to, int64_t stride, int id, int count) const {
        const Share rows(n, id, count);
        for (int64_t row = rows.first; row < rows.end; ++row) {
            rms_norm(hidden_ + row * shape_.hidden, weight, shape_.hidden, shape_.eps, to + row * stride);
        }
    }

    Shape shape_;
    Seconds seconds_;
    const T *rotary_, *embedding_, *final_norm_;
    PackedLinear head_;
    std::vector<Layer> layers_;
    Scratch<T> hidden_memory_, normed_memory_, mlp_memory_;
    T *hidden_ = nullptr, *normed_ = nullptr, *mlp_ = nullptr;
};

}  // namespace radixserve
