"""Fills a Decoder: streams safetensors files into fused tensors, or draws random weights from the config alone.

Every checkpoint name has one Slot: the view of the fused tensor that it fills, and which part of the stored tensor that is. A rank of
several reads no more than its parts (models/sharding.py). Names and shapes must match exactly.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from radixserve.errors import ConfigError, WeightError
from radixserve.models.config import ModelConfig
from radixserve.models.decoder import Decoder, DecoderWeights, LayerWeights
from radixserve.models.packed_decoder import PackedDecoder, can_pack
from radixserve.models.rank_group import RankGroup
from radixserve.models.sharding import shard_config, vocab_rows
from radixserve.native.library import loaded_library

logger = logging.getLogger(__name__)
INDEX_NAME = "model.safetensors.index.json"
DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class Slot:
    view: torch.Tensor  # where the tensor, or this rank's part of it, goes
    shape: tuple[int, ...]  # of the tensor in the checkpoint; its part is broadcast over the view's leading dimensions
    is_norm: bool = False
    part: tuple[slice, ...] = (slice(None),)  # of the tensor in the checkpoint


def load_decoder(
    config: ModelConfig,
    model_dir: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    linear_backend: str = "auto",
    quantization: str = "none",
    group: RankGroup | None = None,
) -> Decoder | PackedDecoder:
    """load_format "auto" reads model_dir/*.safetensors; "dummy" reads no file and draws weights from `seed` on `device`.
    linear_backend "native" packs the weights for the native products; "auto" does where that can be, which is never with a group:
    a Decoder of this rank's part then, whose config is that part's. quantization "int8" needs native ones.

    Raises WeightError naming a tensor that is missing, superfluous or of the wrong shape, ConfigError where "native" or "int8" cannot be.
    """
    is_packed = linear_backend != "torch" and group is None and can_pack(config, dtype, device)
    needs = (
        "expected a CPU with AVX-512 (and AVX512-BF16 for bfloat16), a C++ compiler, float32 or bfloat16 and "
        f"even widths; got {dtype} on {device}" + (f" and {group.size} ranks" if group else "")
    )
    if (linear_backend == "native" or quantization != "none") and not is_packed:
        flag = "--linear-backend native" if quantization == "none" else f"--quantization {quantization}"
        raise ConfigError(f"{flag}: {needs}")
    # of a library that cannot be built, native/library.py has said so
    if linear_backend == "auto" and not is_packed and device.type == "cpu" and (dtype == torch.float16 or loaded_library()):
        logger.warning("linears run on plain torch, slower than native ones: %s", needs)
    with torch.inference_mode():
        new = _Allocator(dtype, device, group)
        weights, slots = _allocate(shard_config(config, group.size) if group else config, new), new.slots
        if load_format == "dummy":
            _fill_random(slots, seed, device)
        else:
            _fill_from_files(slots, config, model_dir)
        if not is_packed:
            return Decoder(shard_config(config, group.size) if group else config, weights, group)
        slots.clear()  # they hold views of what is to be freed
        layers, weights = list(weights.layers), replace(weights, layers=())
        return PackedDecoder(config, weights, layers, quantization)


class _Allocator:
    """Hands out uninitialised tensors and notes which part of which checkpoint tensor fills which part of them. Sizes are a rank's."""

    def __init__(self, dtype: torch.dtype, device: torch.device, group: RankGroup | None) -> None:
        self._dtype, self._device = dtype, device
        self._rank, self._num_ranks = (group.rank, group.size) if group else (0, 1)
        self.slots: dict[str, Slot] = {}

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def norm(self, name: str, width: int) -> torch.Tensor:
        tensor = self.empty(width)
        self.slots[name] = Slot(tensor, (width,), is_norm=True)
        return tensor

    def vocabulary(self, name: str, vocab_size: int, width: int) -> torch.Tensor:
        """A row per token: this rank's rows, then padding."""
        num_rows = vocab_rows(vocab_size, self._num_ranks)
        tensor = self.empty(num_rows, width)
        first, last = (min(rank * num_rows, vocab_size) for rank in (self._rank, self._rank + 1))
        tensor[last - first :] = 0.0
        self.slots[name] = Slot(tensor[: last - first], (vocab_size, width), part=(slice(first, last),))
        return tensor

    def by_columns(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor:
        """[out, in] of which this rank multiplies `num_columns` of the inputs."""
        tensor = self.empty(num_rows, num_columns)
        self.slots[name] = Slot(tensor, (num_rows, num_columns * self._num_ranks), part=(slice(None), self._mine(num_columns)))
        return tensor

    def by_rows(self, prefix: str, suffix: str, rows: dict[str, int], *columns: int) -> torch.Tensor:
        """One tensor for several of the checkpoint: `rows` gives their names and this rank's row counts, in order."""
        tensor = self.empty(sum(rows.values()), *columns)
        for (name, num_rows), view in zip(rows.items(), torch.split(tensor, list(rows.values()))):
            shape = (num_rows * self._num_ranks, *columns)
            self.slots[f"{prefix}{name}.{suffix}"] = Slot(view, shape, part=(self._mine(num_rows),))
        return tensor

    def repeated_norms(self, prefix: str, rows: dict[str, int], width: int) -> torch.Tensor:
        """One row per head, every head of q (and every head of k) with the same weight."""
        tensor = self.empty(sum(rows.values()), width)
        for name, view in zip(rows, torch.split(tensor, list(rows.values()))):
            self.slots[f"{prefix}{name}.weight"] = Slot(view, (width,), is_norm=True)
        return tensor

    def _mine(self, size: int) -> slice:
        return slice(self._rank * size, (self._rank + 1) * size)


def _allocate(config: ModelConfig, new: _Allocator) -> DecoderWeights:
    embedding = new.vocabulary("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_allocate_layer(config, new, f"model.layers.{index}.") for index in range(config.num_layers))
    final_norm = new.norm("model.norm.weight", config.hidden_size)
    lm_head = embedding if config.tie_word_embeddings else new.vocabulary("lm_head.weight", config.vocab_size, config.hidden_size)
    return DecoderWeights(embedding, layers, final_norm, lm_head)


def _allocate_layer(config: ModelConfig, new: _Allocator, at: str) -> LayerWeights:
    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_q, num_kv = config.num_heads, config.num_kv_heads
    qkv_rows = {"q_proj": num_q * head_dim, "k_proj": num_kv * head_dim, "v_proj": num_kv * head_dim}
    qk_norm_rows = {"q_norm": num_q, "k_norm": num_kv}
    return LayerWeights(
        input_norm=new.norm(f"{at}input_layernorm.weight", hidden),
        qkv=new.by_rows(f"{at}self_attn.", "weight", qkv_rows, hidden),
        qkv_bias=new.by_rows(f"{at}self_attn.", "bias", qkv_rows) if config.qkv_bias else None,
        qk_norm=new.repeated_norms(f"{at}self_attn.", qk_norm_rows, head_dim) if config.qk_norm else None,
        output=new.by_columns(f"{at}self_attn.o_proj.weight", hidden, num_q * head_dim),
        post_attention_norm=new.norm(f"{at}post_attention_layernorm.weight", hidden),
        gate_up=new.by_rows(f"{at}mlp.", "weight", {"gate_proj": mlp, "up_proj": mlp}, hidden),
        down=new.by_columns(f"{at}mlp.down_proj.weight", hidden, mlp),
    )


def _fill_random(slots: dict[str, Slot], seed: int, device: torch.device) -> None:
    generator = torch.Generator(device=device).manual_seed(seed)
    for slot in slots.values():
        if slot.is_norm:
            slot.view.fill_(1.0)
        else:
            # drawn in float32, so that two dtypes hold the same model up to rounding; and whole, so that all ranks' parts are of one model
            slot.view.copy_(torch.randn(slot.shape, generator=generator, device=device)[slot.part].mul_(DUMMY_STD))


def _fill_from_files(slots: dict[str, Slot], config: ModelConfig, model_dir: Path) -> None:
    missing = set(slots)
    for name, stored in _stream(_files(model_dir)):
        slot = slots.get(name)
        if slot is None:
            if _may_be_ignored(name, config):
                continue
            raise WeightError(f"{name}: a tensor that {config.architecture} does not have, in {model_dir}")
        if name not in missing:
            raise WeightError(f"{name}: stored twice, in {model_dir}")
        if tuple(stored.get_shape()) != slot.shape:
            raise WeightError(f"{name}: expected shape {list(slot.shape)} from config.json, got {stored.get_shape()}")
        tensor: torch.Tensor = stored[slot.part]
        if not tensor.is_floating_point():
            raise WeightError(f"{name}: expected a floating-point tensor, got {tensor.dtype}")
        slot.view.copy_(tensor)
        missing.discard(name)
    if missing:
        first = min(missing)
        raise WeightError(f"{first}: missing in {model_dir}" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""))


def _may_be_ignored(name: str, config: ModelConfig) -> bool:
    """A copy of a tied head, and the rotary buffers that old Llama checkpoints carry: both follow from what is loaded."""
    return (name == "lm_head.weight" and config.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")


def _files(model_dir: Path) -> list[Path]:
    index_path, single = model_dir / INDEX_NAME, model_dir / "model.safetensors"
    if index_path.exists():
        try:
            names = sorted(set(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightError(f"{index_path}: expected a JSON object with a weight_map, got something else ({error})") from error
        paths = [model_dir / name for name in names]
    elif single.exists():
        paths = [single]
    else:
        raise WeightError(f"no weights: expected {INDEX_NAME} or model.safetensors in {model_dir}")
    for path in paths:
        if path.parent != model_dir or not path.exists():
            raise WeightError(f"{path}: a shard named by {INDEX_NAME} is missing")
    return paths


def _stream(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    """(name, safetensors' slice object: its shape is known, and indexing reads)."""
    from safetensors import SafetensorError, safe_open

    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    yield name, file.get_slice(name)
        except SafetensorError as error:
            raise WeightError(f"{path}: not a complete safetensors file: {error}") from error
