"""Loading: shards, names, shapes, and random weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve.errors import WeightError
from radixserve.models import Decoder, load_decoder, load_model_config
from tests.support.dense_attention import DenseAttention, single_sequence_batch

CPU = torch.device("cpu")


@pytest.fixture
def copied(tiny_model: Callable[[str, bool], Path], tmp_path: Path) -> Path:
    """A Qwen2 model of its own, to be damaged."""
    return Path(shutil.copytree(tiny_model("qwen2", True), tmp_path / "model"))


def load(directory: Path, load_format: str = "auto", seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(load_model_config(directory), directory, dtype=dtype, device=CPU, load_format=load_format, seed=seed)


def logits_of(decoder: Decoder) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.compute_logits(decoder.forward(single_sequence_batch([5, 17, 300, 4]), DenseAttention()))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_shards_give_the_same_model(copied: Path) -> None:
    expected = logits_of(load(copied))
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        part = {name: tensor for rank, (name, tensor) in enumerate(sorted(tensors.items())) if rank % 3 == number}
        save_file(part, copied / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(load(copied)), expected)
    (copied / "model-1.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model-1\.safetensors.*missing"):
        load(copied)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), r"model\.layers\.1\.self_attn\.k_proj\.bias: missing"),
        (lambda t: t.update({"model.layers.0.mlp.experts.weight": torch.ones(2)}), r"mlp\.experts\.weight: .*does not have"),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), r"model\.norm\.weight: expected shape \[48\].*\[47\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), r"model\.norm\.weight: .*floating"),
    ],
)
def test_a_wrong_tensor_is_named(copied: Path, change: Callable[[dict[str, torch.Tensor]], object], named: str) -> None:
    rewrite(copied, change)
    with pytest.raises(WeightError, match=named):
        load(copied)


def test_copies_that_follow_from_the_rest_are_ignored(copied: Path) -> None:
    expected = logits_of(load(copied))
    rewrite(copied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    rewrite(copied, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(logits_of(load(copied)), expected)


def test_a_truncated_file_is_named(copied: Path) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightError, match=r"model\.safetensors.*not a complete"):
        load(copied)


def test_a_directory_without_weights_says_so(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(WeightError, match="no weights"):
        load(copied)


def test_dummy_weights_need_config_alone_and_follow_the_seed(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    first, again, other = (logits_of(load(copied, "dummy", seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all()
    assert first.std() > 0


def test_dummy_weights_of_two_dtypes_are_one_model(copied: Path) -> None:
    wide, narrow = logits_of(load(copied, "dummy", 3)), logits_of(load(copied, "dummy", 3, torch.bfloat16))
    assert (wide - narrow).abs().mean() < 0.05 * wide.std()
