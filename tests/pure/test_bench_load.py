"""The load generator of bench/: open and closed loops, what depends on answers, records, counters, and what it costs itself."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.arrivals import arrival_times
from bench.client import RequestFailedError
from bench.load import ClosedLoop, OpenLoop, RunResult, Target, flush, run
from bench.report import describe, summarize
from bench.workloads import AnswerOf, Workload, WorkloadRequest, make_workload
from tests.support.bench_servers import CHUNKED, RadixServer, WholeWords, chunk, event, serving, usage
from tests.support.null_server import null_server

SHAPE = {"num_groups": 3, "prompts_per_group": 4, "system_prompt_len": 30, "question_len": 5, "output_len": 6}
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def shared(**options: object) -> Workload:
    return make_workload("shared-prefix", WholeWords(), 1, **{**SHAPE, **options})


def program(*requests: WorkloadRequest) -> Workload:
    return Workload.of("program", "", requests, WholeWords())


@pytest.mark.parametrize("send_text", [False, True])
async def test_a_run_measures_what_the_server_did(send_text: bool, tmp_path: Path) -> None:
    server, path = RadixServer(), tmp_path / "out" / "records.jsonl"
    load = shared()
    async with serving(server.handle) as url:
        done = await run(load, Target(url, send_text=send_text), ClosedLoop(3), records_path=path, label="fake")
        await flush(url)
    assert [record.id for record in done.records] == [request.id for request in load.requests]
    assert {(record.prompt_tokens, record.output_tokens, record.error) for record in done.records} == {(35, 6, None)}
    assert {record.prompt_len for record in done.records} == {None if send_text else 35}
    assert done.cached_tokens == load.ideal_hit_tokens == 3 * 3 * 30
    assert (done.metrics_before, done.metrics_after) == ({"sglang:cached_tokens_total": 0.0}, {"sglang:cached_tokens_total": 270.0})
    for record in done.records:
        assert record.first_token_s is not None
        assert 0 <= record.scheduled_s <= record.sent_s <= record.first_token_s <= record.token_times_s[-1] <= record.done_s <= done.wall_s
        assert len(record.token_times_s) == 6
    assert (server.max_running, server.num_flushes) == (3, 1)
    summary = summarize("fake", 1, done)
    assert (summary.requests, summary.in_tok, summary.served_in_tok, summary.out_tok) == (12, 12 * 35, 12 * 35, 72)
    assert summary.hit_rate == summary.ideal_hit_rate == pytest.approx(270 / 420)
    assert (summary.cached_requests, summary.counted_cached_tok) == (9, 270)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [record.id for record in done.records]
    assert {(line["label"], line["workload"], line["mode"], line["prompt_tokens"]) for line in lines} == {
        ("fake", "shared-prefix", "3 at a time", 35)
    }


@pytest.mark.parametrize("gives_token_ids", [True, False])
@pytest.mark.parametrize("send_text", [False, True])
@pytest.mark.parametrize("name", ["D", "tree-of-thought", "skeleton-of-thought", "llm-judge"])
async def test_answers_become_part_of_later_prompts(name: str, send_text: bool, gives_token_ids: bool) -> None:
    """BENCH-03: all but the last token of each answer is re-used, whether ids come back or only text: to the token."""
    load = make_workload(name, WholeWords(), 1)
    async with serving(RadixServer(gives_token_ids).handle) as url:
        done = await run(load, Target(url, send_text=send_text), ClosedLoop(1))
    assert [record.prompt_tokens for record in done.records] == list(load.prompt_lens)
    assert summarize("fake", 1, done).in_tok == load.prompt_tokens
    # in another order of branches others are the first; the sum is the same
    assert done.cached_tokens == load.ideal_hit_tokens


async def test_re_encoded_answers_are_counted_as_the_server_sees_them() -> None:
    """BENCH-03: the server's text has other tokens than it generated; what is sent, recorded and re-used are those of the prompt."""

    class Merging(WholeWords):
        def encode(self, text: str) -> list[int]:
            return super().encode(text)[::2]

    first = WorkloadRequest("a", ([100] * 10,), 8, "g")
    second = WorkloadRequest("b", ([100] * 10, AnswerOf("a"), [101] * 5), 8, "g")
    load = Workload.of("program", "", [first, second], Merging())
    server = RadixServer(gives_token_ids=False)
    async with serving(server.handle) as url:
        done = await run(load, Target(url), ClosedLoop(1))
    assert load.prompt_lens == (10, 23)
    assert [(record.prompt_len, record.prompt_tokens) for record in done.records] == [(10, 10), (19, 19)]
    # ids 1 and 3 of the answer stand where 1 and 2 were generated
    assert done.records[1].cached_tokens == 11
    summary = summarize("x", 1, done)
    assert (summary.in_tok, summary.served_in_tok, summary.hit_rate) == (29, 29, 11 / 29)


async def test_branches_go_out_together_and_a_join_waits_for_all() -> None:
    sent: list[int] = []

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path != "/metrics":
            sent.append(body["prompt"][-1])
            await asyncio.sleep(0.02 * body["prompt"][-1] if body["prompt"][-1] < 10 else 0)
            writer.write(CHUNKED + chunk(event(" w7", usage=usage(1, 1, 0))) + DONE)

    requests = [
        WorkloadRequest("root", ([1],), 1, "g"),
        *(WorkloadRequest(f"b{i}", ([1], AnswerOf("root"), [i]), 1, "g") for i in (2, 3, 4)),
        WorkloadRequest("join", (AnswerOf("b2"), AnswerOf("b4"), [50]), 1, "g", after=("b3",)),
    ]
    async with serving(handler) as url:
        for mode in (ClosedLoop(8), OpenLoop(100.0)):
            sent.clear()
            done = await run(program(*requests), Target(url), mode)
            root, *branches, join = done.records
            assert sent[0] == 1 and set(sent[1:4]) == {2, 3, 4} and sent[4] == 50
            assert all(root.done_s <= branch.sent_s < min(other.done_s for other in branches) for branch in branches)
            assert join.sent_s >= max(branch.done_s for branch in branches)
            assert done.records[4].prompt_len == 3


async def test_a_closed_loop_goes_on_with_what_it_began() -> None:
    server = RadixServer()
    load = make_workload("multi-turn-short", WholeWords(), 1, num_chats=4, num_turns=3)
    async with serving(server.handle) as url:
        done = await run(load, Target(url), ClosedLoop(2))
    sent = [record.id for record in sorted(done.records, key=lambda record: record.sent_s)]
    last_of_first, first_of_last = max(sent.index("chat0.t2"), sent.index("chat1.t2")), sent.index("chat3.t0")
    assert min(sent.index("chat0.t2"), sent.index("chat1.t2")) < sent.index("chat2.t0") < first_of_last
    assert last_of_first < first_of_last
    assert server.max_running == 2


def test_arrival_times() -> None:
    load = make_workload("random", WholeWords(), 1, num_prompts=1000, input_len=2)
    constant = arrival_times(load, OpenLoop(8.0, "constant"))
    assert constant == pytest.approx([i / 8 for i in range(1000)])
    poisson = arrival_times(load, OpenLoop(8.0, "poisson", seed=1))
    gaps = [later - earlier for earlier, later in pairwise(poisson)]
    assert poisson[0] == 0.0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=0.1)
    # exponential: the deviation is the mean
    assert (sum((gap - 1 / 8) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(1 / 8, rel=0.15)
    assert arrival_times(load, OpenLoop(8.0, seed=1)) == poisson != arrival_times(load, OpenLoop(8.0, seed=2))
    assert arrival_times(load, OpenLoop(16.0, seed=1)) == pytest.approx([at / 2 for at in poisson])
    with pytest.raises(ValueError, match="expected recorded arrival times"):
        arrival_times(load, OpenLoop(arrivals="recorded"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0.0}, "rate: expected requests per second above 0, got 0.0"),
        ({}, "rate: expected requests per second above 0, got None"),
        ({"rate": 1.0, "arrivals": "bursty"}, "expected one of poisson, constant, recorded, got 'bursty'"),
        ({"rate": 1.0, "arrivals": "recorded"}, "expected none with recorded arrivals"),
    ],
)
def test_modes_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenLoop(**arguments)
    with pytest.raises(ValueError, match="concurrency: expected at least 1, got 0"):
        ClosedLoop(0)


async def test_an_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    """Ten at a constant rate against answers that take far longer than a pause: all are under way at once, and none is late."""

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.0 if path == "/metrics" else 0.5)
        writer.write(CHUNKED + chunk(event("a", usage=usage(2, 1, 0))) + DONE)

    lines = [{"timestamp": 40 * i, "input_length": 1, "output_length": 1, "hash_ids": [i]} for i in range(10)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = make_workload("trace", WholeWords(), 1, path=str(tmp_path / "trace.jsonl"), time_scale=0.5)
    async with serving(handler) as url:
        for load, mode in (
            (make_workload("random", WholeWords(), 1, num_prompts=10, input_len=2), OpenLoop(50.0, "constant")),
            (trace, OpenLoop(arrivals="recorded")),
        ):
            done = await run(load, Target(url), mode)
            assert [record.scheduled_s for record in done.records] == pytest.approx([i * 0.02 for i in range(10)])
            assert max(record.sent_s for record in done.records) < min(record.done_s for record in done.records)
            assert all(record.late_s >= 0 for record in done.records)


async def test_time_to_first_token_counts_from_each_requests_own_sending() -> None:
    """BENCH-01: a server that serves one after the other; a request waits for its turn, but not for what the client held back."""
    turn = asyncio.Lock()

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            return
        async with turn:
            await asyncio.sleep(0.03)
            writer.write(CHUNKED + chunk(event("a", usage=usage(1, 1, 0))))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(chunk(event("b", usage=usage(1, 2, 0))) + DONE)

    load = make_workload("random", WholeWords(), 1, num_prompts=8, input_len=2, output_len=2)
    async with serving(handler) as url:
        done = await run(load, Target(url), ClosedLoop(2))
    for record in done.records:
        assert record.ttft_s is not None and record.first_token_s is not None
        assert record.ttft_s == record.first_token_s - record.sent_s
        # its own 30 ms, and at most the one other that was under way: never the six that the client had not sent
        assert 0.025 < record.ttft_s < 0.25
    assert done.records[-1].first_token_s > 8 * 0.045


async def test_tokens_come_from_the_servers_count() -> None:
    """BENCH-05, BENCH-06: four tokens a chunk, all of them blanks; 100 tokens, each with its time."""

    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            return
        assert body["stream_options"]["continuous_usage_stats"]
        writer.write(CHUNKED)
        for count in range(4, 101, 4):
            writer.write(chunk(event("    ", usage=usage(3, count, 0))))
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.write(chunk(event("", finish="length", usage=usage(3, 100, 0))) + DONE)

    load = make_workload("random", WholeWords(), 1, num_prompts=1, input_len=3, output_len=100)
    async with serving(handler) as url:
        done = await run(load, Target(url), ClosedLoop(1))
    record = done.records[0]
    assert (record.output_tokens, len(record.token_times_s), len(record.gaps_s)) == (100, 100, 99)
    assert record.text == " " * 100
    assert record.tpot_s == pytest.approx((record.token_times_s[-1] - record.token_times_s[0]) / 99)
    # the gaps of one chunk are a quarter of its pause each; those of the first came together
    assert record.gaps_s[:3] == (0.0, 0.0, 0.0)
    for start in range(3, 99, 4):
        assert record.gaps_s[start : start + 4] == pytest.approx([record.gaps_s[start]] * 4, rel=0.001)
        assert record.gaps_s[start] > 0.0004


async def test_what_fails_is_a_record_and_so_is_what_waits_for_it() -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body.get("prompt", [2])[0] == 2:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\nno model")
        else:
            writer.write(CHUNKED + chunk(event("w1", usage=usage(1, 1, 0))) + DONE)

    load = program(
        WorkloadRequest("good", ([1],), 1, "g"),
        WorkloadRequest("bad", ([2],), 1, "g"),
        WorkloadRequest("next", ([2], AnswerOf("bad")), 1, "g"),
        WorkloadRequest("last", ([2],), 1, "g", after=("good", "next")),
    )
    async with serving(handler) as url:
        for mode in (ClosedLoop(1), ClosedLoop(4), OpenLoop(1000.0)):
            done = await run(load, Target(url), mode)
            assert (done.metrics_before, done.metrics_after) == (None, None)
            good, bad, follower, last = done.records
            assert good.error is None
            assert bad.error == "RequestFailedError: HTTP 404: no model"
            assert follower.error is not None and follower.error.startswith("not sent, since bad failed: ")
            assert last.error is not None and last.error.startswith("not sent, since next failed: ")
            summary = summarize("x", 1, done)
            assert (summary.requests, summary.failed) == (1, 3)
            assert "1 requests, 3 FAILED" in describe(summary, 1, 1.0)
        with pytest.raises(RequestFailedError, match="/flush_cache: HTTP 404"):
            await flush(url)


async def test_headers() -> None:
    heads: list[str] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(CHUNKED + chunk(event("w1")) + DONE)
        writer.close()

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await run(shared(send_routing_key=True), Target(url, headers={"Authorization": "Bearer k"}), ClosedLoop(1))
    assert len(heads) == 14
    assert all("Authorization: Bearer k\r\n" in head for head in heads)
    keys = [line for head in heads for line in head.split("\r\n") if line.startswith("X-SMG-Routing-Key")]
    assert {key: keys.count(key) for key in keys} == {f"X-SMG-Routing-Key: g{group}": 4 for group in range(3)}


async def test_it_drives_500_requests_a_second() -> None:
    """Against a server that answers at once, in a process of its own. CPU time is the measure, for it holds on a busy machine too; the
    clock need only show once that the rate is kept, since a machine may stand still for seconds."""
    load = shared(num_groups=10, prompts_per_group=100, system_prompt_len=200, output_len=8)
    for _ in range(3):
        async with null_server(8) as url:
            done: RunResult = await run(load, Target(url), OpenLoop(500.0, "constant"))
        print(describe(summarize("null server", 1, done), 1, 1.0))
        assert not done.errors
        assert sum(record.output_tokens for record in done.records) == 8000
        assert done.overhead.cpu_per_request_s < 1 / 500, "no core can drive 500 requests a second"
        if is_kept := done.wall_s < 1000 / 500 * 1.25 and done.overhead.late_p50_s < 0.05:
            break
    assert is_kept
    assert done.overhead.late_p50_s <= done.overhead.late_p99_s <= done.overhead.late_max_s
