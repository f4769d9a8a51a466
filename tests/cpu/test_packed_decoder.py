"""PackedDecoder: a row's bits depend neither on the rows beside it nor on threads, and are those of the plain path up to rounding."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from radixserve.errors import ConfigError
from radixserve.models import Decoder, load_decoder, packed_decoder
from radixserve.models.config import ModelConfig, parse_model_config
from radixserve.models.packed_decoder import PackedDecoder, can_compute, why_not_packed
from tests.support.dense_attention import single_sequence_batch
from tests.support.tiny_decoder import pack_decoder

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
NUM_TOKENS = 1024
# no width is a multiple of a panel (32), and K is beyond what one block of rows holds
RAW = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 197,
    "hidden_size": 200,
    "intermediate_size": 1034,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": NUM_TOKENS,
}


class EchoAttention:
    """Mixes q, k and v of each token alone, so that whatever depends on other rows comes from the decoder."""

    name = "echo"
    waited_s = 0.0

    def plan(self, batch: object) -> None: ...

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        return q + k.repeat_interleave(group, dim=1) - v.repeat_interleave(group, dim=1)


@pytest.fixture(autouse=True)
def has_kernel(request: pytest.FixtureRequest) -> None:
    dtype = request.node.callspec.params.get("dtype", torch.float32) if hasattr(request.node, "callspec") else torch.float32
    if not can_compute(dtype):
        pytest.skip(f"no native products of {dtype} here")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def config_of(**changes: object) -> ModelConfig:
    return parse_model_config(RAW | changes, {})


def plain_decoder(dtype: torch.dtype, **changes: object) -> Decoder:
    decoder = load_decoder(config_of(**changes), Path(), dtype=dtype, device=CPU, load_format="dummy", seed=3, linear_backend="torch")
    assert isinstance(decoder, Decoder)
    return decoder


def results(decoder: Decoder | PackedDecoder, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of the first `count` tokens."""
    ids = torch.randint(197, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        hidden = decoder.forward(single_sequence_batch(ids[:count]), EchoAttention())
        return hidden, decoder.compute_logits(hidden)


def _vary_norms(decoder: Decoder) -> None:
    """Dummy norms are 1 and would hide one that is left out or in the wrong place."""
    generator = torch.Generator().manual_seed(5)
    for layer in decoder.weights.layers:
        for norm in (layer.input_norm, layer.post_attention_norm, layer.qk_norm):
            if norm is not None:
                norm.uniform_(0.5, 1.5, generator=generator)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(dtype: torch.dtype, tie: bool, two_threads: None) -> None:
    plain = plain_decoder(dtype, tie_word_embeddings=tie)
    decoder = pack_decoder(plain.config, plain.weights)
    whole = results(decoder, NUM_TOKENS)
    assert whole[0].float().std() > 0.1
    for count in [*range(1, 40), 47, 64, 100, 255, 256, 257, 500, 777, 1023, NUM_TOKENS]:
        for got, expected in zip(results(decoder, count), whole, strict=True):
            assert torch.equal(bits(got), bits(expected[:count])), count
    torch.set_num_threads(1)
    for got, expected in zip(results(decoder, 301), whole, strict=True):
        assert torch.equal(bits(got), bits(expected[:301]))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_it_is_the_plain_decoder_up_to_rounding(architecture: str, dtype: torch.dtype, tie: bool) -> None:
    plain = plain_decoder(dtype, architectures=[architecture], tie_word_embeddings=tie)
    with torch.inference_mode():
        _vary_norms(plain)
    packed = pack_decoder(plain.config, plain.weights)
    tolerance = 3e-5 if dtype == torch.float32 else 0.05
    for got, expected in zip(results(packed, 37), results(plain, 37), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_nan_stays_in_its_row() -> None:
    plain = plain_decoder(torch.float32, tie_word_embeddings=False)
    clean, _ = results(pack_decoder(plain.config, plain.weights), 60)
    ids = torch.randint(197, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))[:60]
    with torch.inference_mode():
        plain.weights.embedding[ids[7]] = float("nan")
    got, _ = results(pack_decoder(plain.config, plain.weights), 60)
    is_hit = ids == ids[7]
    assert got[is_hit].isnan().all()
    assert torch.equal(got[~is_hit], clean[~is_hit])


def test_too_little_memory_is_an_exception_and_the_next_call_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load_decoder(config_of(), Path(), dtype=torch.float32, device=CPU, load_format="dummy", seed=3, quantization="int8")
    rows = torch.ones(3, 200)
    expected = decoder.compute_logits(rows)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_num_threads", lambda: 2**31 - 1)  # of whom each wants a panel: more than there are addresses
        with pytest.raises(MemoryError, match="no memory for the logits of 3 rows"):
            decoder.compute_logits(rows)
    assert torch.equal(decoder.compute_logits(rows), expected)


def test_a_level_without_bfloat16_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lesser = SimpleNamespace(radixserve_decoder_dtypes=lambda: 1)
    monkeypatch.setattr(packed_decoder, "load_library", lambda: lesser)
    assert why_not_packed(config_of(), torch.float32, CPU) == ""
    reason = why_not_packed(config_of(), torch.bfloat16, CPU)
    assert re.fullmatch("products of torch.bfloat16 need AVX-512 and AVX512-BF16, and the level .* has none", reason)


def test_what_cannot_be_packed_is_refused_or_runs_on_torch() -> None:
    odd = config_of(intermediate_size=1033)
    arguments = {"dtype": torch.float32, "device": CPU, "load_format": "dummy"}
    assert load_decoder(odd, Path(), **arguments).linear_backend == "torch"
    with pytest.raises(ConfigError, match=r"--linear-backend native: expected .*even widths"):
        load_decoder(odd, Path(), **arguments, linear_backend="native")
    assert load_decoder(config_of(), Path(), **arguments).linear_backend == "native"
