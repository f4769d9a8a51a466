"""Fills a Decoder: streams safetensors shards into fused tensors, or draws random weights from the config alone.

Every checkpoint name has one Slot: the view of the fused tensor that it fills. Names and shapes must match exactly.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from radixserve.errors import WeightError
from radixserve.models.config import ModelConfig
from radixserve.models.decoder import Decoder, DecoderWeights, LayerWeights

INDEX_NAME = "model.safetensors.index.json"
DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class Slot:
    view: torch.Tensor  # where the tensor goes
    shape: tuple[int, ...]  # of the tensor in the checkpoint; broadcast over the view's leading dimensions
    is_norm: bool = False


def load_decoder(
    config: ModelConfig, model_dir: Path, *, dtype: torch.dtype, device: torch.device, load_format: str = "auto", seed: int = 0
) -> Decoder:
    """load_format "auto" reads model_dir/*.safetensors; "dummy" reads no file and draws weights from `seed` on `device`.

    Raises WeightError naming a tensor that is missing, superfluous or of the wrong shape.
    """
    with torch.inference_mode():
        weights, slots = _allocate(config, dtype, device)
        if load_format == "dummy":
            _fill_random(slots, seed, device)
        else:
            _fill_from_files(slots, config, model_dir)
        return Decoder(config, weights)


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[DecoderWeights, dict[str, Slot]]:
    slots: dict[str, Slot] = {}

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def whole(name: str, *shape: int, is_norm: bool = False) -> torch.Tensor:
        tensor = empty(*shape)
        slots[name] = Slot(tensor, shape, is_norm)
        return tensor

    def fused(prefix: str, suffix: str, rows: dict[str, int], *columns: int) -> torch.Tensor:
        tensor = empty(sum(rows.values()), *columns)
        for (name, num_rows), view in zip(rows.items(), torch.split(tensor, list(rows.values()))):
            slots[f"{prefix}{name}.{suffix}"] = Slot(view, (num_rows, *columns))
        return tensor

    hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_rows = {"q_proj": config.num_heads * head_dim, "k_proj": config.num_kv_heads * head_dim, "v_proj": config.num_kv_heads * head_dim}
    embedding = whole("model.embed_tokens.weight", config.vocab_size, hidden)
    layers = []
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        qk_norm = None
        if config.qk_norm:
            qk_norm = empty(config.num_heads + config.num_kv_heads, head_dim)
            slots[f"{at}self_attn.q_norm.weight"] = Slot(qk_norm[: config.num_heads], (head_dim,), is_norm=True)
            slots[f"{at}self_attn.k_norm.weight"] = Slot(qk_norm[config.num_heads :], (head_dim,), is_norm=True)
        layers.append(
            LayerWeights(
                input_norm=whole(f"{at}input_layernorm.weight", hidden, is_norm=True),
                qkv=fused(f"{at}self_attn.", "weight", qkv_rows, hidden),
                qkv_bias=fused(f"{at}self_attn.", "bias", qkv_rows) if config.qkv_bias else None,
                qk_norm=qk_norm,
                output=whole(f"{at}self_attn.o_proj.weight", hidden, config.num_heads * head_dim),
                post_attention_norm=whole(f"{at}post_attention_layernorm.weight", hidden, is_norm=True),
                gate_up=fused(f"{at}mlp.", "weight", {"gate_proj": mlp, "up_proj": mlp}, hidden),
                down=whole(f"{at}mlp.down_proj.weight", hidden, mlp),
            )
        )
    final_norm = whole("model.norm.weight", hidden, is_norm=True)
    lm_head = embedding if config.tie_word_embeddings else whole("lm_head.weight", config.vocab_size, hidden)
    return DecoderWeights(embedding, tuple(layers), final_norm, lm_head), slots


def _fill_random(slots: dict[str, Slot], seed: int, device: torch.device) -> None:
    generator = torch.Generator(device=device).manual_seed(seed)
    for slot in slots.values():
        if slot.is_norm:
            slot.view.fill_(1.0)
        else:
            # drawn in float32, so that two dtypes hold the same model up to rounding
            slot.view.copy_(torch.randn(slot.shape, generator=generator, device=device).mul_(DUMMY_STD))


def _fill_from_files(slots: dict[str, Slot], config: ModelConfig, model_dir: Path) -> None:
    missing = set(slots)
    for name, tensor in _stream(_shards(model_dir)):
        slot = slots.get(name)
        if slot is None:
            if _may_be_ignored(name, config):
                continue
            raise WeightError(f"{name}: a tensor that {config.architecture} does not have, in {model_dir}")
        if name not in missing:
            raise WeightError(f"{name}: stored twice, in {model_dir}")
        if tuple(tensor.shape) != slot.shape:
            raise WeightError(f"{name}: expected shape {list(slot.shape)} from config.json, got {list(tensor.shape)}")
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


def _shards(model_dir: Path) -> list[Path]:
    index_path, single = model_dir / INDEX_NAME, model_dir / "model.safetensors"
    if index_path.exists():
        try:
            names = sorted(set(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightError(f"{index_path}: expected a JSON object with a weight_map, got something else ({error})") from error
        shards = [model_dir / name for name in names]
    elif single.exists():
        shards = [single]
    else:
        raise WeightError(f"no weights: expected {INDEX_NAME} or model.safetensors in {model_dir}")
    for shard in shards:
        if shard.parent != model_dir or not shard.exists():
            raise WeightError(f"{shard}: a shard named by {INDEX_NAME} is missing")
    return shards


def _stream(shards: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise WeightError(f"{shard}: not a complete safetensors file: {error}") from error
