// A decoder's step as phases of a team's job. Whole, with attention.h, in one job: forward(). Or between attentions of another kind, each
// stretch a job of its own: begin() up to the first q, k, v; then for every layer advance() from its attention's result to the next q, k, v,
// or to the final norm. The bits are the same. Knows nothing of requests or logits wanted. Where there is no memory it throws std::bad_alloc.
#pragma once
#include <vector>

#include "attention.h"
#include "quantized_linear.h"
#include "row_ops.h"
#include "scratch.h"
#include "team.h"

namespace radixserve {

// wall seconds so far, of the phases of each kind
struct Seconds {
    double attention = 0, products = 0, row_ops = 0, head = 0;
};

// K and V of every layer, and where those of this step's tokens go
struct Pools {
    void* const* k;  // [layers]
    void* const* v;
    const int64_t* out_slots;  // [n]
};

// one thread does so many rows before it pays to share them
constexpr int64_t LEAST_ROWS_NORMED = 8, LEAST_ROWS_ROTATED = 4;

struct Shape {
    int64_t hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab;
    float eps;
    int64_t heads_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
    int64_t q_width() const { return num_heads * head_dim; }
};

template <class T>
class Decoder final : Work {
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

    Decoder(const Shape& shape, const T* rotary, const T* embedding, const T* final_norm, const Weights& head)
        : shape_(shape), rotary_(rotary), embedding_(embedding), final_norm_(final_norm), head_(linear(head, shape.vocab, shape.hidden)) {}

    void add_layer(const T* input_norm, const Weights& qkv, const T* qkv_bias, const T* qk_norm, const Weights& output,
                   const T* post_attention_norm, const Weights& gate_up, const Weights& down) {
        const Shape& s = shape_;
        const int64_t num_gate_panels = (s.intermediate + lanes::WIDTH - 1) / lanes::WIDTH;
        layers_.push_back({input_norm, linear(qkv, s.heads_width(), s.hidden), qkv_bias, qk_norm, linear(output, s.hidden, s.q_width()),
                           post_attention_norm, PackedLinear{gate_up.packed, num_gate_panels, s.hidden / PER_WORD, gate_up.scales},
                           linear(down, s.hidden, s.intermediate)});
    }

    // ids, positions [n] -> `out` [n, hidden], normed, through attention as it was planned, for so many threads
    void forward(int64_t n, const int64_t* ids, const int64_t* positions, Attention& attention, const Pools& pools, T* out) {
        T* const heads = heads_memory_.of(n * shape_.heads_width());
        T* const attended = attended_memory_.of(n * shape_.q_width());
        attention_reserve(attention);
        reserve(n, attention_num_threads(attention));
        step_ = {n, ids, positions, heads, attended, &attention, pools, out};
        add(EMBED, 0, n);
        for (int64_t layer = 0; layer < num_layers(); ++layer) {
            add_start(layer);
            add(ATTEND, layer, attention_num_units(attention));
            add(MERGE, layer, attention_num_merges(attention));
            add_finish(layer);
        }
        add(FINAL_NORM, 0, normed_.size());
        team_.run(phases_, *this);
    }

    // ids, positions [n] -> heads [n, num_heads + 2 num_kv_heads, head_dim] of layer 0: q and k rotated, then v
    void begin(int64_t n, int num_threads, const int64_t* ids, const int64_t* positions, T* heads) {
        reserve(n, num_threads);
        step_ = {n, ids, positions, heads, nullptr, nullptr, {}, nullptr};
        add(EMBED, 0, n);
        add_start(0);
        team_.run(phases_, *this);
    }

    // attended [n, num_heads * head_dim] of `layer` -> heads of the next one; after the last, `out` [n, hidden], normed
    void advance(int64_t layer, int64_t n, const T* attended, const int64_t* positions, T* heads, T* out) {
        step_ = {n, nullptr, positions, heads, const_cast<T*>(attended), nullptr, {}, out};
        phases_.clear();
        add_finish(layer);
        if (layer + 1 < num_layers()) {
            add_start(layer + 1);
        } else {
            add(FINAL_NORM, 0, normed_.size());
        }
        team_.run(phases_, *this);
    }

    // rows [n, hidden] after the final norm -> float32 [n, vocab], not rounded to T in between
    void logits(int64_t n, int num_threads, const T* rows, float* to) {
        prepare(n, num_threads);
        head_job_ = {rows, to};
        tiles_of_head_.make(Tiles<T>(n, head_).count(), team_.size());
        add(HEAD, 0, tiles_of_head_.size());
        team_.run(phases_, *this);
    }

    const Seconds& seconds() const { return seconds_; }
    int64_t num_layers() const { return int64_t(layers_.size()); }

private:
    static PackedLinear linear(const Weights& weights, int64_t rows, int64_t columns) {
        return PackedLinear{weights.packed, num_panels_of(rows), columns / PER_WORD, weights.scales};
    }

    int64_t hidden_stride() const { return shape_.hidden + PADDING; }
    int64_t mlp_stride() const { return shape_.intermediate + PADDING; }

    void reserve(int64_t n, int num_threads) {
        hidden_ = hidden_memory_.of(n * shape_.hidden);
        normed_rows_ = normed_memory_.of(n * hidden_stride());
        mlp_ = mlp_memory_.of(n * mlp_stride());
        prepare(n, num_threads);
        const Layer& any = layers_[0];
        normed_.make(n, team_.size(), LEAST_ROWS_NORMED);
        rotated_.make(n, team_.size(), LEAST_ROWS_ROTATED);
        tiles_of_qkv_.make(Tiles<T>(n, any.qkv).count(), team_.size());
        tiles_of_output_.make(Tiles<T>(n, any.output).count(), team_.size());
        tiles_of_gate_up_.make(Tiles<T>(n, any.gate_up).count(), team_.size());
        tiles_of_down_.make(Tiles<T>(n, any.down).count(), team_.size());
    }

    void prepare(int64_t n, int num_threads) {
        step_.n = n;
        team_.resize(num_threads);
        if (head_.scales != nullptr) {
            const int64_t widest = std::max(std::max(shape_.hidden, shape_.intermediate), shape_.q_width());
            widened_.reserve(team_.size(), widest / PER_WORD);
        }
        phases_.clear();
    }

    // EMBED and ATTEND to MERGE: pieces are rows, units and tokens; of all others the Cuts with their name say what a piece is
    enum Kind { EMBED, NORM_INPUT, QKV, ROTATE, ATTEND, MERGE, OUTPUT, NORM_ATTENDED, GATE_UP, DOWN, FINAL_NORM, HEAD };

    void add(Kind kind, int64_t layer, int64_t num_pieces) {
        double* seconds[] = {&seconds_.row_ops,   &seconds_.row_ops,  &seconds_.products, &seconds_.row_ops,
                             &seconds_.attention, &seconds_.attention, &seconds_.products, &seconds_.row_ops,
                             &seconds_.products,  &seconds_.products, &seconds_.row_ops,  &seconds_.head};
        if (num_pieces > 0) phases_.push_back({kind, int(layer), num_pieces, seconds[kind]});
    }

    // up to q, k, v of a layer, rotated, and with attention k and v in their pages
    void add_start(int64_t layer) {
        add(NORM_INPUT, layer, normed_.size());
        add(QKV, layer, tiles_of_qkv_.size());
        add(ROTATE, layer, rotated_.size());
    }

    // from the attention's result to the layer's
    void add_finish(int64_t layer) {
        add(OUTPUT, layer, tiles_of_output_.size());
        add(NORM_ATTENDED, layer, normed_.size());
        add(GATE_UP, layer, tiles_of_gate_up_.size());
        add(DOWN, layer, tiles_of_down_.size());
    }

    void run(const Phase& phase, int worker, int64_t piece) override {
        const Shape& s = shape_;
        const Layer& layer = layers_[phase.layer];
        const AddSums<T> add_to_hidden{hidden_, s.hidden, s.hidden};
        switch (Kind(phase.kind)) {
            case EMBED: return embed(piece);
            case NORM_INPUT: return norm(layer.input_norm, piece, normed_rows_, hidden_stride());
            case QKV:
                return multiply_piece(normed_rows_, hidden_stride(), layer.qkv, tiles_of_qkv_, piece, worker,
                                      StoreSums<T>{step_.heads, s.heads_width(), s.heads_width(), layer.qkv_bias});
            case ROTATE: return rotate_and_write(layer, phase.layer, rotated_.first(piece), rotated_.end(piece));
            case ATTEND: return attention_attend(*step_.attention, arguments(phase.layer), int(piece), worker);
            case MERGE: return attention_merge(*step_.attention, arguments(phase.layer), int(piece), worker);
            case OUTPUT: return multiply_piece(step_.attended, s.q_width(), layer.output, tiles_of_output_, piece, worker, add_to_hidden);
            case NORM_ATTENDED: return norm(layer.post_attention_norm, piece, normed_rows_, hidden_stride());
            case GATE_UP:
                return multiply_piece(normed_rows_, hidden_stride(), layer.gate_up, tiles_of_gate_up_, piece, worker,
                                      SiluTimesUp<T>{mlp_, mlp_stride(), s.intermediate});
            case DOWN: return multiply_piece(mlp_, mlp_stride(), layer.down, tiles_of_down_, piece, worker, add_to_hidden);
            case FINAL_NORM: return norm(final_norm_, piece, step_.out, s.hidden);
            case HEAD:
                return multiply_piece(head_job_.rows, s.hidden, head_, tiles_of_head_, piece, worker,
                                      StoreSums<float>{head_job_.to, s.vocab, s.vocab, nullptr});
        }
    }

    template <class Finish>
    void multiply_piece(const T* x, int64_t stride, const PackedLinear& w, const Cuts& cuts, int64_t piece, int worker, const Finish& finish) {
        const Tiles<T> tiles(step_.n, w);
        if (w.scales == nullptr) {
            multiply<T>(x, stride, tiles, cuts.first(piece), cuts.end(piece), finish);
        } else {
            multiply_quantized<T>(x, stride, tiles, cuts.first(piece), cuts.end(piece), widened_.of(worker), finish);
        }
    }

    void embed(int64_t row) {
        T* const to = hidden_ + row * shape_.hidden;
        if (embedding_ != nullptr) {
            std::memcpy(to, embedding_ + step_.ids[row] * shape_.hidden, shape_.hidden * sizeof(T));
        } else {
            unpack_row(head_, step_.ids[row], reinterpret_cast<uint32_t*>(to));
        }
    }

    void rotate_and_write(const Layer& layer, int layer_index, int64_t begin, int64_t end) {
        const Shape& s = shape_;
        for (int64_t row = begin; row < end; ++row) {
            for (int64_t head = 0; head < s.num_heads + s.num_kv_heads; ++head) {
                T* at = step_.heads + row * s.heads_width() + head * s.head_dim;
                if (layer.qk_norm != nullptr) rms_norm(at, layer.qk_norm + head * s.head_dim, s.head_dim, s.eps, at);
                rotate(at, rotary_ + step_.positions[row] * s.head_dim, s.head_dim);
            }
        }
        if (step_.attention != nullptr) attention_write(*step_.attention, arguments(layer_index), begin, end);
    }

    void norm(const T* weight, int64_t piece, T* to, int64_t stride) const {
        for (int64_t row = normed_.first(piece); row < normed_.end(piece); ++row) {
            rms_norm(hidden_ + row * shape_.hidden, weight, shape_.hidden, shape_.eps, to + row * stride);
        }
    }

    AttentionLayer arguments(int64_t layer) const {
        const Shape& s = shape_;
        const T *k = step_.heads + s.q_width(), *v = k + s.num_kv_heads * s.head_dim;
        const Pools& pools = step_.pools;
        const int64_t width = s.heads_width(), dim = s.head_dim;
        return {step_.heads, k, v, pools.k[layer], pools.v[layer], step_.attended, pools.out_slots, width, dim, width, dim, width, dim};
    }

    struct Step {
        int64_t n;
        const int64_t *ids, *positions;
        T *heads, *attended;
        Attention* attention;  // null: the caller's own
        Pools pools;
        T* out;
    };
    struct HeadJob {
        const T* rows;
        float* to;
    };

    Shape shape_;
    Seconds seconds_;
    const T *rotary_, *embedding_, *final_norm_;
    PackedLinear head_;
    std::vector<Layer> layers_;
    Scratch<T> hidden_memory_, normed_memory_, mlp_memory_, heads_memory_, attended_memory_;
    T *hidden_ = nullptr, *normed_rows_ = nullptr, *mlp_ = nullptr;
    Step step_{};
    HeadJob head_job_{};
    Cuts normed_, rotated_, tiles_of_qkv_, tiles_of_output_, tiles_of_gate_up_, tiles_of_down_, tiles_of_head_;
    WidenedPanels widened_;
    std::vector<Phase> phases_;
    Team team_;
};

}  // namespace radixserve
