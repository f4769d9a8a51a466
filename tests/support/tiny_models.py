"""Tiny random models: a Decoder without files, and model directories that transformers reads too."""

from pathlib import Path
from typing import Any

import torch

from radixserve.models import Decoder, ModelConfig, load_decoder
from radixserve.models.config import parse_model_config

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


def tiny_decoder() -> Decoder:
    """A two-layer Llama, grouped-query, with weights large enough that every earlier token and its place matter for the next one."""
    config: ModelConfig = parse_model_config(TINY_LLAMA, {})
    decoder = load_decoder(config, Path(), dtype=torch.float32, device=torch.device("cpu"), load_format="dummy", seed=1)
    with torch.inference_mode():
        for layer in decoder.weights.layers:
            layer.qkv.mul_(20)
            layer.output.mul_(20)
        decoder.weights.lm_head.mul_(15)
    return decoder


def save_tiny_model(directory: Path, architecture: str, *, tied: bool, seed: int = 0) -> torch.nn.Module:
    """Write config.json and model.safetensors of a random model of a transformers class, and return that model, in float32."""
    import transformers

    settings = {key: value for key, value in TINY_LLAMA.items() if key != "architectures"}
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    # heads of their own width show a mix-up of head_dim with hidden_size // num_heads
    config = config_class(**settings, head_dim=16, tie_word_embeddings=tied, initializer_range=0.25)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0, where a forgotten one would not show
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    return model
