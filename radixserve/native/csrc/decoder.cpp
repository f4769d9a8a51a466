// The plain C door to decoder.h. Pointers are the caller's and must outlive the decoder; sizes were checked by the caller.
#include <cstdint>

#include "door.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define RADIXSERVE_HAS_DECODER 1
#include "decoder.h"
#else
#define RADIXSERVE_HAS_DECODER 0
#endif

using namespace radixserve;

namespace {

struct AnyDecoder {
    virtual ~AnyDecoder() = default;
    virtual void add_layer(const void* const* parts) = 0;
    virtual void begin(int64_t n, int num_threads, const int64_t* ids, const int64_t* positions, void* heads) = 0;
    virtual void advance(int64_t layer, int64_t n, const void* attended, const int64_t* positions, void* heads, void* out) = 0;
    virtual void forward(int64_t n, const int64_t* ids, const int64_t* positions, void* attention, void* const* pools,
                         const int64_t* out_slots, void* out) = 0;
    virtual void logits(int64_t n, int num_threads, const void* rows, float* to) = 0;
    virtual void seconds(double* to) const = 0;
};

#if RADIXSERVE_HAS_DECODER

template <class T>
struct TypedDecoder final : AnyDecoder {
    Decoder<T> decoder;
    TypedDecoder(const Shape& shape, const void* rotary, const void* embedding, const void* final_norm, const void* const* head)
        : decoder(shape, static_cast<const T*>(rotary), static_cast<const T*>(embedding), static_cast<const T*>(final_norm), weights(head)) {}
    static Weights weights(const void* const* pair) { return {static_cast<const uint32_t*>(pair[0]), static_cast<const float*>(pair[1])}; }
    void add_layer(const void* const* parts) override {
        const auto norm = [&](int i) { return static_cast<const T*>(parts[i]); };
        const auto product = [&](int i) { return weights(parts + i); };
        decoder.add_layer(norm(0), product(1), norm(3), norm(4), product(5), norm(7), product(8), product(10));
    }
    void begin(int64_t n, int num_threads, const int64_t* ids, const int64_t* positions, void* heads) override {
        decoder.begin(n, num_threads, ids, positions, static_cast<T*>(heads));
    }
    void advance(int64_t layer, int64_t n, const void* attended, const int64_t* positions, void* heads, void* out) override {
        decoder.advance(layer, n, static_cast<const T*>(attended), positions, static_cast<T*>(heads), static_cast<T*>(out));
    }
    void forward(int64_t n, const int64_t* ids, const int64_t* positions, void* attention, void* const* pools, const int64_t* out_slots,
                 void* out) override {
        const Pools both{pools, pools + decoder.num_layers(), out_slots};
        decoder.forward(n, ids, positions, *static_cast<Attention*>(attention), both, static_cast<T*>(out));
    }
    void logits(int64_t n, int num_threads, const void* rows, float* to) override {
        decoder.logits(n, num_threads, static_cast<const T*>(rows), to);
    }
    void seconds(double* to) const override {
        const Seconds& of = decoder.seconds();
        to[0] = of.attention, to[1] = of.products, to[2] = of.row_ops, to[3] = of.head;
    }
};

#endif

}  // namespace

// bit 0: float32 can be computed, bit 1: bfloat16. Without any of them the rest of this file is not to be called.
RADIXSERVE_DOOR int radixserve_decoder_dtypes() {
#if RADIXSERVE_HAS_DECODER && defined(__AVX512BF16__)
    return 3;
#else
    return RADIXSERVE_HAS_DECODER;
#endif
}

// see pack() in packed_linear.h
RADIXSERVE_DOOR void radixserve_decoder_pack(const void* rows, int64_t count, int64_t words, int is_interleaved, void* packed) {
#if RADIXSERVE_HAS_DECODER
    pack(static_cast<const uint32_t*>(rows), count, words, is_interleaved != 0, static_cast<uint32_t*>(packed));
#else
    (void)rows, (void)count, (void)words, (void)is_interleaved, (void)packed;
#endif
}

// see quantize() in quantized_linear.h; packed [panels][width][32], scales [panels][32], both zeros beforehand
RADIXSERVE_DOOR void radixserve_decoder_quantize(const void* rows, int is_bfloat16, int64_t count, int64_t width, int is_interleaved,
                                                int8_t* packed, float* scales) {
#if RADIXSERVE_HAS_DECODER
    if (is_bfloat16) return quantize(static_cast<const Bf16*>(rows), count, width, is_interleaved != 0, packed, scales);
    quantize(static_cast<const float*>(rows), count, width, is_interleaved != 0, packed, scales);
#else
    (void)rows, (void)is_bfloat16, (void)count, (void)width, (void)is_interleaved, (void)packed, (void)scales;
#endif
}

// sizes: hidden, intermediate, heads, KV heads, head_dim, vocab. embedding null: looked up in the head, which is tied and not quantized.
// head: its packed weights, and their scales or null: not quantized. Null: no memory, or a type that cannot be computed.
RADIXSERVE_DOOR void* radixserve_decoder_new(int is_bfloat16, const int64_t* sizes, float eps, const void* rotary, const void* embedding,
                                            const void* final_norm, const void* const* head) {
    AnyDecoder* made = nullptr;
#if RADIXSERVE_HAS_DECODER
    const Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps};
    status_of([&] {
        if (!is_bfloat16) made = new TypedDecoder<float>(shape, rotary, embedding, final_norm, head);
#if defined(__AVX512BF16__)
        if (is_bfloat16) made = new TypedDecoder<Bf16>(shape, rotary, embedding, final_norm, head);
#endif
    });
#else
    (void)is_bfloat16, (void)sizes, (void)eps, (void)rotary, (void)embedding, (void)final_norm, (void)head;
#endif
    return made;
}
RADIXSERVE_DOOR void radixserve_decoder_delete(void* decoder) { delete static_cast<AnyDecoder*>(decoder); }

// All but the last of those that follow return a Status (door.h).
// parts: input_norm, qkv, its scales, qkv_bias or null, qk_norm or null, output, its scales, post_attention_norm, gate_up, its scales, down,
// its scales; scales are null where nothing is quantized, or all are there with the head's
RADIXSERVE_DOOR int radixserve_decoder_add_layer(void* decoder, const void* const* parts) {
    return status_of([&] { static_cast<AnyDecoder*>(decoder)->add_layer(parts); });
}
RADIXSERVE_DOOR int radixserve_decoder_begin(void* decoder, int64_t n, int num_threads, const int64_t* ids, const int64_t* positions,
                                            void* heads) {
    return status_of([&] { static_cast<AnyDecoder*>(decoder)->begin(n, num_threads, ids, positions, heads); });
}
RADIXSERVE_DOOR int radixserve_decoder_advance(void* decoder, int64_t layer, int64_t n, const void* attended, const int64_t* positions,
                                              void* heads, void* out) {
    return status_of([&] { static_cast<AnyDecoder*>(decoder)->advance(layer, n, attended, positions, heads, out); });
}
// A whole step, the attention (a handle of radixserve_attention_new, planned) included. pools: k of every layer, then v.
RADIXSERVE_DOOR int radixserve_decoder_forward(void* decoder, int64_t n, const int64_t* ids, const int64_t* positions, void* attention,
                                              void* const* pools, const int64_t* out_slots, void* out) {
    return status_of([&] { static_cast<AnyDecoder*>(decoder)->forward(n, ids, positions, attention, pools, out_slots, out); });
}
RADIXSERVE_DOOR int radixserve_decoder_logits(void* decoder, int64_t n, int num_threads, const void* rows, float* to) {
    return status_of([&] { static_cast<AnyDecoder*>(decoder)->logits(n, num_threads, rows, to); });
}
// wall seconds since the decoder was made: attention (of forward alone), products, norms and rotary, head
RADIXSERVE_DOOR void radixserve_decoder_seconds(void* decoder, double* to) { static_cast<AnyDecoder*>(decoder)->seconds(to); }
