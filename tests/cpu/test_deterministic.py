"""--deterministic: the bits of a text's log-probabilities do not depend on hits, chunks, the batch, retraction or threads.

Every case is answered once alone, whole and without a tree, and once by an engine that does all of that to it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from radixserve.core import Request
from radixserve.engine.build import check_deterministic
from radixserve.engine.engine import Engine
from radixserve.engine.llm import LLM
from radixserve.errors import ConfigError
from radixserve.models.packed_decoder import can_compute
from tests.support.engine_runs import Answer, make_request, run, tiny_engine

Tiny = Callable[[str, bool], Path]
NUM_WAVES, MAX_ROWS, BLOCK = 14, 16, 256
MAX_PROMPT = 1500


@dataclass(frozen=True, slots=True)
class Case:
    request: Request
    num_prompt_of_parent: int  # where the prompt repeats an earlier one and its output, the length of that prompt; else 0


@pytest.fixture(autouse=True)
def on_native_kernels() -> Iterator[None]:
    if not can_compute(torch.bfloat16):
        pytest.skip("no native products of bfloat16 here")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw_wave(
    rng: random.Random, wave: int, known: list[tuple[list[int], list[int]]], vocab_size: int = 384, longest: int = MAX_PROMPT
) -> list[Case]:
    """1 to 16 requests: new prompts, beginnings of known ones, and conversations that go on after a known answer."""
    cases = []
    for number in range(rng.choice((MAX_ROWS, MAX_ROWS, 1, rng.randint(2, 15)))):
        kind, parent = rng.random(), 0
        prompt = [rng.randrange(vocab_size) for _ in range(min(longest, int(1.06 ** rng.uniform(0, 126))))]
        if known and kind < 0.75:
            before, output = rng.choice(known[-40:])
            whole = before + output
            parent = len(before) if kind < 0.4 else 0
            kept = rng.randint(len(before) + 1, len(whole)) if parent else rng.randint(1, len(before))
            prompt = (whole[:kept] + prompt[: rng.choice((1, 7, 300))])[:longest]
        sampling: dict[str, object] = {"max_tokens": rng.randint(2, 20), "ignore_eos": True, "logprobs": 2, "temperature": 0.0}
        if rng.random() < 0.4:
            sampling |= {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.3}
        if rng.random() < 0.1:
            sampling |= {"prompt_logprobs": 1, "prompt_logprobs_start": rng.randrange(len(prompt))}
        cases.append(Case(make_request(f"{wave}-{number}", prompt, seed=wave * 100 + number, **sampling), parent))
    return cases


def said(answer: Answer) -> tuple[object, ...]:
    """float.hex shows every bit."""
    shown = [[(one.token_id, one.logprob.hex(), *one.top) for one in some] for some in (answer.logprobs, answer.prompt_logprobs)]
    return answer.token_ids, *shown


def make_busy_engine(model_dir: Path, page_size: int, deterministic: bool = True) -> Engine:
    """Small chunks, a small pool that evicts, and somebody retracted every few steps."""
    sizes = {"chunked_prefill_size": 187, "max_running_requests": MAX_ROWS, "max_total_tokens": 8_000, "page_size": page_size}
    return tiny_engine(model_dir, dtype="bfloat16", check_account_every_step=False, deterministic=deterministic, **sizes)


def make_lonely_engine(model_dir: Path) -> Engine:
    return tiny_engine(
        model_dir,
        dtype="bfloat16",
        disable_radix_cache=True,
        chunked_prefill_size=2048,
        max_total_tokens=2048,
        check_account_every_step=False,
    )


def answers_of_both(busy: Engine, alone: Engine, cases: list[Case]) -> dict[str, Answer]:
    """Together and on two threads; each as it is alone and on one, or it fails."""
    torch.set_num_threads(2)
    answers = run(busy, [case.request for case in cases])
    torch.set_num_threads(1)
    for case in cases:
        name = case.request.request_id
        lonely = run(alone, [case.request])[name]
        assert said(answers[name]) == said(lonely), (name, len(case.request.prompt_ids))
    return answers


@pytest.mark.parametrize(("family", "tie", "page_size"), [("llama", True, 1), ("qwen3", False, 16)])
def test_bits_do_not_depend_on_what_else_is_done(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, family: str, tie: bool, page_size: int
) -> None:
    """DET-02 to DET-05 in bfloat16 and bit by bit: more than 200 cases over both parameters."""
    model_dir, rng = tiny_model(family, tie), random.Random(page_size)
    alone = make_lonely_engine(model_dir)
    monkeypatch.setenv("RADIXSERVE_TEST_RETRACT", "7")
    busy = make_busy_engine(model_dir, page_size)
    known: list[tuple[list[int], list[int]]] = []
    num_cases = num_odd_hits = num_decoded_hits = 0
    for wave in range(NUM_WAVES):
        cases = draw_wave(rng, wave, known)
        answers = answers_of_both(busy, alone, cases)
        for case in cases:
            answer = answers[case.request.request_id]
            assert answer.final is not None
            num_cached = answer.final.num_cached_tokens
            num_cases += 1
            num_odd_hits += num_cached % BLOCK > 0
            num_decoded_hits += case.num_prompt_of_parent > 0 and num_cached > case.num_prompt_of_parent
            known.append((list(case.request.prompt_ids), answer.token_ids))
    stats = busy.stats()
    assert num_cases >= 100 and num_odd_hits >= 50 and num_decoded_hits >= 10
    assert stats.retracted_total >= 10 and stats.evicted_tokens_total > 0


def test_the_default_model_keeps_it_and_the_flag_costs_no_hit(default_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths, 30 layers and a vocabulary of a real model; some of the prompts go on after an earlier answer."""
    alone, rng = make_lonely_engine(default_model_dir), random.Random(37)
    monkeypatch.setenv("RADIXSERVE_TEST_RETRACT", "7")
    busy, plain = (make_busy_engine(default_model_dir, 1, deterministic=flag) for flag in (True, False))
    known: list[tuple[list[int], list[int]]] = []
    num_cached = 0
    for wave in range(2):
        cases = draw_wave(rng, wave, known, vocab_size=49_152, longest=300)[:5]
        answers = answers_of_both(busy, alone, cases)
        for name, without_flag in run(plain, [case.request for case in cases]).items():
            final, plain_final = answers[name].final, without_flag.final
            assert final is not None and plain_final is not None and final.num_cached_tokens == plain_final.num_cached_tokens
            num_cached += final.num_cached_tokens
        known += [(list(case.request.prompt_ids), answers[case.request.request_id].token_ids) for case in cases]
    assert num_cached >= 250 and busy.stats().retracted_total > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attention_backend": "torch"}, "--deterministic: expected --attention-backend cpu, got torch"),
        ({"linear_backend": "torch"}, "--deterministic: expected --linear-backend native, got torch"),
        ({"dtype": "float16"}, "--deterministic: its kernels cannot be had here: expected float32 or bfloat16, got torch.float16"),
    ],
)
def test_what_cannot_promise_it_is_refused(tiny_model: Tiny, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(tiny_model("llama", True)), device="cpu", max_total_tokens=64, deterministic=True, **options)


def test_it_refuses_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--deterministic: expected --device cpu, got cuda"):
        check_deterministic("cuda", "auto", "auto")
