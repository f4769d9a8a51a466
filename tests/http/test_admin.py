"""/health, /flush_cache, /metrics, and what they say when the engine is busy, dead, or the server drains."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.conftest import Served
from tests.support.waiting import until


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
    for reply in (await served.complete(prompt="a"), await served.http.get("/health"), await served.http.post("/flush_cache")):
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
