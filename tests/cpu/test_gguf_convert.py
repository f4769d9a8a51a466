"""GGUF conversion: tiny models written as llama.cpp writes them come back with their own weights, and what is unknown is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from radixserve.errors import ModelFetchError, UnsupportedModelError, WeightError
from radixserve.models import gguf_convert, load_decoder, load_model_config, resolve_model
from radixserve.models.gguf_convert import convert_gguf
from radixserve.models.layers import inverse_frequencies
from radixserve.tokenizer import Tokenizer
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import make_tiny_model

TEXT = "the quick brown fox <|im_start|>user 1234, naïve 日本語 😀\n\n  jumps!"


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(("family", "arch"), [("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_weights_and_config_come_back(
    tiny_model: Callable[[str, bool], Path], tmp_path: Path, family: str, arch: str, tie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny_model(family, tie)
    monkeypatch.setattr(gguf_convert, "SHARD_BYTES", 100_000)  # several shards
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(write_gguf(original, tmp_path / "model.gguf", arch), out)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    expected = load_file(original / "model.safetensors")
    got: dict[str, torch.Tensor] = {}
    for shard in out.glob("*.safetensors"):
        got |= load_file(shard)
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    config = load_model_config(out)
    assert config.rms_norm_eps == 1e-6
    if family != "mistral":  # a Mistral is a llama to llama.cpp
        assert config == load_model_config(original)
    load_decoder(config, out, dtype=torch.float32, device=torch.device("cpu"), load_format="auto", seed=0)
    assert Tokenizer.from_directory(out).decode(Tokenizer.from_directory(out).encode(TEXT), skip_special_tokens=False) == TEXT


@pytest.mark.parametrize(("kind", "steps"), [("Q8_0", 254), ("Q4_1", 15)])
def test_quantized_rows_are_dequantized(tmp_path: Path, kind: str, steps: int) -> None:
    rows = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).numpy()
    qtype = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x", gguf.quants.quantize(rows, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = gguf.GGUFReader(tmp_path / "one.gguf").tensors[0]
    got = gguf_convert._Conversion("x", source, num_permuted_heads=0).weights()
    blocks = rows.reshape(-1, 32)
    block_range = 2 * np.abs(blocks).max(axis=1) if kind == "Q8_0" else np.ptp(blocks, axis=1)
    error = np.abs(got.reshape(-1, 32) - blocks).max(axis=1)
    assert (error <= block_range / steps * 0.55).all()  # half a step, and the rounding of the scale to float16
    assert (error > 0).any()


LLAMA3_ROPE = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("factors_are_known", [True, False])
def test_llama3_rope_factors_become_a_config(tmp_path: Path, factors_are_known: bool) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_ROPE}
    original = make_tiny_model(tmp_path / "model", "llama", True, rope_parameters=rope, head_dim=32)
    out = tmp_path / "out"
    out.mkdir()

    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray], vocab: dict[str, Any]) -> None:
        scaling = load_model_config(original).rope_scaling
        factors = inverse_frequencies(32, 500000.0, None) / inverse_frequencies(32, 500000.0, scaling)
        tensors["rope_freqs.weight"] = factors.numpy() if factors_are_known else np.linspace(1, 32, 16, dtype=np.float32)

    path = write_gguf(original, tmp_path / "model.gguf", "llama", change=change)
    if factors_are_known:
        convert_gguf(path, out)
        assert load_model_config(out) == load_model_config(original)
    else:
        with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
            convert_gguf(path, out)


@pytest.mark.parametrize(
    ("arch", "key", "named"),
    [
        ("gemma3", None, "general.architecture.*'gemma3'"),
        ("llama", "llama.expert_count", "expert_count"),
        ("llama", "llama.rope.dimension_count", "rope.dimension_count"),
        ("llama", "tensor", "blk.0.attn_sinks.weight"),
        ("llama", "missing", "token_embd.weight: missing"),
        ("llama", "pre", "tokenizer.ggml.pre.*'tekken'"),
        ("llama", "model", "tokenizer.ggml.model.*'llama'"),
    ],
)
def test_what_is_unknown_is_refused_by_name(
    tiny_model: Callable[[str, bool], Path], tmp_path: Path, arch: str, key: str | None, named: str
) -> None:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray], vocab: dict[str, Any]) -> None:
        if key == "tensor":
            tensors["blk.0.attn_sinks.weight"] = np.ones(6, np.float32)
        elif key == "missing":
            del tensors["token_embd.weight"]
        elif key == "pre":
            vocab["pre"] = "tekken"
        elif key == "model":
            vocab["model"] = "llama"
        elif key is not None:
            writer.add_uint32(key, 4)

    path = write_gguf(tiny_model("llama", True), tmp_path / "model.gguf", arch, change=change)
    with pytest.raises((UnsupportedModelError, WeightError), match=named):
        convert_gguf(path, tmp_path)


def test_a_file_is_converted_once_until_it_changes(
    tiny_model: Callable[[str, bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tiny_model("qwen2", True), tmp_path / "Tiny-Q.gguf", "qwen2", pre="qwen2")
    first = resolve_model(str(path))
    assert first.name == "Tiny-Q"
    config_inode = (first.path / "config.json").stat().st_ino
    assert resolve_model(str(path)) == first
    assert (first.path / "config.json").stat().st_ino == config_inode
    write_gguf(tiny_model("qwen2", False), path, "qwen2", pre="qwen2")
    assert resolve_model(str(path)) == first
    assert load_model_config(first.path).tie_word_embeddings is False


def test_a_missing_and_a_broken_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelFetchError, match=r"no such file: .*none\.gguf"):
        resolve_model(str(tmp_path / "none.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(WeightError, match=r"broken\.gguf: cannot be read"):
        resolve_model(str(broken))
    assert [path.name for path in (tmp_path / "cache/radixserve/models").iterdir() if not path.name.endswith(".lock")] == []
