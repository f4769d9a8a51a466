"""Log-probabilities against transformers, whole and in chunks, cold and behind a shared prefix; ties, padding, slices and broken logits."""

import random
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from radixserve.core import SamplingParams, ScheduledBatch, ScheduledRow, TokenLogprob
from radixserve.runner import logprobs as logprobs_module
from radixserve.runner.logprobs import likeliest, token_logprobs
from tests.cpu.test_model_runner import VOCAB_SIZE
from tests.cpu.test_model_runner import make_stepper as make_small_stepper
from tests.cpu.test_runner_equals_transformers import make_stepper
from tests.support.stepping import Running

NUM_OUTPUT = 6
LENGTH = 150
TOLERANCE = 1e-3
Case = tuple[Path, list[int], torch.Tensor]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def case(request: pytest.FixtureRequest, tiny_model: Callable[[str, bool], Path], one_thread: None) -> Case:
    """Model directory, prompt + transformers' greedy continuation, and its log_softmax at every position."""
    import transformers

    directory = tiny_model(request.param, False)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = random.Random(3).choices(range(model.config.vocab_size), k=LENGTH)
    with torch.inference_mode():
        for _ in range(NUM_OUTPUT):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            ids.append(int(logits[-1].argmax()))
    return directory, ids, torch.log_softmax(logits, dim=-1)


def check(got: list[TokenLogprob], token_ids: list[int], expected: torch.Tensor, k: int) -> None:
    """`expected` [n, vocab_size] are the distributions that the tokens were drawn from."""
    assert [entry.token_id for entry in got] == token_ids
    for entry, row in zip(got, expected, strict=True):
        assert isinstance(entry.logprob, float)
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
        values = [value for _, value in entry.top]
        assert values == pytest.approx(row.topk(k).values.tolist(), abs=TOLERANCE)
        assert values == sorted(values, reverse=True)
        assert len({token_id for token_id, _ in entry.top}) == k
        assert values == pytest.approx([float(row[token_id]) for token_id, _ in entry.top], abs=TOLERANCE)
        assert dict(entry.top).get(entry.token_id, entry.logprob) == entry.logprob  # exactly


@pytest.mark.parametrize(("chunk", "k", "prompt_k"), [(LENGTH, 5, 2), (50, 0, 20), (7, 20, 0), (1, 1, 1), (149, 3, 3)])
def test_equal_transformers(case: Case, chunk: int, k: int, prompt_k: int) -> None:
    directory, ids, expected = case
    r = Running(3, ids[:LENGTH], SamplingParams(temperature=0.0, logprobs=k, prompt_logprobs=prompt_k))
    assert make_stepper(directory, 4).generate(r, NUM_OUTPUT, chunk) == ids[LENGTH:]
    check(r.prompt_logprobs, ids[1:LENGTH], expected[: LENGTH - 1], prompt_k)
    check(r.logprobs, ids[LENGTH:], expected[LENGTH - 1 :], k)


@pytest.mark.parametrize("page_size", [1, 16])
def test_warm_as_cold(case: Case, page_size: int) -> None:
    """Behind a cached prefix of 128 tokens the first position computed gives the log-probability of token 129."""
    directory, ids, expected = case
    stepper = make_stepper(directory, page_size)
    cold = Running(0, ids[:LENGTH], SamplingParams(temperature=0.0, logprobs=4, prompt_logprobs=4))
    stepper.generate(cold, NUM_OUTPUT, chunk=64)
    warm = Running(1, ids[:LENGTH], SamplingParams(temperature=0.0, logprobs=4, prompt_logprobs=4, prompt_logprobs_start=129))
    warm.share(cold, 128 // page_size, page_size)
    stepper.execute([(warm, 9), (cold, 0)])
    stepper.generate(warm, NUM_OUTPUT)
    check(warm.prompt_logprobs, ids[129:LENGTH], expected[128 : LENGTH - 1], 4)
    check(warm.logprobs, ids[LENGTH:], expected[LENGTH - 1 :], 4)
    assert [entry.logprob for entry in warm.prompt_logprobs] == pytest.approx(
        [e.logprob for e in cold.prompt_logprobs[128:]], abs=TOLERANCE
    )


def test_company_with_and_without_logprobs(case: Case) -> None:
    """Each row gets its own, in its own number; nothing is said of rows that did not ask."""
    directory, ids, expected = case
    stepper = make_stepper(directory, 4)
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, prompt_logprobs=3, prompt_logprobs_start=40),
        SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=7),
    ]
    running = [Running(slot, ids[:LENGTH], sampling) for slot, sampling in enumerate(settings)]
    stepper.execute([(running[0], LENGTH), (running[2], 60)])
    while unfinished := [r for r in running if len(r.output_ids) < NUM_OUTPUT]:
        output = stepper.execute([(r, min(31 + r.slot, LENGTH - r.num_computed)) for r in unfinished])
        assert output.logprobs == () or len(output.logprobs) == len(unfinished)
    assert all(r.output_ids == ids[LENGTH:] for r in running)
    for r, k, prompt_k, first in zip(running, (None, 2, None, 0), (None, None, 3, 7), (1, 1, 40, 1)):
        check(r.logprobs, [] if k is None else ids[LENGTH:], expected[LENGTH - 1 :] if k is not None else expected[:0], k or 0)
        is_asked = prompt_k is not None
        check(
            r.prompt_logprobs,
            ids[first:LENGTH] if is_asked else [],
            expected[first - 1 : LENGTH - 1] if is_asked else expected[:0],
            prompt_k or 0,
        )


def test_nobody_asked() -> None:
    output = make_small_stepper(4).execute([(Running(0, [1, 2, 3]), 3)])
    assert output.logprobs == ()


def test_a_prompt_that_asks_for_no_token() -> None:
    stepper = make_small_stepper(4)
    r = Running(0, [5, 6, 7, 8], SamplingParams(max_tokens=0, prompt_logprobs=1))
    output = stepper.execute([(r, 4)])
    assert output.token_ids == (-1,)
    assert [entry.token_id for entry in r.prompt_logprobs] == [6, 7, 8]
    with pytest.raises(AssertionError, match="decode row before any token was sampled"):
        stepper.runner.execute(ScheduledBatch(1, (ScheduledRow(0, 4, 1, array("i")),)))


def test_they_are_those_of_the_model_not_of_the_sampler() -> None:
    """Penalties, bias, temperature and filters move the draw and leave the log-probabilities as they are."""
    plain = Running(0, [3, 1, 4], SamplingParams(temperature=0.0, logprobs=20))
    moved = SamplingParams(
        temperature=0.7, top_k=3, logprobs=20, logit_bias=((50, 100.0),), frequency_penalty=2.0, repetition_penalty=1.5, min_tokens=1
    )
    biased = Running(0, [3, 1, 4], moved)
    make_small_stepper(4).generate(plain, 1)
    make_small_stepper(4).generate(biased, 1)
    assert biased.output_ids == [50] != plain.output_ids
    assert biased.logprobs[0].top == plain.logprobs[0].top
    assert plain.logprobs[0].top[0] == (plain.output_ids[0], plain.logprobs[0].logprob)
    everything = token_logprobs(lambda first, last: small_logits([3, 1, 4]), torch.tensor([50]), [0])
    assert biased.logprobs[0].logprob == pytest.approx(everything[0].logprob, abs=1e-5)


def small_logits(ids: list[int]) -> torch.Tensor:
    """The runner's own last logits [1, vocab_size] for a prompt."""
    stepper = make_small_stepper(4)
    seen = []
    decoder = stepper.runner._decoder
    real = decoder.compute_logits
    decoder.compute_logits = lambda hidden: seen.append(real(hidden)) or seen[-1]  # type: ignore[method-assign]
    stepper.execute([(Running(0, ids), len(ids))])
    return seen[-1]


def test_padding_ids_never_appear() -> None:
    """Nor do they count in the sum: the probabilities of the ids that can be drawn add up to one."""
    stepper = make_small_stepper(1, vocab_size=10)
    r = Running(0, [7, 3, 9], SamplingParams(temperature=1.0, logprobs=20, prompt_logprobs=20))
    stepper.generate(r, 5)
    for entry in r.logprobs + r.prompt_logprobs:
        assert {token_id for token_id, _ in entry.top} == set(range(10))
        assert sum(np.exp([value for _, value in entry.top])) == pytest.approx(1.0, abs=1e-5)


def test_long_prompts_are_done_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = make_small_stepper(4)
    sizes = []
    decoder = stepper.runner._decoder
    real = decoder.compute_logits
    decoder.compute_logits = lambda hidden: sizes.append(len(hidden)) or real(hidden)  # type: ignore[method-assign]
    ids = random.Random(0).choices(range(VOCAB_SIZE), k=250)
    r = Running(0, ids, SamplingParams(temperature=0.0, prompt_logprobs=1))
    stepper.execute([(r, 250)])
    assert sizes == [1, 128, 121]
    assert logprobs_module.ROWS_AT_ONCE == 128
    assert [entry.token_id for entry in r.prompt_logprobs] == ids[1:]


@pytest.mark.parametrize("vocab_size", [5, 40, 64, 65, 3000])
@pytest.mark.parametrize("num_values", [1, 3, 30])
def test_the_likeliest_come_in_order_with_the_lower_id_first(vocab_size: int, num_values: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.integers(0, num_values, size=(20, vocab_size)).astype(np.float32))
    for k in (0, 1, 5, 20):
        expected = [sorted(range(vocab_size), key=lambda i: (-row[i], i))[:k] for row in logits.tolist()]
        assert likeliest(logits, k).tolist() == expected


def test_slices_and_company_change_nothing() -> None:
    logits = torch.randn(23, 500, generator=torch.Generator().manual_seed(4)).round(decimals=1)
    token_ids = torch.arange(23) * 20
    num_top = [i % 6 for i in range(23)]
    whole = token_logprobs(lambda first, last: logits[first:last], token_ids, num_top)
    assert [len(entry.top) for entry in whole] == num_top
    for rows_at_once in (1, 4, 22):
        assert token_logprobs(lambda first, last: logits[first:last], token_ids, num_top, rows_at_once) == whole


def test_broken_logits_give_finite_numbers() -> None:
    inf, nan, lowest = float("inf"), float("nan"), float(np.finfo(np.float32).min)
    logits = torch.tensor([[0.0, nan, 0.0, -inf], [nan] * 4, [1.0, inf, 0.0, 0.0], [0.0, 0.0, -inf, 0.0]])
    got = token_logprobs(lambda first, last: logits[first:last], torch.tensor([1, 0, 1, 2]), [2, 1, 2, 4])
    assert got[0].logprob == got[1].logprob == got[3].logprob == lowest
    assert got[0].top == ((0, pytest.approx(np.log(0.5))), (2, pytest.approx(np.log(0.5))))
    assert got[2] == TokenLogprob(1, 0.0, ((1, 0.0), (0, lowest)))
    assert got[3].top[3] == (2, lowest)
