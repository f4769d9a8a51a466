"""A Decoder without files: for tests of what runs it, where no oracle is needed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from radixserve.models import Decoder, load_decoder
from radixserve.models.config import ModelConfig, parse_model_config
from radixserve.models.decoder import DecoderWeights
from radixserve.models.packed_decoder import PackedDecoder, why_not_packed

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny_decoder() -> Decoder | PackedDecoder:
    """A two-layer Llama, grouped-query, with weights large enough that every earlier token and its place matter for the next one."""
    config, device = parse_model_config(TINY_LLAMA, {}), torch.device("cpu")
    decoder = load_decoder(config, Path(), dtype=torch.float32, device=device, load_format="dummy", seed=1, linear_backend="torch")
    assert isinstance(decoder, Decoder)
    with torch.inference_mode():
        for layer in decoder.weights.layers:
            layer.qkv.mul_(20)
            layer.output.mul_(20)
        decoder.weights.lm_head.mul_(15)
        return decoder if why_not_packed(config, decoder.dtype, device) else pack_decoder(config, decoder.weights)


def pack_decoder(config: ModelConfig, weights: DecoderWeights) -> PackedDecoder:
    """Beside the unpacked weights, which stay as they are."""
    return PackedDecoder(config, replace(weights, layers=()), list(weights.layers))
