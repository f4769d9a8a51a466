"""Builds tokenizer.json and tokenizer_config.json from the vocabulary that a GGUF file carries. Byte-level BPE only."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from radixserve.errors import UnsupportedModelError

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

# Splits by tokenizer.ggml.pre, each applied to the pieces of the one before. An empty tuple: GPT-2's own, inside ByteLevel.
SPLITS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}",),
    "gpt-2": (),
    # what llama.cpp does for a file that names nothing better
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "llama-bpe": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",),
}
GPT2_INSIDE_BYTE_LEVEL = {"smollm", "gpt-2"}


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> list[int]:
    """Write both files from the `tokenizer.*` keys of a GGUF; return the ids that end a text.

    Raises UnsupportedModelError naming the tokenizer model or pre-tokenizer that is not supported.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise UnsupportedModelError(f"tokenizer.ggml.model: expected gpt2 (byte-level BPE), got {model!r}; give the Hugging Face directory")
    if pre not in SPLITS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre: expected one of {', '.join(SPLITS)}, got {pre!r}; give the Hugging Face directory"
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"):
        if key not in metadata:
            raise UnsupportedModelError(f"GGUF: {key} is missing")
    tokenizer = _build(metadata, pre)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    eos_token_ids = [metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return list(dict.fromkeys(eos_token_ids))


def _build(metadata: dict[str, Any], pre: str) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # Llama 3's vocabulary has whole words that no sequence of merges reaches
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in GPT2_INSIDE_BYTE_LEVEL)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer
