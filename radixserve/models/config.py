"""ModelConfig: what the Decoder must know of a model, read from a Hugging Face config.json.

Whatever the Decoder would compute wrongly is refused here, by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixserve.errors import ModelError, UnsupportedModelError
from radixserve.models.registry import FAMILIES, Family

DEFAULT_ROPE_THETA = 10000.0
MISTRAL_DEFAULT_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's stretch of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int  # rows of the embedding; the tokenizer may know fewer ids
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json together


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json (and generation_config.json where there is one).

    Raises UnsupportedModelError naming what the Decoder cannot do, ModelError for a file that is missing or not JSON.
    """
    raw = _read_json(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return parse_model_config(raw, generation)


def parse_model_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """The same from dictionaries; `generation` may be empty."""
    architecture, family = _family(raw)
    _refuse_what_is_not_computed(raw)
    num_layers, max_positions = _positive(raw, "num_hidden_layers"), _positive(raw, "max_position_embeddings")
    _refuse_sliding_window(raw, architecture, family, num_layers, max_positions)
    num_heads, hidden_size = _positive(raw, "num_attention_heads"), _positive(raw, "hidden_size")
    num_kv_heads = _positive(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads must be a multiple of num_key_value_heads, got {num_heads} and {num_kv_heads}"
        )
    theta, scaling = _rope(raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_positive(raw, "head_dim", default=family.default_head_dim or hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        bos_token_id=raw.get("bos_token_id", generation.get("bos_token_id")),
        eos_token_ids=_eos_token_ids(raw, generation),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: not found; a model directory has config.json, *.safetensors and tokenizer.json") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _family(raw: dict[str, Any]) -> tuple[str, Family]:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    got = ", ".join(map(str, names)) or f"none (model_type {raw.get('model_type')!r})"
    raise UnsupportedModelError(f"architecture: expected one of {', '.join(FAMILIES)}, got {got}")


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(f"config.json: {key}: expected a positive integer, got {value!r}")
    return value


def _refuse_what_is_not_computed(raw: dict[str, Any]) -> None:
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act: expected silu, got {act!r}")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UnsupportedModelError(f"{key}: true is not supported (biases are computed for q, k and v of Qwen2 only)")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(
            f"quantization_config: quantized weights ({method}) are not supported; give an unquantized model or a .gguf"
        )


def _refuse_sliding_window(raw: dict[str, Any], architecture: str, family: Family, num_layers: int, max_positions: int) -> None:
    sliding = [kind for kind in raw.get("layer_types") or [] if kind != "full_attention"]
    if sliding:
        raise UnsupportedModelError(f"layer_types: only full_attention is supported, got {sliding[0]} in {architecture}")
    if not (family.windowed_by_default or family.window_is_opt_in):
        return
    window = raw.get("sliding_window", MISTRAL_DEFAULT_WINDOW if family.windowed_by_default else None)
    if family.window_is_opt_in and (not raw.get("use_sliding_window") or raw.get("max_window_layers", 0) >= num_layers):
        return
    if window is not None and window < max_positions:  # a window as wide as the context never closes
        raise UnsupportedModelError(
            f"sliding_window: {architecture} with a window of {window} tokens is not supported (full attention only)"
        )


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling` (whose type was once called `type`)."""
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(params.get("rope_theta", raw.get("rope_theta", DEFAULT_ROPE_THETA)))
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor: expected 1.0, got {partial}")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModelError(f"rope type: expected default or llama3, got {kind!r}")
    try:
        scaling = Llama3RopeScaling(
            factor=float(params["factor"]),
            low_freq_factor=float(params["low_freq_factor"]),
            high_freq_factor=float(params["high_freq_factor"]),
            original_max_position_embeddings=int(params["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise UnsupportedModelError(f"rope type llama3: {error.args[0]} is missing in config.json") from None
    return theta, scaling


def _eos_token_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None:
                ids[int(token_id)] = None
    return tuple(ids)
