"""Penalties, bias and min_tokens: the arithmetic against transformers and a slow reference, then the state of slots in a runner."""

import random
from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.core import Request, SamplingParams
from radixserve.runner.adjustments import LogitAdjustments
from tests.cpu.test_model_runner import VOCAB_SIZE, make_stepper, prompt
from tests.support.stepping import Running, Stepper

SIZE = 60
EOS = (2, 59, 70)  # one beyond the vocabulary, as a padded head may have
CPU = torch.device("cpu")


def reference(logits: list[float], s: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
    """One token at a time, in float64."""
    counts, known, result = Counter(output_ids), set(prompt_ids) | set(output_ids), []
    stops = set(s.stop_token_ids) | (set() if s.ignore_eos else set(EOS))
    for token_id, logit in enumerate(logits):
        if token_id in known:
            logit = logit / s.repetition_penalty if logit > 0 else logit * s.repetition_penalty
        logit -= s.frequency_penalty * counts[token_id] + s.presence_penalty * (token_id in counts)
        logit += sum(bias for biased_id, bias in s.logit_bias if biased_id == token_id)
        result.append(-np.inf if token_id in stops and len(output_ids) < s.min_tokens else logit)
    return result


def random_settings(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=rng.choice([1.0, 1.0, 0.5, 1.3, 2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, -1.5, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, -0.3, 2.0]),
        logit_bias=tuple((rng.randrange(SIZE), rng.choice([-100.0, 100.0, 1.5])) for _ in range(rng.choice([0, 0, 1, 9]))),
        min_tokens=rng.choice([0, 0, 3, 8]),
        stop_token_ids=tuple(rng.choices(range(SIZE + 5), k=rng.choice([0, 2]))),
        ignore_eos=rng.random() < 0.3,
    )


def request(sampling: SamplingParams, prompt_ids: list[int]) -> Request:
    return Request("r", array("i", prompt_ids), sampling)


def apply(adjustments: LogitAdjustments, logits: torch.Tensor, slots: list[int], output_indices: list[int]) -> torch.Tensor:
    return adjustments.apply(logits, np.array(slots), np.array(output_indices))


def test_equals_the_reference_in_any_company_and_over_reused_slots() -> None:
    """Random rows of a step, tokens recorded, requests that resume, slots freed and given to others."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    adjustments = LogitAdjustments(6, SIZE, CPU, EOS)
    held: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    num_changed = 0
    for _ in range(300):
        for slot in range(6):
            if slot in held and rng.random() < 0.1:
                adjustments.clear(slot)
                del held[slot]
            if slot not in held and rng.random() < 0.6:
                sampling, prompt_ids = random_settings(rng), rng.choices(range(SIZE), k=rng.randint(1, 12))
                output_ids = rng.choices(range(SIZE), k=rng.choice([0, 0, 5]))
                held[slot] = sampling, prompt_ids, output_ids
                adjustments.put(slot, request(sampling, prompt_ids), array("i", output_ids))
        slots = [slot for slot in rng.sample(range(6), 6) if slot in held and rng.random() < 0.8]
        if not slots:
            continue
        logits = torch.randn(len(slots), SIZE, generator=generator) * 3
        before = logits.clone()
        got = apply(adjustments, logits, slots, [len(held[slot][2]) for slot in slots])
        assert torch.equal(logits, before)
        expected = [reference(row, *held[slot]) for slot, row in zip(slots, logits.tolist())]
        np.testing.assert_allclose(got.numpy(), np.array(expected), rtol=1e-5, atol=1e-5)
        num_changed += int((got != before).any(dim=1).sum())
        drawn = torch.tensor(rng.choices(range(SIZE), k=len(slots)))
        adjustments.record(np.array(slots), drawn)
        for slot, token_id in zip(slots, drawn.tolist()):
            held[slot][2].append(token_id)
    assert num_changed > 300


def test_nobody_asked_costs_nothing() -> None:
    adjustments = LogitAdjustments(2, SIZE, CPU, EOS)
    adjustments.put(0, request(SamplingParams(min_tokens=2, logit_bias=()), [1]), array("i"))
    logits = torch.zeros(1, SIZE)
    assert apply(adjustments, logits, [0], [2]) is logits
    assert apply(adjustments, logits, [0], [1]) is not logits
    adjustments.put(1, request(SamplingParams(min_tokens=9, ignore_eos=True, stop_token_ids=(SIZE,)), [1]), array("i"))
    assert apply(adjustments, logits, [1], [1]) is logits
    adjustments.record(np.array([0]), torch.tensor([3]))
    assert adjustments._num_in_output is None


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

    prompt_ids, output_ids = [5, 9, 9, 11], [20, 5]
    adjustments = LogitAdjustments(3, SIZE, CPU, (2,))
    sampling = SamplingParams(repetition_penalty=1.7, min_tokens=3)
    adjustments.put(1, request(sampling, prompt_ids), array("i", output_ids))
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(2))
    oracle = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), MinNewTokensLengthLogitsProcessor(4, 3, [2])])
    expected = oracle(torch.tensor([prompt_ids + output_ids]), logits.clone())
    assert torch.equal(apply(adjustments, logits, [1], [2]), expected)
    assert expected[0, 2] == -torch.inf


def slow_greedy(prompt_ids: list[int], num_tokens: int, sampling: SamplingParams) -> list[int]:
    """The reference over logits of the runner itself, the whole sequence prefilled anew for each token."""
    stepper = make_stepper(4)
    seen: list[torch.Tensor] = []
    decoder = stepper.runner._decoder
    real = decoder.compute_logits
    decoder.compute_logits = lambda hidden: seen.append(real(hidden)) or seen[-1]  # type: ignore[method-assign]
    output: list[int] = []
    for _ in range(num_tokens):
        ids = prompt_ids + output
        freed = (0,) if output else ()
        stepper.execute([(Running(0, ids), len(ids))], freed)
        stepper.free_pages = list(range(1, 120))
        output.append(int(np.argmax(reference(seen[-1][0].tolist(), sampling, prompt_ids, output))))
    return output


def penalised(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **settings)


SETTINGS = [
    penalised(frequency_penalty=2.0),
    penalised(frequency_penalty=-2.0, presence_penalty=2.0),
    penalised(repetition_penalty=1.9),
    penalised(repetition_penalty=0.3),
    penalised(presence_penalty=-2.0, logit_bias=((33, 1.0), (34, -100.0))),
]


def generate(stepper: Stepper, running: Running, num_tokens: int = 16, chunk: int = 7) -> list[int]:
    return stepper.generate(running, num_tokens, chunk)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_greedy_rows_take_the_penalised_logits(sampling: SamplingParams) -> None:
    ids = prompt(30)
    expected = slow_greedy(ids, 16, sampling)
    assert generate(make_stepper(4), Running(3, ids, sampling)) == expected


def test_penalties_matter() -> None:
    # else the test above could not fail
    outputs = {tuple(generate(make_stepper(4), Running(0, prompt(30), sampling))) for sampling in [*SETTINGS, penalised()]}
    assert len(outputs) >= len(SETTINGS)


def test_company_changes_nothing() -> None:
    ids = prompt(30)
    every = [*SETTINGS, penalised(), SamplingParams(temperature=1.0, repetition_penalty=1.5, min_tokens=4)]
    alone = [generate(make_stepper(4), Running(slot, ids, sampling, seed=slot)) for slot, sampling in enumerate(every)]
    stepper = make_stepper(4)
    running = [Running(slot, ids, sampling, seed=slot) for slot, sampling in enumerate(every)]
    for r in running:  # they begin one by one, while the others decode
        stepper.execute([(other, min(30, 30 - other.num_computed)) for other in running[: r.slot + 1]])
    while unfinished := [r for r in running if len(r.output_ids) < 16]:
        stepper.execute([(r, 0) for r in unfinished])
    assert [r.output_ids for r in running] == alone


@pytest.mark.parametrize("sampling", [*SETTINGS, SamplingParams(temperature=1.0, frequency_penalty=2.0, repetition_penalty=1.5)])
def test_a_resumed_request_knows_its_output(sampling: SamplingParams) -> None:
    ids = prompt(30)
    expected = generate(make_stepper(4), Running(0, ids, sampling))
    stepper = make_stepper(4)
    r = Running(0, ids, sampling)
    stepper.generate(r, 9)
    resumed = Running(5, ids + r.output_ids, sampling, output_ids=list(r.output_ids))
    stepper.execute([(resumed, 20)], freed_slots=(0,))
    assert stepper.generate(resumed, 16) == expected


@pytest.mark.parametrize("next_sampling", [penalised(), *SETTINGS])
def test_a_freed_slot_forgets(next_sampling: SamplingParams) -> None:
    """Whatever the slot held before, its next request is as in a runner of its own."""
    before = penalised(frequency_penalty=2.0, repetition_penalty=2.0, logit_bias=((7, 100.0),), min_tokens=100, max_tokens=200)
    stepper = make_stepper(4)
    stepper.generate(Running(1, prompt(20, seed=8), before), 20)
    again = Running(1, prompt(30), next_sampling)
    stepper.execute([(again, 30)], freed_slots=(1,))
    assert stepper.generate(again, 16) == generate(make_stepper(4), Running(1, prompt(30), next_sampling))


def test_a_bias_of_100_forces_and_of_minus_100_bans() -> None:
    ids = prompt(12)
    plain = generate(make_stepper(4), Running(0, ids))
    assert generate(make_stepper(4), Running(0, ids, penalised(logit_bias=((41, 100.0),)))) == [41] * 16
    banned = plain[0]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, logit_bias=((banned, -100.0),))
        assert banned not in generate(make_stepper(4), Running(0, ids, sampling))


def test_no_eos_and_no_stop_token_before_min_tokens() -> None:
    """Both are pushed by a bias, so that each would come at once, and does where nothing holds it back."""
    push = ((11, 100.0), (12, 90.0), (13, 80.0))

    def run(**settings: Any) -> list[int]:
        stepper = make_stepper(4)
        stepper.runner._adjustments._eos_token_ids = (11,)
        return generate(stepper, Running(0, prompt(9), penalised(logit_bias=push, **settings)), 8)

    assert run() == [11] * 8
    assert run(min_tokens=5, max_tokens=8) == [12] * 5 + [11] * 3
    assert run(min_tokens=5, max_tokens=8, stop_token_ids=(12,)) == [13] * 5 + [11] * 3
    # an EOS that ends nothing needs no holding back
    assert run(min_tokens=5, max_tokens=8, stop_token_ids=(12,), ignore_eos=True) == [11] * 8
    assert run(min_tokens=5, max_tokens=8, stop_token_ids=(11,), ignore_eos=True) == [12] * 5 + [11] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_gives_token_0_and_a_warning(temperature: float, caplog: pytest.LogCaptureFixture) -> None:
    every = tuple(range(VOCAB_SIZE))
    sampling = SamplingParams(temperature=temperature, min_tokens=1, stop_token_ids=every, logprobs=1)
    r = Running(0, prompt(5), sampling)
    assert generate(make_stepper(4), r, 1) == [0]
    assert "1 of 1 rows have no finite logit" in caplog.text
    assert r.logprobs[0].top[0][1] > -5.0


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    adjustments = LogitAdjustments(1, SIZE, CPU)
    with pytest.raises(AssertionError, match=r"slot 0: expected prompt ids in 0\.\.59, got 3\.\.60"):
        adjustments.put(0, request(SamplingParams(presence_penalty=1.0), [3, 60]), array("i"))
    with pytest.raises(AssertionError, match=r"slot 0: expected output ids in 0\.\.59, got -1\.\.-1"):
        adjustments.put(0, request(SamplingParams(presence_penalty=1.0), [3]), array("i", [-1]))
