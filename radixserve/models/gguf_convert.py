"""Converts a GGUF file into a Hugging Face model directory: dequantized safetensors shards, config.json and tokenizer files.

What a GGUF says and the Decoder cannot compute is refused by name, as for a config.json.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixserve.errors import UnsupportedModelError, WeightError
from radixserve.models.config import Llama3RopeScaling
from radixserve.models.layers import inverse_frequencies
from radixserve.tokenizer.from_gguf import write_tokenizer

SHARD_BYTES = 2 << 30

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # how llama.cpp carries llama3 rope scaling
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16}


def convert_gguf(gguf_path: Path, directory: Path) -> None:
    """Fill `directory`, showing a progress bar on stderr. Quantized and BF16 weights become bfloat16, F16 and F32 files stay as they are.

    Raises UnsupportedModelError naming the architecture, option, tensor or tokenizer that is not supported, WeightError for a broken file.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(gguf_path)
    except (OSError, ValueError, IndexError) as error:
        raise WeightError(f"{gguf_path}: cannot be read as GGUF: {error}") from error
    metadata = _Metadata(reader.fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tensors)
    dtype = FLOAT_DTYPES.get(_main_type(tensors), torch.bfloat16)
    config["dtype"] = str(dtype).removeprefix("torch.")
    eos_token_ids = write_tokenizer(metadata.values("tokenizer."), directory)
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    _write_shards(_conversions(tensors, config, permuted=metadata.get("general.architecture") == "llama"), dtype, directory)


class _Metadata:
    """The file's key-value section, decoded when asked."""

    def __init__(self, fields: Any) -> None:
        self._fields = fields

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def require(self, key: str) -> Any:
        if key not in self._fields:
            raise UnsupportedModelError(f"GGUF: {key} is missing")
        return self.get(key)

    def values(self, prefix: str) -> dict[str, Any]:
        return {key: self.get(key) for key in self._fields if key.startswith(prefix)}


def _config(metadata: _Metadata, tensors: dict[str, Any]) -> dict[str, Any]:
    arch = metadata.require("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(f"general.architecture: expected one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if "token_embd.weight" not in tensors:
        raise WeightError("token_embd.weight: missing in the GGUF file")
    num_heads, hidden = metadata.require(f"{arch}.attention.head_count"), metadata.require(f"{arch}.embedding_length")
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden // num_heads)
    _refuse_options(metadata, arch, head_dim)
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": metadata.require(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.require(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.require(f"{arch}.context_length"),
        "rms_norm_eps": _shortest_float(metadata.require(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if ROPE_FACTORS in tensors:
        config["rope_scaling"] = _llama3_scaling(_dequantize(tensors[ROPE_FACTORS]), head_dim, config["rope_theta"])
    return config


def _refuse_options(metadata: _Metadata, arch: str, head_dim: int) -> None:
    """Options that would change the result: the value that we compute, or absence, is fine."""
    computed = {
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "rope.scaling.type": "none",
        "rope.scale_linear": 1.0,
        "expert_count": 0,
        "attention.sliding_window": 0,
    }
    for option, expected in computed.items():
        got = metadata.get(f"{arch}.{option}", expected)
        if got != expected:
            raise UnsupportedModelError(f"{arch}.{option}: expected {expected}, got {got}")


def _llama3_scaling(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
    """llama.cpp stores what each frequency is divided by; a config.json stores the four numbers that this follows from.

    Only the stretch is free in the models that exist, so it is read off and the others are checked by recomputing all factors.
    """
    scaling = Llama3RopeScaling(float(factors.max()), 1.0, 4.0, 8192)
    expected = inverse_frequencies(head_dim, theta, None) / inverse_frequencies(head_dim, theta, scaling)
    if factors.shape != tuple(expected.shape) or not np.allclose(factors, expected.numpy(), rtol=1e-3):
        raise UnsupportedModelError(f"{ROPE_FACTORS}: expected the factors of llama3 rope scaling, got others (longrope?)")
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }


def _shortest_float(value: float) -> float:
    """A GGUF holds float32; 1e-5 there reads as 9.999999747378752e-06, which is not what the model's config.json says."""
    return float(str(np.float32(value)))


def _main_type(tensors: dict[str, Any]) -> str:
    """Storage of the matrices: norms are F32 in every file and say nothing."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return str(kinds.pop()) if len(kinds) == 1 else "mixed"


@dataclass(frozen=True, slots=True)
class _Conversion:
    name: str  # in the safetensors file
    source: Any  # gguf.ReaderTensor
    num_permuted_heads: int  # 0: rows are in order

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self.source.shape))

    def weights(self) -> np.ndarray:
        """float32, in Hugging Face's row order."""
        rows = _dequantize(self.source).reshape(self.shape)
        if not self.num_permuted_heads:
            return np.array(rows)  # a copy: float tensors come as views of the read-only file
        # llama.cpp rotates neighbouring rows (i, i + 1) where Hugging Face rotates (i, i + head_dim / 2)
        pairs = rows.reshape(self.num_permuted_heads, -1, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)


def _conversions(tensors: dict[str, Any], config: dict[str, Any], permuted: bool) -> list[_Conversion]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if permuted else {}
    conversions = []
    for name, tensor in tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name in TOP_NAMES:
            conversions.append(_Conversion(TOP_NAMES[name], tensor, 0))
            continue
        block, _, rest = name.removeprefix("blk.").partition(".")
        part, _, suffix = rest.rpartition(".")
        if not block.isdigit() or part not in BLOCK_NAMES:
            raise UnsupportedModelError(f"{name}: a GGUF tensor that the Decoder does not compute")
        conversions.append(_Conversion(f"model.layers.{block}.{BLOCK_NAMES[part]}.{suffix}", tensor, heads.get(part, 0)))
    return conversions


def _dequantize(tensor: Any) -> np.ndarray:
    import gguf

    try:
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError:
        raise UnsupportedModelError(f"{tensor.name}: GGUF type {tensor.tensor_type.name} cannot be dequantized") from None


def _write_shards(conversions: list[_Conversion], dtype: torch.dtype, directory: Path) -> None:
    """One shard in memory at a time."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    shards = list(_split_into_shards(conversions, dtype.itemsize))
    weight_map: dict[str, str] = {}
    with tqdm(total=len(conversions), desc="converting weights", unit="tensor") as progress:
        for number, shard in enumerate(shards, start=1):
            file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            converted = {}
            for conversion in shard:
                converted[conversion.name] = torch.from_numpy(np.ascontiguousarray(conversion.weights())).to(dtype)
                weight_map[conversion.name] = file_name
                progress.update()
            save_file(converted, directory / file_name, metadata={"format": "pt"})
            (directory / file_name).chmod(0o644)  # readable like its neighbours
    if len(shards) > 1:
        total = sum(int(np.prod(conversion.shape)) for conversion in conversions) * dtype.itemsize
        _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split_into_shards(conversions: list[_Conversion], item_bytes: int) -> Iterator[list[_Conversion]]:
    shard: list[_Conversion] = []
    size = 0
    for conversion in conversions:
        tensor_bytes = int(np.prod(conversion.shape)) * item_bytes
        if shard and size + tensor_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(conversion)
        size += tensor_bytes
    yield shard


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
