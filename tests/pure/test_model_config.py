"""ModelConfig from config.json: what is read, what is refused, and that the refusal names it."""

import json
from pathlib import Path
from typing import Any

import pytest

from radixserve.errors import ModelError, UnsupportedModelError
from radixserve.models.config import Llama3RopeScaling, load_model_config, parse_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def parse(family: str = "Llama", generation: dict[str, Any] | None = None, **changes: Any) -> Any:
    return parse_model_config(LLAMA | {"architectures": [f"{family}ForCausalLM"]} | changes, generation or {})


def test_fields_of_a_plain_llama() -> None:
    config = parse()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 8, 2, 8)
    assert (config.rope_theta, config.rope_scaling, config.rms_norm_eps) == (10000.0, None, 1e-5)
    assert (config.qkv_bias, config.qk_norm, config.tie_word_embeddings) == (False, False, False)
    assert (config.bos_token_id, config.eos_token_ids, config.max_position_embeddings) == (1, (2,), 1024)


def test_families_differ_by_fields() -> None:
    assert parse("Qwen2").qkv_bias is True
    assert parse("Qwen3").qk_norm is True
    assert parse("Qwen3").head_dim == 128
    assert parse("Qwen3", head_dim=16).head_dim == 16
    assert parse("Mistral", sliding_window=None).architecture == "MistralForCausalLM"


def test_heads_without_grouping() -> None:
    assert parse(num_key_value_heads=None).num_kv_heads == 8


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    ],
)
def test_rope_in_new_and_old_spelling(rope: dict[str, Any]) -> None:
    config = parse(**rope)
    assert (config.rope_theta, config.rope_scaling) == (500000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))


def test_eos_ids_of_both_files_are_joined() -> None:
    assert parse(generation={"eos_token_id": [7, 2]}).eos_token_ids == (2, 7)
    assert parse(eos_token_id=[5, 6]).eos_token_ids == (5, 6)
    assert parse(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mistral", {"sliding_window": 1024}),  # as wide as the context
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 128}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 4}),  # no layer is left to slide
        ("Llama", {"layer_types": ["full_attention"] * 4}),
    ],
)
def test_windows_that_never_close_are_accepted(family: str, changes: dict[str, Any]) -> None:
    assert parse(family, **changes).num_layers == 4


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("Gemma3", {}, "Gemma3ForCausalLM"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act.*'gelu'"),
        ("Llama", {"attention_bias": True}, "attention_bias"),
        ("Llama", {"mlp_bias": True}, "mlp_bias"),
        ("Llama", {"quantization_config": {"quant_method": "awq"}}, r"quantization_config: .*\(awq\)"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type.*'yarn'"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type.*'linear'"),
        ("Llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ("Llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Mistral", {"sliding_window": 512}, "sliding_window.*512"),
        ("Mistral", {"max_position_embeddings": 32768}, "sliding_window.*4096"),  # the field left out means a window
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}, "sliding_window.*512"),
        ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types.*sliding_attention"),
        ("Llama", {"num_key_value_heads": 3}, "8 and 3"),
        ("Llama", {"vocab_size": None}, "vocab_size"),
        ("Llama", {"hidden_size": "64"}, "hidden_size.*'64'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse(family, **changes)


def test_a_config_without_architectures_says_what_it_has() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type 'gpt2'"):
        parse_model_config({"model_type": "gpt2"}, {})


def test_files_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    assert load_model_config(tmp_path).eos_token_ids == (2, 9)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: not found"):
        load_model_config(tmp_path)
