"""/health, /flush_cache, /metrics, and what they say when the engine is busy, dead, or the server drains."""

import asyncio
import dataclasses
import re
import threading
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixserve.config import ServerConfig
from radixserve.core import Request
from radixserve.engine import client, questions
from radixserve.engine.progress import Progress
from radixserve.errors import ConfigError, QueueFullError
from radixserve.metrics import EngineStats
from radixserve.server import control
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.http.conftest import Served
from tests.support.live_server import live_app, send_request
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


async def scrape(served: Served) -> dict[str, float]:
    """Samples by name, with the label `part` where there is one."""
    reply = await served.http.get("/metrics")
    assert reply.status_code == 200
    return {
        sample.name + (f"/{sample.labels['part']}" if "part" in sample.labels else ""): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
        if "le" not in sample.labels
    }


async def test_health(served: Served) -> None:
    assert (await served.http.get("/health")).status_code == 200
    assert (await served.http.head("/health")).status_code == 200


async def test_metrics_count_tokens_once_and_by_the_engines_figures(served: Served) -> None:
    for _ in range(2):
        await served.complete(prompt="a long prompt", max_tokens=4)
    samples = await scrape(served)
    assert samples["sglang:num_requests_total"] == 2
    assert samples["sglang:prompt_tokens_total"] == 26
    assert samples["sglang:cached_tokens_total"] == 12
    assert samples["sglang:generation_tokens_total"] == 8
    assert samples["sglang:max_total_num_tokens"] == 10_000
    assert samples["sglang:num_running_reqs"] == 0
    assert samples["sglang:time_to_first_token_seconds_count"] == 2
    assert samples["sglang:inter_token_latency_seconds_count"] == 6
    assert samples["sglang:e2e_request_latency_seconds_count"] == 2
    assert samples["sglang:queue_time_seconds_count"] == 2
    assert samples["radixserve_engine_up"] == 1
    assert samples["radixserve_step_seconds_total/send"] > 0
    assert samples["radixserve_step_seconds_total/forward"] == 0
    assert (await served.http.head("/metrics")).status_code == 200
    assert (await served.http.head("/metrics")).content == b""


async def test_unknown_paths_make_no_new_series(served: Served) -> None:
    await served.http.get("/random")
    before = (await scrape(served)).keys()
    for number in range(50):
        await served.http.get(f"/random/{number}")
    assert (await scrape(served)).keys() == before


@pytest.mark.parametrize("step_s", [0.01], indirect=True)
async def test_flush_is_refused_while_busy_and_waits_when_told(served: Served) -> None:
    running = asyncio.create_task(served.complete(prompt="abc", max_tokens=30))
    await until(lambda: served.echo.running_ids)
    refused = await served.http.post("/flush_cache?timeout=0")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "engine_busy"
    assert (await served.http.post("/flush_cache?timeout=30")).status_code == 200
    assert running.done() or (await running).status_code == 200


@pytest.mark.parametrize("timeout_s", ["x", "-1", "nan", "1e9"])
async def test_flush_timeout_is_checked(served: Served, timeout_s: str) -> None:
    reply = await served.http.post(f"/flush_cache?timeout={timeout_s}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "timeout"


async def test_a_draining_server_refuses_new_work_and_reports_it(served: Served) -> None:
    served.app.state.context.gate.close()
    answers = [await served.http.get(path) for path in ("/health", "/flush_cache")]
    for reply in (await served.complete(prompt="a"), await served.http.post("/flush_cache"), *answers):
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "shutting_down"
    assert (await served.http.get("/metrics")).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_step_that_raises_is_an_answer_for_all_and_a_new_engine(served: Served, is_stream: bool) -> None:
    reply, other = await asyncio.gather(
        served.complete(prompt="x<crash>", stream=is_stream), served.complete(prompt="other", max_tokens=900)
    )
    for answer in (reply, other):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert answer.json()["error"]["message"] == "the engine failed; see its log"
    await until(lambda: served.engine.is_alive)
    assert (await served.http.get("/health")).status_code == 200
    assert (await served.complete(prompt="a")).status_code == 200
    assert (await scrape(served))["radixserve_engine_restarts_total"] == 1


async def test_the_fourth_death_in_ten_minutes_is_the_last(served: Served) -> None:
    for deaths in range(1, 5):
        assert (await served.complete(prompt="<crash>")).status_code == 503
        if deaths < 4:
            await until(lambda: served.engine.is_alive)
    async with asyncio.timeout(5):
        await served.engine.wait_given_up()
    assert (await served.http.get("/health")).status_code == 503
    assert (await served.complete(prompt="a")).json()["error"]["code"] == "engine_dead"
    assert (await served.http.get("/metrics")).status_code == 200


async def test_the_account_is_recounted_once_idle(served: Served) -> None:
    await served.complete(prompt="a")
    await until(lambda: served.echo.num_idle_checks)
    await asyncio.sleep(1.2)
    assert served.echo.num_idle_checks == 1


async def test_docs_name_every_metric_and_no_other(served: Served) -> None:
    await served.complete(prompt="abc", max_tokens=2)
    reply = await served.http.get("/metrics")
    # an info is a gauge of value 1 in this format
    served_types = {
        line.split()[2]: "info" if line.split()[2].endswith("_info") else line.split()[3]
        for line in reply.text.splitlines()
        if line.startswith("# TYPE")
    }
    rows = [line.split("|") for line in (ROOT / "docs/metrics.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    documented = {name: row[2].strip() for row in rows for name in re.findall("`([^`]+)`", row[1])}
    assert served_types == documented


@pytest.mark.parametrize("is_asked", [False, True])
async def test_requests_are_logged_where_asked_for(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, is_asked: bool) -> None:
    """One line per answer, also for a refusal, without prompts and keys, and without line breaks of a client's."""
    caplog.set_level("INFO", "radixserve.server")
    async with live_app(tokenizer, ServerConfig(log_requests=is_asked)) as live, httpx.AsyncClient(base_url=live.url) as http:
        for _ in range(2):
            body = {"prompt": "a secret", "max_tokens": 4, "n": 2}
            await http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        await http.post("/v1/completions", json={"prompt": ""}, headers={"x-request-id": "bad"})
        await http.get("/no%0Apath?key=secret", headers={"x-request-id": "lost"})
    lines = [re.sub(r"\d+\.\d{3} s", "T s", record.message) for record in caplog.records if record.message.startswith("request ")]
    expected = [
        "request mine POST /v1/completions 200 T s, prompt 8 tokens, 0 of them cached, output 8",
        "request mine POST /v1/completions 200 T s, prompt 8 tokens, 7 of them cached, output 8",
        "request bad POST /v1/completions 400 T s",
        "request lost GET /no?path 404 T s",
    ]
    assert lines == (expected if is_asked else [])
    assert "secret" not in caplog.text


async def test_every_counter_of_the_engine_is_exported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [spec.name for spec in dataclasses.fields(EngineStats) if spec.name.endswith(("_total", "_step_seconds"))]
    stats = EngineStats(**{name: 1_000_003 + number for number, name in enumerate(names)})
    monkeypatch.setattr(served.echo, "stats", lambda: stats)
    values = set((await scrape(served)).values())
    assert [name for name in names if getattr(stats, name) not in values] == []


async def test_every_metric_has_samples_before_the_first_request(served: Served) -> None:
    samples = await scrape(served)
    assert samples["vllm:prefix_cache_queries_total"] == samples["sglang:cache_hit_rate"] == 0
    await served.complete(prompt="0123456789", max_tokens=1)
    await served.complete(prompt="0123456789", max_tokens=1)
    samples = await scrape(served)
    assert (samples["vllm:prefix_cache_queries_total"], samples["vllm:prefix_cache_hits_total"]) == (20, 9)
    assert samples["sglang:cache_hit_rate"] == 9 / 20
    assert samples["vllm:time_to_first_token_seconds_count"] == samples["sglang:generation_tokens_histogram_count"] == 2
    assert samples["sglang:prompt_tokens_histogram_sum"] == 20


async def test_health_turns_red_when_nothing_moves_and_green_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """OPS-03: a loop that is alive, answers questions and moves nothing."""
    monkeypatch.setattr(client, "WATCH_INTERVAL_S", 0.05)
    context = served.app.state.context
    context.config = dataclasses.replace(context.config, stall_timeout_s=0.4)
    step = served.echo.step
    monkeypatch.setattr(served.echo, "step", lambda: time.sleep(0.005) or [])
    asking = asyncio.create_task(served.complete(prompt="abc", max_tokens=1))
    await asyncio.sleep(0.2)
    assert (await served.http.get("/health")).status_code == 200
    await asyncio.sleep(0.4)
    stalled = await served.http.get("/health")
    assert (stalled.status_code, stalled.json()["error"]["code"]) == (503, "engine_stalled")
    assert stalled.headers["retry-after"]
    monkeypatch.setattr(served.echo, "step", step)
    assert (await asking).status_code == 200
    assert (await served.http.get("/health")).status_code == 200
    await asyncio.sleep(0.5)  # idle is no stall
    assert (await served.http.get("/health")).status_code == 200


class FullEcho:
    """Makes an EchoEngine refuse or starve whatever comes while its first request runs."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch, is_refusing: bool) -> None:
        self._add, self._is_refusing = served.echo.add, is_refusing
        monkeypatch.setattr(served.echo, "add", self.add)

    def add(self, request: Request) -> None:
        if request.request_id.startswith("HEALTH_CHECK"):
            if self._is_refusing:
                raise QueueFullError("1 request waits already")
        else:
            self._add(request)


@pytest.mark.parametrize("step_s", [0.01], indirect=True)
@pytest.mark.parametrize("is_refusing", [True, False])
async def test_a_full_engine_that_moves_is_healthy_and_a_stuck_one_is_not(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_refusing: bool
) -> None:
    """The queue is full, or no slot is free for longer than the probe waits."""
    monkeypatch.setattr(control, "PROBE_TIMEOUT_S", 0.3)
    FullEcho(served, monkeypatch, is_refusing)
    running = asyncio.create_task(served.complete(prompt="abc", max_tokens=900))
    await until(lambda: served.echo.running_ids)
    assert (await served.http.get("/health_generate")).status_code == 200
    step = served.echo.step
    monkeypatch.setattr(served.echo, "step", lambda: time.sleep(0.005) or [])
    await asyncio.sleep(0.05)  # the last step's news have arrived
    stuck = await served.http.get("/health_generate")
    assert (stuck.status_code, stuck.json()["error"]["code"]) == (503, "unavailable")
    monkeypatch.setattr(served.echo, "step", step)
    assert (await served.http.get("/health_generate")).status_code == 200
    served.engine.abort_matching("")
    assert (await running).status_code == 499


@pytest.mark.parametrize("how", ["timeout", "client left"])
async def test_a_flush_that_nobody_waits_for_any_more_does_not_happen(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It lay behind a long step; when that ends, the engine is idle and would flush."""
    monkeypatch.setattr(questions, "MIN_FLUSH_ANSWER_S", 0.1 if how == "timeout" else 60.0)
    async with live_app(tokenizer, ServerConfig()) as live, httpx.AsyncClient(base_url=live.url) as http:
        step, is_held = live.echo.step, threading.Event()
        monkeypatch.setattr(live.echo, "step", lambda: is_held.wait(10) and step())
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1}))
        await until(lambda: live.echo.running_ids)
        await asyncio.sleep(0.05)
        if how == "timeout":
            assert (await http.post("/flush_cache?timeout=0")).json()["error"]["code"] == "engine_busy"
        else:
            writer = await send_request(live, "POST /flush_cache?timeout=0")
            await until(lambda: live.engine._questions.num_waiting)
            writer.close()
            await until(lambda: not live.engine._questions.num_waiting)
        is_held.set()
        assert (await running).status_code == 200
        await live.engine.stats()  # what was under way has arrived
        assert live.echo.num_flushes == 0
        assert await live.engine.flush_cache()


@pytest.mark.parametrize("log_level", ["warning", "error"])
def test_a_log_of_requests_that_no_one_could_see_is_refused(log_level: str) -> None:
    with pytest.raises(ConfigError, match=f"--log-requests: expected --log-level info or debug, .* got {log_level}"):
        ServerConfig(log_requests=True, log_level=log_level)


def test_a_step_without_outputs_is_progress_and_an_answer_is_none() -> None:
    progress = Progress()
    progress.note_move(10.0)
    progress.note_stats(EngineStats(prefill_steps_total=3), 20.0)
    assert progress.silent_s(21.0) == 1.0
    progress.note_stats(EngineStats(prefill_steps_total=3), 30.0)
    assert progress.silent_s(31.0) == 11.0
    progress.note_stats(EngineStats(prefill_steps_total=3, decode_steps_total=1), 40.0)
    assert progress.silent_s(40.0) == 0.0
