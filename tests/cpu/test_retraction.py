"""RADIXSERVE_TEST_RETRACT: with somebody thrown out every few steps, every answer equals that of an undisturbed run."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from radixserve.core import FinishReason, Request
from radixserve.errors import ConfigError
from tests.support.engine_runs import Answer, is_equal_up_to_a_near_tie, make_request, run, tiny_engine

NUM_OUTPUT = 20
EOS = 2


def prompts(num_prompts: int, seed: int = 1) -> list[list[int]]:
    """3 to 150 tokens, most with a beginning in common, which ends anywhere in a page."""
    rng = random.Random(seed)
    document = [rng.randrange(384) for _ in range(150)]
    lengths = [rng.randrange(3, 150) for _ in range(num_prompts)]
    return [document[: rng.randrange(length)] + [rng.randrange(384) for _ in range(length // 3)] for length in lengths]


def mixed_requests() -> list[Request]:
    """Greedy ones, seeded samples, and settings that look at the output so far."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_OUTPUT, "logprobs": 2}
    kinds: list[dict[str, object]] = [
        greedy,
        greedy | {"prompt_logprobs": 1},
        greedy | {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5, "logprobs": None},
        {"temperature": 0.0, "max_tokens": NUM_OUTPUT, "min_tokens": 9, "logit_bias": ((EOS, 100.0),), "stop_token_ids": (EOS,)},
        {"temperature": 1.0, "top_p": 0.95, "ignore_eos": True, "max_tokens": NUM_OUTPUT, "logprobs": 0},
        {"temperature": 1.3, "top_k": 40, "frequency_penalty": 1.0, "ignore_eos": True, "max_tokens": NUM_OUTPUT},
    ]
    return [make_request(str(i), prompt, seed=i, **kinds[i % len(kinds)]) for i, prompt in enumerate(prompts(24))]


def check_equal(answers: dict[str, Answer], calm: dict[str, Answer]) -> None:
    num_ties = 0
    for number in range(24):
        answer, expected = answers[str(number)], calm[str(number)]
        kind = number % 6
        assert answer.final is not None and expected.final is not None
        if kind < 2:
            num_ties += not is_equal_up_to_a_near_tie(answer, expected)
        else:
            assert answer.token_ids == expected.token_ids, f"request {number}"
        assert answer.final.finish_reason is expected.final.finish_reason
        for mine, its in ((answer.logprobs, expected.logprobs), (answer.prompt_logprobs, expected.prompt_logprobs)):
            assert len(mine) == len(its)
            for one, other in zip(mine, its) if answer.token_ids == expected.token_ids else ():
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        if kind == 3:
            assert (len(answer.token_ids), answer.token_ids[-1], answer.final.finish_reason) == (10, EOS, FinishReason.STOP)
    assert num_ties <= 1


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("is_tree_on", [True, False], ids=["tree", "no-tree"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_answers_equal_an_undisturbed_run(
    tiny_model: Callable[[str, bool], Path], monkeypatch: pytest.MonkeyPatch, page_size: int, is_tree_on: bool, interval: int
) -> None:
    options: dict[str, object] = {
        "page_size": page_size,
        "disable_radix_cache": not is_tree_on,
        "chunked_prefill_size": 48,
        "max_running_requests": 8,
        "max_total_tokens": 1024,
    }
    model_dir = tiny_model("llama", True)
    calm = run(tiny_engine(model_dir, **options), mixed_requests())
    monkeypatch.setenv("RADIXSERVE_TEST_RETRACT", str(interval))
    engine = tiny_engine(model_dir, **options)
    answers = run(engine, mixed_requests())
    check_equal(answers, calm)
    stats = engine.stats()
    assert stats.retracted_total > 15
    assert stats.prompt_tokens_total == sum(len(prompt) for prompt in prompts(24))
    assert stats.cached_tokens_total == sum(answer.final.num_cached_tokens for answer in answers.values() if answer.final)
    assert stats.generation_tokens_total == sum(len(answer.token_ids) for answer in answers.values())


@pytest.mark.parametrize("is_tree_on", [True, False], ids=["tree", "no-tree"])
def test_answers_under_real_pressure(tiny_model: Callable[[str, bool], Path], is_tree_on: bool) -> None:
    """SCHED-01, SCHED-11: a pool that is short of room, no switch: the calm run has plenty."""
    model_dir = tiny_model("qwen3", False)
    options: dict[str, object] = {"chunked_prefill_size": 64, "max_running_requests": 8, "disable_radix_cache": not is_tree_on}
    greedy: dict[str, object] = {"temperature": 0.0, "max_tokens": 150, "logprobs": 2, "ignore_eos": True, "stop_token_ids": (380,)}
    requests = [make_request(str(i), prompt[:30], **greedy) for i, prompt in enumerate(prompts(12, seed=3))]
    calm = run(tiny_engine(model_dir, max_total_tokens=4096, **options), requests)
    engine = tiny_engine(model_dir, max_total_tokens=400, schedule_conservativeness=0.3, **options)
    pressed = run(engine, requests)
    assert sum(not is_equal_up_to_a_near_tie(pressed[name], calm[name]) for name in calm) <= 1
    assert 1 <= engine.stats().retracted_total <= 4 * len(requests)
    assert engine.stats().pool_exhausted_total == 0


def test_a_switch_that_is_no_number(tiny_model: Callable[[str, bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXSERVE_TEST_RETRACT", "often")
    with pytest.raises(ConfigError, match="RADIXSERVE_TEST_RETRACT: expected a positive number of steps, got 'often'"):
        tiny_engine(tiny_model("llama", True), max_total_tokens=64)
