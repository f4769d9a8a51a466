"""--overlap-schedule on: every answer is that of one step after the other, token by token, and with the native kernels bit by bit."""

import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from radixserve.core import FinishReason, Request, SamplingParams, ScheduledBatch, StepOutput
from radixserve.engine.build import resolve_overlap
from radixserve.engine.engine import Engine
from radixserve.engine.llm import LLM
from radixserve.engine.pipeline import OneByOne, Overlapped
from radixserve.errors import ConfigError
from radixserve.models.packed_decoder import can_compute
from tests.cpu.test_deterministic import said
from tests.support.engine_runs import Answer, make_request, tiny_engine

Tiny = Callable[[str, bool], Path]
EOS = 2
NUM_REQUESTS = 60
# greedy with log-probabilities, scoring, penalties, a bias towards EOS after some tokens, seeded samples, filters; one token, or none
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5, "logprobs": 0},
    {"temperature": 0.0, "min_tokens": 9, "max_tokens": 20, "logit_bias": ((EOS, 100.0),), "stop_token_ids": (EOS,)},
    {"temperature": 1.0, "top_p": 0.95, "logprobs": 0},
    {"temperature": 1.3, "top_k": 40, "frequency_penalty": 1.0},
    {"temperature": 0.0, "max_tokens": 1, "logprobs": 1},
    {"temperature": 0.0, "max_tokens": 0, "prompt_logprobs": 0},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, 384, 11))},
]


@pytest.fixture(autouse=True)
def on_native_kernels() -> None:
    if not can_compute(torch.bfloat16):
        pytest.skip("no native products of bfloat16 here: bits would depend on what is beside a row")


def random_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    documents = [[rng.randrange(384) for _ in range(150)] for _ in range(3)]
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = rng.choice(documents)[: rng.randrange(150)] + [rng.randrange(384) for _ in range(rng.randrange(1, 30))]
        made = make_request(str(number), prompt, seed=number, **({"max_tokens": rng.randrange(2, 40)} | KINDS[number % len(KINDS)]))
        requests.append(Request(made.request_id, made.prompt_ids, made.sampling, made.seed, priority=rng.choice((0, 0, 3, 30))))
    return requests


def run_with_clients(engine: Engine, requests: list[Request], seed: int) -> tuple[dict[str, Answer], dict[str, int]]:
    """They come bit by bit; some are aborted, some end at a stop string found in what was sent: where those were cut."""
    rng, answers = random.Random(seed), {}
    waiting, cut_at = list(requests), {}
    num_steps = num_ahead = 0
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.4:
            answers[waiting[-1].request_id] = Answer()
            engine.add(waiting.pop())
        for name, answer in answers.items():
            if answer.final is None and rng.random() < 0.01:
                engine.abort(name)
        for output in engine.step():
            answer = answers[output.request_id]
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            assert answer.final is None
            answer.final = output if output.is_final else None
            if not output.is_final and output.num_output_tokens > 4 and output.request_id not in cut_at and rng.random() < 0.02:
                cut_at[output.request_id] = output.num_output_tokens - rng.randrange(3)
                engine.finish(output.request_id, cut_at[output.request_id])
        num_steps += 1
        num_ahead += bool(engine._under_way)
    assert num_ahead > num_steps // 3, f"{num_ahead} of {num_steps} steps were planned ahead"
    return answers, cut_at


@pytest.mark.parametrize("interval", [None, 5])
@pytest.mark.parametrize("is_tree_on", [True, False], ids=["tree", "no-tree"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_bits_are_those_of_one_step_after_the_other(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, page_size: int, is_tree_on: bool, interval: int | None
) -> None:
    model_dir, requests = tiny_model("llama", True), random_requests(page_size)
    options = {"page_size": page_size, "disable_radix_cache": not is_tree_on, "dtype": "bfloat16", "deterministic": True}
    calm_engine = tiny_engine(model_dir, max_total_tokens=8192, overlap_schedule="off", **options)
    calm: dict[str, Answer] = {}
    for one in requests:
        calm_engine.add(one)
        calm[one.request_id] = Answer()
    while calm_engine.has_work:
        for output in calm_engine.step():
            calm[output.request_id].take(output)
    if interval is not None:
        monkeypatch.setenv("RADIXSERVE_TEST_RETRACT", str(interval))
    small = {"max_total_tokens": 900, "chunked_prefill_size": 48, "max_running_requests": 8, "schedule_conservativeness": 0.3}
    engine = tiny_engine(model_dir, overlap_schedule="on", priority_scheduling_preemption_threshold=2, **small, **options)
    answers, cut_at = run_with_clients(engine, requests, seed=page_size)
    num_sent = 0
    for name, answer in answers.items():
        expected, final = calm[name], answer.final
        assert final is not None and expected.final is not None
        tokens, logprobs, prompt_logprobs = said(answer)
        whole_tokens, whole_logprobs, whole_prompt = said(expected)
        if final.finish_reason is FinishReason.ABORT or (name in cut_at and final.stop_token_id is None):
            n = len(answer.token_ids)
            assert (tokens, logprobs) == (whole_tokens[:n], whole_logprobs[:n]), name  # type: ignore[index]
            assert final.num_output_tokens in (n, cut_at.get(name))
        else:
            assert (tokens, logprobs, prompt_logprobs) == (whole_tokens, whole_logprobs, whole_prompt), name
            assert (final.finish_reason, final.num_output_tokens) == (expected.final.finish_reason, len(answer.token_ids))
        num_sent += len(answer.token_ids)
    stats = engine.stats()
    assert stats.generation_tokens_total == num_sent
    assert stats.locked_tokens == stats.private_tokens == 0
    assert stats.aborted_total and cut_at
    assert stats.retracted_total >= (10 if interval else 0)
    assert engine.flush_cache()
    engine.check_idle()


def test_stop_strings_and_usage(tiny_model: Tiny) -> None:
    """Through LLM, whose detokenizer finds them: text, tokens and reason are the same, and the pool comes back whole."""
    model_dir = str(tiny_model("llama", True))
    prompts = [[number, number + 1, number + 2] for number in range(20, 60)]
    sampling = SamplingParams(temperature=0.0, max_tokens=60, stop=("e", "th", "a ", "1"))
    llms = [LLM(model_dir, dtype="float32", device="cpu", max_total_tokens=2048, overlap_schedule=how) for how in ("off", "on")]
    plain, overlapped = ([(one.text, one.token_ids, one.finish_reason) for one in llm.generate(prompts, sampling)] for llm in llms)
    assert plain == overlapped
    assert sum(reason is FinishReason.STOP for _, _, reason in plain) > 5
    engine = llms[1].engine
    assert engine.flush_cache() and engine.stats().free_tokens == 2048
    assert plain == [(one.text, one.token_ids, one.finish_reason) for one in llms[1].generate(prompts, sampling)], "and again"


def test_a_flush_right_behind_an_answer(tiny_model: Tiny) -> None:
    """ABORT-07, ABORT-08: a request that ended at a stop token leaves a row under way; whoever has its answer may flush at once."""
    engine = tiny_engine(tiny_model("llama", True), max_total_tokens=512, overlap_schedule="on")
    num_under_way = 0
    for number in range(100):
        stops = tuple(range(number % 3, 384, 3))
        engine.add(make_request(str(number), [5, 6, 7 + number], max_tokens=30, temperature=0.0, stop_token_ids=stops))
        while not any(output.is_final for output in engine.step()):
            pass
        num_under_way += bool(engine._under_way)
        assert engine.flush_cache()
        assert engine.stats().free_tokens == 512 and not engine.has_work
    assert num_under_way > 50


def test_a_flush_beside_others_is_refused_and_loses_nothing(tiny_model: Tiny) -> None:
    engine = tiny_engine(tiny_model("llama", True), max_total_tokens=512, overlap_schedule="on")
    engine.add(make_request("a", [5, 6, 7], max_tokens=12, temperature=0.0, ignore_eos=True))
    answer = Answer()
    while engine.has_work:
        for output in engine.step():
            answer.take(output)
        assert engine.flush_cache() == (engine.stats().num_running == 0)  # the news of its end may come with the next step
    assert answer.final is not None and len(answer.token_ids) == 12


def test_steps_do_overlap(tiny_model: Tiny) -> None:
    """The next step is planned while this one runs: its batch is there before the answer was taken."""
    engine = tiny_engine(tiny_model("llama", True), max_total_tokens=512, overlap_schedule="on")
    engine.add(make_request("a", [5, 6, 7], max_tokens=6, temperature=0.0, ignore_eos=True))
    under_way = []
    while engine.has_work:
        engine.step()
        under_way.append(len(engine._under_way))
    assert under_way == [1, 1, 1, 1, 1, 0], "one step beyond the one that was answered, and none for a token that is not wanted"


def test_a_profile_has_its_steps_one_by_one(tiny_model: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    engine = tiny_engine(tiny_model("llama", True), max_total_tokens=512, overlap_schedule="on", profile_steps=3)
    engine.add(make_request("a", [5, 6, 7], max_tokens=9, temperature=0.0, ignore_eos=True))
    for _ in range(3):
        engine.step()
        assert not engine._under_way
    assert "decode steps" in capfd.readouterr().err
    engine.step()
    assert engine._under_way


def test_auto_is_on_where_the_device_is_no_cpu(tiny_model: Tiny) -> None:
    assert [resolve_overlap("auto", device) for device in ("cpu", "cuda")] == ["off", "on"]
    assert resolve_overlap("auto", "cuda", num_ranks=2) == "off"
    with pytest.raises(ConfigError, match="--overlap-schedule on: expected one rank, got 2"):
        resolve_overlap("on", "cuda", num_ranks=2)
    assert isinstance(tiny_engine(tiny_model("llama", True), max_total_tokens=64)._pipeline, OneByOne)


def runner_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "runner"]


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    before = len(runner_threads())
    yield
    for _ in range(100):
        gc.collect()
        if len(runner_threads()) <= before:
            return
        time.sleep(0.02)
    raise AssertionError("a runner's thread outlives its engine")


def test_the_thread_ends_with_its_engine(tiny_model: Tiny, no_thread_stays: None) -> None:
    engine = tiny_engine(tiny_model("llama", True), max_total_tokens=64, overlap_schedule="on")
    engine.add(make_request("a", [5, 6, 7], max_tokens=3))
    engine.step()
    assert runner_threads()


LAST_WORDS = """
import sys
from radixserve.core import SamplingParams
from radixserve.engine.llm import LLM
llm = LLM(sys.argv[1], device="cpu", max_total_tokens=2048, overlap_schedule="on")
sampling = SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=tuple(range(0, 384, 3)))
llm.generate([[5, 6, 7]], sampling, show_progress=False)
assert llm.engine._under_way
"""


def test_a_process_may_end_while_a_step_is_under_way(tiny_model: Tiny) -> None:
    """A thread that is in native code when the interpreter goes away brings the process down."""
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", LAST_WORDS, str(tiny_model("llama", True))], capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (0, "")


class _Done:
    def __init__(self, step: int) -> None:
        self._step = step

    def result(self) -> StepOutput:
        return StepOutput(self._step, ())


def test_what_a_step_raises_comes_to_whoever_collects_it_and_nothing_runs_behind_it(no_thread_stays: None) -> None:
    launched = []

    def launch(batch: ScheduledBatch) -> _Done:
        launched.append(batch.step)
        if batch.step == 2:
            raise MemoryError("none left")
        return _Done(batch.step)

    pipeline = Overlapped(launch)
    pipeline.submit(ScheduledBatch(1, ()))
    pipeline.submit(ScheduledBatch(2, ()))
    assert pipeline.collect().step == 1
    pipeline.submit(ScheduledBatch(3, ()))
    for _ in range(2):
        with pytest.raises(MemoryError, match="none left"):
            pipeline.collect()
    assert launched == [1, 2]


def test_without_overlap_too_every_call_says_why_a_step_failed() -> None:
    class Failing:
        num_calls = 0

        def execute(self, batch: ScheduledBatch) -> StepOutput:
            self.num_calls += 1
            raise MemoryError("none left")

    runner = Failing()
    pipeline = OneByOne(runner)
    pipeline.submit(ScheduledBatch(1, ()))
    for _ in range(2):
        with pytest.raises(MemoryError, match="none left"):
            pipeline.collect()
    assert (len(pipeline), runner.num_calls) == (1, 1)


def test_a_step_that_fails_while_it_is_waited_for_is_the_last_one(no_thread_stays: None) -> None:
    """As a GPU's steps do: their launch returns before they run."""

    class Failing:
        def result(self) -> StepOutput:
            raise RuntimeError("illegal memory access")

    pipeline = Overlapped(lambda batch: Failing() if batch.step == 1 else _Done(batch.step))
    pipeline.submit(ScheduledBatch(1, ()))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            pipeline.collect()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pipeline.submit(ScheduledBatch(2, ()))
