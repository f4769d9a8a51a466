"""Writes a tiny Llama, Mistral, Qwen2 or Qwen3 directory as a GGUF file, named and permuted as llama.cpp does it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from radixserve.models.gguf_convert import BLOCK_NAMES, TOP_NAMES


def permute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As llama.cpp's convert_hf_to_gguf.py does for q and k of Llama."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(directory: Path, arch: str, num_heads: int, num_kv_heads: int) -> dict[str, np.ndarray]:
    back = {ours: theirs for theirs, ours in TOP_NAMES.items()}
    parts = {ours: theirs for theirs, ours in BLOCK_NAMES.items()}
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name in back:
            tensors[back[name]] = tensor.numpy()
            continue
        _, _, layer, rest = name.split(".", 3)
        part, suffix = rest.rsplit(".", 1)
        if arch == "llama" and parts[part] in ("attn_q", "attn_k"):
            tensor = permute(tensor, num_heads if parts[part] == "attn_q" else num_kv_heads)
        tensors[f"blk.{layer}.{parts[part]}.{suffix}"] = tensor.contiguous().numpy()
    return tensors


def write_gguf(directory: Path, path: Path, arch: str, *, pre: str = "smollm", change: Callable[..., None] | None = None) -> Path:
    """`change(writer, tensors, vocab)` may add keys or alter tensors and the vocabulary before they are written."""
    raw = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    num_heads, num_kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    if raw.get("head_dim"):
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
    tensors = gguf_tensors(directory, arch, num_heads, num_kv_heads)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab: dict[str, Any] = {"model": "gpt2", "pre": pre, "bos": 1, "eos": 2}
    vocab["tokens"] = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    vocab["merges"] = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    vocab["types"] = [3 if rank < 3 else 1 for rank in range(len(vocab["tokens"]))]
    if change is not None:
        change(writer, tensors, vocab)
    writer.add_tokenizer_model(vocab["model"])
    writer.add_tokenizer_pre(vocab["pre"])
    writer.add_token_list(vocab["tokens"])
    writer.add_token_types(vocab["types"])
    writer.add_token_merges(vocab["merges"])
    writer.add_bos_token_id(vocab["bos"])
    writer.add_eos_token_id(vocab["eos"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
