"""The supervisor of the engine: whatever goes wrong in a start, tries continue, then it gives up aloud; counters outlive an engine."""

import asyncio
import os
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from radixserve.config import CacheConfig, EngineConfig
from radixserve.core import Request, SamplingParams
from radixserve.engine import questions
from radixserve.engine.client import AsyncEngine
from radixserve.engine.link import ProcessLink
from radixserve.errors import ConfigError, EngineDeadError
from radixserve.metrics import EngineStats, StepSeconds
from tests.http.conftest import Served
from tests.http.test_admin import scrape
from tests.support.byte_tokenizer import CRASH_ID
from tests.support.echo_engine import EchoEngine
from tests.support.thread_link import ThreadLink
from tests.support.waiting import until

CONFIG = EngineConfig(cache=CacheConfig(max_total_tokens=1000))
FAULTS = [OSError(11, "no processes left"), BrokenPipeError(), zmq.ZMQError(zmq.EADDRINUSE), ConfigError("TMPDIR"), AssertionError("bug")]


class BrokenLink(ThreadLink):
    def __init__(self, fault: Exception) -> None:
        super().__init__(EchoEngine(CONFIG))
        self._fault = fault

    async def start(self, config: EngineConfig, log_level: str) -> None:
        raise self._fault


def failing_links(fault: Exception, num_failing: int, in_make: bool) -> Callable[[], ThreadLink]:
    """Links that work, but for `num_failing` of them after the first."""
    made = []

    def make() -> ThreadLink:
        made.append(True)
        if not 1 < len(made) <= 1 + num_failing:
            return ThreadLink(EchoEngine(CONFIG))
        if in_make:
            raise fault
        return BrokenLink(fault)

    return make


async def kill(engine: AsyncEngine) -> None:
    async for output in engine.submit(Request("crash", array("i", [CRASH_ID]))):
        assert output.error is not None


@pytest.mark.parametrize("in_make", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_a_start_that_fails_counts_as_a_try(fault: Exception, in_make: bool) -> None:
    engine = await AsyncEngine.start(CONFIG, make_link=failing_links(fault, 2, in_make))
    await kill(engine)
    await until(lambda: engine.is_alive)
    assert engine.num_restarts == 3
    (output,) = [output async for output in engine.submit(Request("r", array("i", [97]), SamplingParams(max_tokens=1)))]
    assert output.token_ids == (97,)
    await engine.stop()


@pytest.mark.parametrize("in_make", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_when_no_start_works_it_gives_up(fault: Exception, in_make: bool) -> None:
    engine = await AsyncEngine.start(CONFIG, make_link=failing_links(fault, 100, in_make))
    await kill(engine)
    async with asyncio.timeout(5):
        await engine.wait_given_up()
    assert engine.num_restarts == 3
    with pytest.raises(EngineDeadError, match="not running"):
        engine.submit(Request("r", array("i", [97])))
    await engine.stop()


async def test_a_supervisor_that_fails_itself_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await AsyncEngine.start(CONFIG, make_link=lambda: ThreadLink(EchoEngine(CONFIG)))

    async def fail() -> bool:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine, "_restart", fail)
    await kill(engine)
    async with asyncio.timeout(5):
        await engine.wait_given_up()
    await engine.stop()


@pytest.mark.parametrize("in_make", [False, True])
async def test_a_first_start_that_the_system_refuses_is_one_sentence(in_make: bool) -> None:
    def make() -> ThreadLink:
        if in_make:
            raise OSError(11, "no processes left")
        return BrokenLink(OSError(11, "no processes left"))

    with pytest.raises(EngineDeadError, match=r"the engine process could not be started: .*no processes left"):
        await AsyncEngine.start(CONFIG, make_link=make)


async def test_a_command_that_does_not_exist_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineDeadError, match=r"could not be started: .*no-such-command"):
        await AsyncEngine.start(CONFIG, make_link=lambda: ProcessLink(["/no-such-command"]))
    assert os.listdir(tmp_path) == []


async def test_a_process_that_ends_before_it_is_told_anything_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deaf = [sys.executable, "-c", "import os; os.close(0); os._exit(4)"]
    with pytest.raises(EngineDeadError, match="ended with status 4"):
        await AsyncEngine.start(EngineConfig("/" + "x" * 2_000_000), make_link=lambda: ProcessLink(deaf))  # more than a pipe holds
    assert os.listdir(tmp_path) == []


async def test_counters_outlive_an_engine_and_gauges_do_not(served: Served) -> None:
    await served.complete(prompt="abcd", max_tokens=3)
    before = await scrape(served)
    await served.complete(prompt="<crash>")
    dead = served.engine.last_stats
    assert (dead.num_running, dead.num_waiting, dead.pool_tokens, dead.private_tokens) == (0, 0, 0, 0)
    await until(lambda: served.engine.is_alive)
    between = await scrape(served)
    await served.complete(prompt="abcd", max_tokens=3)
    after = await scrape(served)
    for earlier, later in ((before, between), (between, after)):
        assert [name for name, value in earlier.items() if name.endswith("_total") and later[name] < value] == []
    assert (before["sglang:generation_tokens_total"], after["sglang:generation_tokens_total"]) == (3, 6)
    assert after["radixserve_step_seconds_total/send"] > before["radixserve_step_seconds_total/send"] > 0


@pytest.mark.parametrize("step_s", [0.01], indirect=True)
async def test_a_dead_engine_shows_no_running_request(served: Served) -> None:
    running = asyncio.create_task(served.complete(prompt="abc", max_tokens=900))
    await until(lambda: served.echo.running_ids)
    assert (await served.engine.stats()).num_running == 1
    await kill(served.engine)
    assert served.engine.last_stats.num_running == 0
    assert (await running).status_code == 503


def test_counters_are_all_that_is_added() -> None:
    dead = EngineStats(num_running=3, pool_tokens=9, requests_total=5, prefill_step_seconds=1.0, step_seconds=StepSeconds(tree=2.0))
    new = EngineStats(
        num_running=1, pool_tokens=8, requests_total=2, prefill_step_seconds=0.5, step_seconds=StepSeconds(tree=1.0, send=1.0)
    )
    expected = EngineStats(
        num_running=1, pool_tokens=8, requests_total=7, prefill_step_seconds=1.5, step_seconds=StepSeconds(tree=3.0, send=1.0)
    )
    assert new.plus_counters_of(dead.without_gauges()) == expected
    assert dead.without_gauges().num_running == dead.without_gauges().pool_tokens == 0


async def test_an_engine_that_dies_while_the_server_drains_is_the_last() -> None:
    engine = await AsyncEngine.start(CONFIG, make_link=lambda: ThreadLink(EchoEngine(CONFIG)))
    engine.replace_no_more()
    await kill(engine)
    async with asyncio.timeout(5):
        await engine.wait_given_up()
    assert engine.num_restarts == 0
    await engine.stop()


async def test_a_flush_keeps_its_timeout_when_the_engine_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = EchoEngine(CONFIG)
    engine = await AsyncEngine.start(CONFIG, make_link=lambda: ThreadLink(echo))
    goes_on = threading.Event()
    monkeypatch.setattr(echo, "flush_cache", lambda: goes_on.wait(20))
    monkeypatch.setattr(questions, "MIN_FLUSH_ANSWER_S", 0.05)
    async with asyncio.timeout(5):
        assert not await engine.flush_cache(0.1)
        assert not await engine.flush_cache()
    goes_on.set()
    assert await engine.flush_cache(5.0)
    await engine.stop()
