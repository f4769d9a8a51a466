// The plain C door to decoder.h. Pointers are the caller's and must outlive the decoder; sizes were checked by the caller.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define RADIXSERVE_HAS_DECODER 1
#include "decoder.h"
#else
#define RADIXSERVE_HAS_DECODER 0
#endif
#include <cstdint>

#define RADIXSERVE_DOOR extern "C" __attribute__((visibility("default")))

// bit 0: float32 can be computed, bit 1: bfloat16
RADIXSERVE_DOOR int radixserve_decoder_dtypes() {
#if RADIXSERVE_HAS_DECODER && defined(__AVX512BF16__)
    return 3;
#else
    return RADIXSERVE_HAS_DECODER;
#endif
}

#if RADIXSERVE_HAS_DECODER
namespace {

using namespace radixserve;

struct AnyDecoder {
    virtual ~AnyDecoder() = default;
    virtual void add_layer(const void* const* parts) = 0;
    virtual void begin(int64_t n, const int64_t* ids, const int64_t* positions, void* heads) = 0;
    virtual void advance(int64_t layer, int64_t n, const void* attended, const int64_t* positions, void* heads, void* out) = 0;
    virtual void logits(int64_t n, const void* rows, float* to) const = 0;
};

template <class T>
struct TypedDecoder final : AnyDecoder {
    Decoder<T> decoder;
    TypedDecoder(const Shape& shape, const void* rotary, const void* embedding, const void* final_norm, const void* head)
        : decoder(shape, static_cast<const T*>(rotary), static_cast<const T*>(embedding), static_cast<const T*>(final_norm),
                  static_cast<const uint32_t*>(head)) {}
    void add_layer(const void* const* parts) override {
        const auto norm = [&](int i) { return static_cast<const T*>(parts[i]); };
        const auto packed = [&](int i) { return static_cast<const uint32_t*>(parts[i]); };
        decoder.add_layer(norm(0), packed(1), norm(2), norm(3), packed(4), norm(5), packed(6), packed(7));
    }
    void begin(int64_t n, const int64_t* ids, const int64_t* positions, void* heads) override {
        decoder.begin(n, ids, positions, static_cast<T*>(heads));
    }
    void advance(int64_t layer, int64_t n, const void* attended, const int64_t* positions, void* heads, void* out) override {
        decoder.advance(layer, n, static_cast<const T*>(attended), positions, static_cast<T*>(heads), static_cast<T*>(out));
    }
    void logits(int64_t n, const void* rows, float* to) const override { decoder.logits(n, static_cast<const T*>(rows), to); }
};

}  // namespace

RADIXSERVE_DOOR void radixserve_pack(const void* rows, int64_t count, int64_t words, int is_interleaved, void* packed) {
    pack(static_cast<const uint32_t*>(rows), count, words, is_interleaved != 0, static_cast<uint32_t*>(packed));
}

// sizes: hidden, intermediate, heads, KV heads, head_dim, vocab. embedding null: looked up in the head, which is tied
RADIXSERVE_DOOR AnyDecoder* radixserve_decoder_new(int is_bfloat16, const int64_t* sizes, float eps, const void* rotary,
                                                  const void* embedding, const void* final_norm, const void* head) {
    const Shape shape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], eps};
#if defined(__AVX512BF16__)
    if (is_bfloat16) return new TypedDecoder<bfloat16>(shape, rotary, embedding, final_norm, head);
#endif
    return is_bfloat16 ? nullptr : static_cast<AnyDecoder*>(new TypedDecoder<float>(shape, rotary, embedding, final_norm, head));
}
RADIXSERVE_DOOR void radixserve_decoder_delete(AnyDecoder* decoder) { delete decoder; }
// parts: input_norm, qkv, qkv_bias or null, qk_norm or null, output, post_attention_norm, gate_up, down
RADIXSERVE_DOOR void radixserve_decoder_add_layer(AnyDecoder* decoder, const void* const* parts) { decoder->add_layer(parts); }
RADIXSERVE_DOOR void radixserve_decoder_begin(AnyDecoder* decoder, int64_t n, const int64_t* ids, const int64_t* positions, void* heads) {
    decoder->begin(n, ids, positions, heads);
}
RADIXSERVE_DOOR void radixserve_decoder_advance(AnyDecoder* decoder, int64_t layer, int64_t n, const void* attended,
                                               const int64_t* positions, void* heads, void* out) {
    decoder->advance(layer, n, attended, positions, heads, out);
}
RADIXSERVE_DOOR void radixserve_decoder_logits(AnyDecoder* decoder, int64_t n, const void* rows, float* to) {
    decoder->logits(n, rows, to);
}
#endif
