"""Tiny random models as transformers saves them, with a tokenizer: the same directory is read by the Decoder and by the oracle."""

import json
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 384
CORPUS = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs! 0123456789",
    "the the and and of of to to in in is is that that it it was was for for on on are are as as with with",
    "user: hello there, how are you today? assistant: I am fine, thank you. What can I do for you?",
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tiny_model(directory: Path, family: str, tie: bool, **overrides: Any) -> Path:
    """Fill `directory` with config.json, model.safetensors (float32, seeded) and tokenizer files; grouped-query, 3 layers.

    `overrides` go into the config. Weights are larger than usual, so that logits are well apart and every part matters.
    """
    import torch
    import transformers

    class_name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "qwen3":
        options["head_dim"] = 16  # not hidden_size / num_attention_heads, as in the real ones
    if family == "mistral":
        options["sliding_window"] = None
    config = getattr(transformers, f"{class_name}Config")(**(options | overrides))
    torch.manual_seed(len(family) * 2 + tie)
    model = getattr(transformers, f"{class_name}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.5 if name.endswith("bias") else 0.15)
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return directory


def write_tiny_tokenizer(directory: Path) -> None:
    """Byte-level BPE trained on a few lines: every text can be encoded, and frequent words are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL_TOKENS[1], "eos_token": SPECIAL_TOKENS[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
