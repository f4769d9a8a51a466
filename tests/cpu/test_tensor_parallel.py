"""--tp-size with real processes: answers equal those of one process, and no rank that ends, or cannot start, leaves anybody waiting."""

import gc
import io
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from unittest.mock import MagicMock

import psutil
import pytest

from radixserve.config import EngineConfig
from radixserve.core import IntArray, ScheduledBatch, StepOutput
from radixserve.engine.engine import Engine
from radixserve.engine.tp import messages, worker
from radixserve.engine.tp.lead import LeadRunner
from radixserve.engine.tp.workers import Workers
from radixserve.errors import ConfigError, EngineDeadError
from radixserve.runner.model_runner import ModelRunner
from tests.cpu.test_retraction import check_equal, mixed_requests
from tests.support.engine_runs import is_equal_up_to_a_near_tie, make_request, run, tiny_engine
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
Tiny = Callable[[str, bool], Path]
GREEDY: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16, "logprobs": 2}


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes of ranks 1, 2, ..., in this order."""
    return sorted((child for child in process.children() if "radixserve.engine.tp.worker" in child.cmdline()), key=lambda one: one.pid)


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()  # an engine that raised is held by its traceback
    assert ranks_of(psutil.Process()) == []


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_answers_equal_those_of_one_process(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    """Tree on, prompts in chunks, somebody retracted every third step; greedy, sampled, penalised, scored. The account is recounted."""
    options: dict[str, object] = {
        "page_size": 16,
        "chunked_prefill_size": 48,
        "max_running_requests": 8,
        "max_total_tokens": 1024,
        "attention_backend": attention,
    }
    model_dir = tiny_model("llama", True)
    alone = run(tiny_engine(model_dir, **options), mixed_requests())
    monkeypatch.setenv("RADIXSERVE_TEST_RETRACT", "3")
    engine = tiny_engine(model_dir, tp_size=2, **options)
    assert (engine.info.tp_size, engine.info.attention_backend, engine.info.linear_backend) == (2, attention, "torch")
    check_equal(run(engine, mixed_requests()), alone)
    stats = engine.stats()
    assert stats.retracted_total > 15
    assert stats.cached_tokens_total > 0
    assert (stats.free_tokens + stats.evictable_tokens, stats.locked_tokens, stats.private_tokens) == (1024, 0, 0)


def test_the_default_model_on_three_ranks(default_model_dir: Path) -> None:
    """9 query heads and 3 KV heads; the second round is a hit."""
    document = list(range(1000, 1150))
    requests = [make_request(str(i), [*document[: 60 + 30 * i], i + 5, 99], **(GREEDY | {"max_tokens": 5})) for i in range(3)]
    options: dict[str, object] = {"chunked_prefill_size": 80, "max_running_requests": 4, "max_total_tokens": 512}
    alone = tiny_engine(default_model_dir, linear_backend="torch", **options)
    expected = run(alone, requests)
    engine = tiny_engine(default_model_dir, tp_size=3, **options)
    assert engine.info.pool_size_bytes == pytest.approx(alone.info.pool_size_bytes)
    for _ in range(2):
        answers = run(engine, requests)
        assert sum(not is_equal_up_to_a_near_tie(answers[name], expected[name]) for name in expected) <= 1
    assert engine.stats().cached_tokens_total >= 60 + 90 + 120


def test_more_scored_tokens_than_have_logits_at_once(tiny_model: Tiny) -> None:
    """Every rank takes part in each piece."""
    request = make_request("scored", [7 * i % 384 for i in range(300)], **(GREEDY | {"max_tokens": 2, "prompt_logprobs": 1}))
    answers = [run(tiny_engine(tiny_model("llama", True), tp_size=size, max_total_tokens=512), [request])["scored"] for size in (1, 2)]
    alone, together = ([one.logprob for one in answer.prompt_logprobs] for answer in answers)
    assert len(alone) == 299
    assert together == pytest.approx(alone, abs=1e-3)


def test_a_killed_rank_ends_a_step_and_an_idle_engine(tiny_model: Tiny) -> None:
    request = make_request("long", [5, 6, 7], **(GREEDY | {"max_tokens": 500}))
    for is_idle in (False, True):
        engine = tiny_engine(tiny_model("llama", True), tp_size=2, max_total_tokens=1024)
        (rank,) = ranks_of(psutil.Process())
        assert rank.num_threads() > 1
        engine.check_idle()
        if not is_idle:
            engine.add(request)
            for _ in range(5):
                engine.step()
        rank.kill()
        with pytest.raises(EngineDeadError, match="the process of tensor-parallel rank 1 ended by signal SIGKILL"):
            check_until_it_raises(engine) if is_idle else run(engine, [])
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.check_idle()
        del engine


def check_until_it_raises(engine: Engine) -> None:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        engine.check_idle()
        time.sleep(0.01)


def test_a_rank_looks_for_cycles_as_seldom_as_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first step on. What a rank is made of is left out."""
    nothing = MagicMock()
    for name in ("load_model_config", "rank_device", "RankGroup", "load_rank", "make_attention_backend", "attention_options"):
        monkeypatch.setattr(worker, name, nothing)
    monkeypatch.setattr(worker, "affordable_pages", lambda *args: 4)
    monkeypatch.setattr(worker, "allocate", lambda *args: (nothing, nothing))
    monkeypatch.setattr(worker, "spare_pauses", lambda: done.append("spare_pauses"))
    done: list[str] = []
    nothing.execute = lambda batch, decode_ids: done.append("step")
    monkeypatch.setattr(worker, "ShardRunner", lambda *args: nothing)
    step = messages.Step(ScheduledBatch(0, ()), array("i"))
    orders = io.BytesIO(b"".join(map(messages.encode, (messages.Allocate(4, "torch"), step, step))))
    setup = MagicMock(config=EngineConfig(), model_path="model", directory="directory")
    worker._follow(setup, orders, io.BytesIO())
    assert done == ["spare_pauses", "step", "step"]


def test_a_step_in_which_a_rank_ended_gives_no_tokens() -> None:
    """NCCL's collectives, once aborted, end without an error: the step comes to its end with numbers that are no sum."""
    has_ended = False

    class Ranks:
        def check(self) -> None:
            if has_ended:
                raise EngineDeadError("a rank has ended")

        def send_step(self, batch: ScheduledBatch, decode_ids: IntArray) -> None: ...

    class Runner:
        def execute(self, batch: ScheduledBatch) -> StepOutput:
            nonlocal has_ended
            has_ended = batch.step == 2
            return StepOutput(batch.step, ())

    runner = LeadRunner(cast(ModelRunner, Runner()), cast(Workers, Ranks()), 1)
    assert runner.execute(ScheduledBatch(1, ())).step == 1
    with pytest.raises(EngineDeadError, match="has ended"):
        runner.execute(ScheduledBatch(2, ()))


def test_an_error_of_rank_0_ends_the_others(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(tiny_model("llama", True), tp_size=2, max_total_tokens=1024)
    engine.add(make_request("a", [5, 6, 7], **GREEDY))
    monkeypatch.setattr(engine._pipeline.runner._runner._attention, "plan", lambda batch: 1 / 0)  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(EngineDeadError, match="ended after an error of rank 0"):
        engine.check_idle()


FAILING = """
import sys
from radixserve.engine.tp import worker
from radixserve.errors import WeightError
def fail(*_): raise WeightError("q_proj: missing")
worker.load_rank = fail
sys.exit(worker.main())
"""


@pytest.mark.parametrize(
    ("command", "kind", "sentence"),
    [
        ((sys.executable, "-c", FAILING), ConfigError, "tensor-parallel rank 1: q_proj: missing"),
        ((sys.executable, "-c", "raise SystemExit(7)"), EngineDeadError, "the process of tensor-parallel rank 1 ended with status 7"),
    ],
    ids=["an-error", "an-exit"],
)
def test_a_rank_that_cannot_start_gives_its_error(tiny_model: Tiny, command: tuple[str, ...], kind: type[Exception], sentence: str) -> None:
    config = EngineConfig(tp_size=2, dtype="float32", device="cpu", context_length=64)
    with pytest.raises(kind, match=sentence):
        Workers(config, str(tiny_model("llama", True)), command).wait_loaded()


LONE = """
import sys, time
from radixserve import LLM
llm = LLM(sys.argv[1], tp_size=2, dtype="float32", device="cpu", max_total_tokens=256)
print(llm.generate([[5, 6, 7]])[0].num_prompt_tokens, flush=True)
time.sleep(100)
"""


async def test_ranks_end_with_a_process_that_is_killed(tiny_model: Tiny) -> None:
    command = [sys.executable, "-c", LONE, str(tiny_model("llama", True))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)  # noqa: ASYNC220 - nothing else runs here
    assert process.stdout is not None
    assert process.stdout.readline() == b"3\n"
    (rank,) = ranks_of(psutil.Process(process.pid))
    rank.suspend()  # nothing of its own runs any more
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    await until(lambda: is_gone(rank))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tp_size": 4}, "--tp-size: expected a divisor of the model's num_key_value_heads, which is 2, got 4"),
        ({"tp_size": 0}, "--tp-size: expected at least 1, got 0"),
        ({"tp_size": 2, "linear_backend": "native"}, "--linear-backend native: expected --tp-size 1, got 2"),
        ({"tp_size": 2, "quantization": "int8"}, "--quantization int8: expected --tp-size 1, got 2"),
        ({"tp_size": 2, "deterministic": True}, "--deterministic: expected --tp-size 1, got 2"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(tiny_model: Tiny, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny_engine(tiny_model("llama", True), **options)
