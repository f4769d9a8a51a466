"""The Decoder against transformers, in float32, on tiny random models and on the default model."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from radixserve.models import Decoder, load_decoder, load_model_config
from radixserve.models.packed_decoder import PackedDecoder, can_compute
from tests.support.dense_attention import DenseAttention, single_sequence_batch
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture(params=["torch", "native"], autouse=True)
def linear_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test of this file runs on both paths."""
    if request.param == "native" and not can_compute(torch.float32):
        pytest.skip("no AVX-512 or no C++ compiler here")
    monkeypatch.setattr(sys.modules[__name__], "BACKEND", request.param)
    return str(request.param)


BACKEND = ""


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder | PackedDecoder:
    if dtype == torch.bfloat16 and BACKEND == "native" and not can_compute(dtype):
        pytest.skip("no AVX512-BF16 here")
    config = load_model_config(directory)
    return load_decoder(config, directory, dtype=dtype, device=CPU, load_format="auto", seed=0, linear_backend=BACKEND)


def logits_of(decoder: Decoder | PackedDecoder, token_ids: list[int], chunk: int | None = None) -> torch.Tensor:
    attention, rows = DenseAttention(), []
    chunk = chunk or len(token_ids)
    with torch.inference_mode():
        for start in range(0, len(token_ids), chunk):
            hidden = decoder.forward(single_sequence_batch(token_ids[start : start + chunk], start), attention)
            rows.append(decoder.compute_logits(hidden))
    return torch.cat(rows)


def oracle_logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def random_ids(count: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tiny_model: Callable[[str, bool], Path], family: str, tie: bool) -> None:
    directory, token_ids = tiny_model(family, tie), random_ids(300)
    decoder = load(directory)
    got, expected = logits_of(decoder, token_ids), oracle_logits(directory, token_ids)
    assert got.dtype == torch.float32
    assert expected.std() > 0.3  # else closeness would say nothing
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits_of(decoder, token_ids, chunk=64), expected, atol=1e-4, rtol=0)


def test_llama3_rope_scaling_equals_transformers(tmp_path: Path) -> None:
    directory, token_ids = make_tiny_model(tmp_path, "llama", True, rope_parameters=LLAMA3_ROPE, head_dim=32), random_ids(600)
    expected = oracle_logits(directory, token_ids)
    torch.testing.assert_close(logits_of(load(directory), token_ids), expected, atol=1e-4, rtol=0)


def test_older_rope_fields_mean_the_same(tmp_path: Path) -> None:
    import json

    directory, token_ids = make_tiny_model(tmp_path, "llama", True, rope_parameters=LLAMA3_ROPE), random_ids(200)
    expected = logits_of(load(directory), token_ids)
    raw = json.loads((directory / "config.json").read_text())
    params = raw.pop("rope_parameters")
    raw["rope_theta"] = params.pop("rope_theta")
    raw["rope_scaling"] = params
    (directory / "config.json").write_text(json.dumps(raw))
    assert torch.equal(logits_of(load(directory), token_ids), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32(tiny_model: Callable[[str, bool], Path], family: str) -> None:
    directory, token_ids = tiny_model(family, False), random_ids(64)
    got, expected = logits_of(load(directory, torch.bfloat16), token_ids), oracle_logits(directory, token_ids)
    assert got.dtype == torch.float32
    assert (got - expected).abs().mean() < 0.05 * expected.std()


def test_default_model_speaks_and_equals_transformers(default_model_dir: Path) -> None:
    from radixserve.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(default_model_dir)
    token_ids = tokenizer.encode("The capital of France is")
    decoder = load(default_model_dir)
    got, expected = logits_of(decoder, token_ids), oracle_logits(default_model_dir, token_ids)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)  # logits of 30 layers are up to 30 in size
    assert tokenizer.decode([int(got[-1].argmax())]) == " Paris"


def test_size_bytes_counts_a_tied_head_once(tiny_model: Callable[[str, bool], Path]) -> None:
    sizes = {}
    for tie in (True, False):
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama", tie))
        sizes[tie] = load(tiny_model("llama", tie)).size_bytes
        exact = sum(parameter.nbytes for parameter in model.parameters())
        # widths of 48 and 80 rows are packed as 64 and 96; the widths of real models are multiples of 32
        assert sizes[tie] == exact if BACKEND == "torch" else exact < sizes[tie] < 1.15 * exact
    assert sizes[False] - sizes[True] == VOCAB_SIZE * 48 * 4
