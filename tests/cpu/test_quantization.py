"""--quantization int8: products with the weights it says, bits that depend on nothing else, a model that still says the same, refusals."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from radixserve.engine.build import check_quantization
from radixserve.engine.llm import LLM
from radixserve.errors import ConfigError
from radixserve.models import Decoder, load_decoder
from radixserve.models.packed_decoder import PackedDecoder, can_compute
from radixserve.native import load_library
from tests.cpu.test_packed_decoder import CPU, NUM_TOKENS, bits, config_of, plain_decoder, results
from tests.support.engine_runs import Answer, make_request, run, tiny_engine

Tiny = Callable[[str, bool], Path]
DTYPES = [torch.float32, torch.bfloat16]
MATRICES = ("qkv", "output", "gate_up", "down")


@pytest.fixture(autouse=True)
def has_kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    dtype = request.node.callspec.params.get("dtype", torch.bfloat16) if hasattr(request.node, "callspec") else torch.bfloat16
    if not can_compute(dtype):
        pytest.skip(f"no native products of {dtype} here")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pack_int8(plain: Decoder) -> PackedDecoder:
    return PackedDecoder(plain.config, replace(plain.weights, layers=()), list(plain.weights.layers), "int8")


def scales_and_integers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What int8 means, for weight [out, in]: float32 [out, 1] and integers as float32 [out, in]."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return scale, (weight.float() / torch.where(scale > 0, scale, 1)).round().clamp(-127, 127)


def head_product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x [n, in] times weight [out, in] by the head of a decoder, which gives the sums as they are: float32 [n, out]."""
    plain = plain_decoder(weight.dtype, hidden_size=weight.shape[1], vocab_size=weight.shape[0], tie_word_embeddings=False)
    decoder = PackedDecoder(plain.config, replace(plain.weights, lm_head=weight, layers=()), list(plain.weights.layers), "int8")
    return decoder.compute_logits(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_the_integers_and_scales(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(197, 1, generator=generator) * 10 + 0.01  # rows of very different size
    weight = (torch.randn(197, 200, generator=generator) * spread).to(dtype)
    weight[5] = 0
    x = torch.randn(400, 200, generator=generator).to(dtype)
    scale, integers = scales_and_integers(weight)
    expected = x.double() @ (integers.double() * scale.double()).T
    magnitude = x.double().abs() @ (integers.double().abs() * scale.double()).T
    for count in (1, 2, 7, 12, 13, 40, 400):
        got = head_product(weight, x[:count])
        assert got.dtype == torch.float32
        # chains of 200 float32 additions
        assert ((got.double() - expected[:count]).abs() <= 1e-5 * magnitude[:count] + 1e-30).all(), count
        assert (got[:, 5] == 0).all()


def test_the_integers_are_what_the_library_packs() -> None:
    """Layout and rounding, ties to even included; interleaved halves beside each other."""
    rows, width = 38, 6  # two interleaved panels of 19 pairs
    weight = torch.randint(-254, 255, (rows, width), generator=torch.Generator().manual_seed(2)).float() / 2
    weight[:, 0] = 127  # so that every scale is 1 and halves are ties
    packed, scales = torch.zeros(2, width, 32, dtype=torch.int8), torch.zeros(2, 32)
    load_library().radixserve_decoder_quantize(weight.data_ptr(), False, rows, width, True, packed.data_ptr(), scales.data_ptr())
    for row in range(rows):
        panel, column = divmod(row % 19, 16)
        column += 16 * (row >= 19)
        assert torch.equal(packed[panel, :, column].float(), weight[row].round()), row
        assert scales[panel, column] == 1
    assert (packed[1, :, 3:16] == 0).all() and (scales[1, 3:16] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_is_no_number_is_not_hidden(dtype: torch.dtype, value: float) -> None:
    weight = torch.ones(64, 200, dtype=dtype)
    weight[9, 100] = value
    got = head_product(weight, torch.ones(3, 200, dtype=dtype))
    assert not got[:, 9].isfinite().any()
    assert got[:, [*range(9), *range(10, 64)]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows_and_threads(dtype: torch.dtype) -> None:
    """Tiles that widen in registers, and those that share a widened panel, give the same."""
    decoder = pack_int8(plain_decoder(dtype, tie_word_embeddings=True))
    torch.set_num_threads(2)
    whole = results(decoder, NUM_TOKENS)
    assert whole[0].float().std() > 0.1
    for count in [*range(1, 27), 37, 64, 255, 257, 500, 1023]:
        for got, expected in zip(results(decoder, count), whole, strict=True):
            assert torch.equal(bits(got), bits(expected[:count])), count
    torch.set_num_threads(1)
    for got, expected in zip(results(decoder, 301), whole, strict=True):
        assert torch.equal(bits(got), bits(expected[:301]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_it_is_the_plain_decoder_with_those_weights(architecture: str, dtype: torch.dtype) -> None:
    """The plain one computes with float32 weights that stand for integers and scales, the embedding as it was."""
    plain = plain_decoder(dtype, architectures=[architecture], tie_word_embeddings=True)
    quantized = pack_int8(plain)

    def meant(weight: torch.Tensor) -> torch.Tensor:
        scale, integers = scales_and_integers(weight)
        return (scale * integers).to(dtype)

    with torch.inference_mode():
        layers = tuple(replace(layer, **{name: meant(getattr(layer, name)) for name in MATRICES}) for layer in plain.weights.layers)
        weights = replace(plain.weights, layers=layers, lm_head=meant(plain.weights.lm_head))
    assert not torch.equal(weights.lm_head, weights.embedding)
    reference = Decoder(plain.config, weights)
    tolerance = 3e-5 if dtype == torch.float32 else 0.05
    for got, expected in zip(results(quantized, 37), results(reference, 37), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_no_second_copy_is_kept() -> None:
    plain = plain_decoder(torch.bfloat16, tie_word_embeddings=True)
    layer_bytes = sum(getattr(layer, name).nbytes for layer in plain.weights.layers for name in MATRICES)
    embedding_bytes = plain.weights.embedding.nbytes
    # padding of panels and scales beside the integers
    assert pack_int8(plain).size_bytes < embedding_bytes + 0.6 * (layer_bytes + embedding_bytes)


def test_the_default_model_still_says_the_same(default_model_dir: Path) -> None:
    """Measured by bench.quantization: 94 % of the likeliest next tokens are the same; a broken kernel agrees on next to none."""
    text = "The library was quiet. A boy sat by the window with a book about ships, and he did not notice that it had begun to rain."
    greedy = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
    answers = []
    for name in ("none", "int8"):
        torch.set_num_threads(2)
        llm = LLM(str(default_model_dir), device="cpu", max_total_tokens=512, linear_backend="native", quantization=name)
        assert llm.engine.info.quantization == name
        prompt = llm.tokenizer.encode(text)
        answers.append(run(llm.engine, [make_request("one", prompt, **greedy)])["one"])
    before, after = answers
    same = sum(a.top[0][0] == b.top[0][0] for a, b in zip(before.prompt_logprobs, after.prompt_logprobs, strict=True))
    assert same >= 0.8 * len(before.prompt_logprobs)
    nats = [-sum(one.logprob for one in answer.prompt_logprobs) / len(answer.prompt_logprobs) for answer in answers]
    assert abs(nats[1] - nats[0]) < 0.05


def said(answer: Answer) -> tuple[object, ...]:
    return answer.token_ids, [one.logprob.hex() for one in answer.logprobs]


def test_deterministic_holds(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits, chunks, a batch, retraction and threads change no bit; see test_deterministic.py."""
    model_dir, rng = tiny_model("llama", True), random.Random(3)
    options = {"dtype": "bfloat16", "deterministic": True, "quantization": "int8", "check_account_every_step": False}
    alone = tiny_engine(model_dir, disable_radix_cache=True, chunked_prefill_size=2048, max_total_tokens=2048, **options)
    monkeypatch.setenv("RADIXSERVE_TEST_RETRACT", "7")
    busy = tiny_engine(model_dir, chunked_prefill_size=97, max_running_requests=16, max_total_tokens=6000, **options)
    shared = [rng.randrange(384) for _ in range(300)]
    prompts = [shared[: rng.randint(1, 300)] + [rng.randrange(384) for _ in range(rng.randint(1, 90))] for _ in range(24)]
    requests = [make_request(str(i), p, seed=i, max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True) for i, p in enumerate(prompts)]
    torch.set_num_threads(2)
    answers = run(busy, requests)
    torch.set_num_threads(1)
    for request in requests:
        assert said(answers[request.request_id]) == said(run(alone, [request])[request.request_id])
    assert busy.stats().retracted_total > 0 and sum(one.final.num_cached_tokens for one in answers.values() if one.final) > 0


def test_what_cannot_do_it_is_refused(tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match="--quantization int8: expected --linear-backend native, got torch"):
        LLM(str(tiny_model("llama", True)), device="cpu", max_total_tokens=64, quantization="int8", linear_backend="torch")
    with pytest.raises(ConfigError, match=r"--quantization int8: expected float32 or bfloat16, got torch\.float16"):
        LLM(str(tiny_model("llama", True)), device="cpu", max_total_tokens=64, quantization="int8", dtype="float16")
    with pytest.raises(ConfigError, match="--quantization int8: expected --device cpu, got cuda"):
        check_quantization("int8", "cuda", "auto")
    with pytest.raises(ConfigError, match="--quantization: expected one of none, int8, got 'int4'"):
        LLM(str(tiny_model("llama", True)), device="cpu", quantization="int4")
    odd = config_of(intermediate_size=1033)
    with pytest.raises(ConfigError, match=r"--quantization int8: expected .*even widths"):
        load_decoder(odd, Path(), dtype=torch.float32, device=CPU, load_format="dummy", quantization="int8")
