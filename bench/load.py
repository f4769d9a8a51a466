"""Runs a workload against an address: as an open loop (requests come when they come) or a closed one (so many at a time).

Knows the client and the workload's words; prints nothing but a progress bar where that is wished.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.arrivals import ClosedLoop, Mode, OpenLoop, arrival_times, describe_mode
from bench.chat import chat_messages
from bench.client import Completion, RequestFailedError, chat_body, completion_body, fetch, stream_completion
from bench.metrics import read_metrics
from bench.pauses import Pauses
from bench.protocol import CHAT_ROUTE
from bench.records import NOT_SENT, RequestRecord, RunResult, append_records, overhead_of, with_zeros
from bench.workloads import AnswerOf, Ids, Workload, WorkloadRequest
from bench.workloads.workload import Part

__all__ = ["ClosedLoop", "Mode", "OpenLoop", "RequestRecord", "RunResult", "Target", "flush", "run"]

ROUTING_KEY = "X-SMG-Routing-Key"


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to ask. `extra` is merged into each request's body, see completion_body; `headers` go with each request.

    send_text: for completions; a chat is text in any case.
    """

    url: str
    model: str = "default"
    path: str = "/v1/completions"
    send_text: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0

    @property
    def is_chat(self) -> bool:
        """Whether it asks the chat route: text goes out as messages, and the server's template adds tokens that no workload knows."""
        return self.path.endswith(CHAT_ROUTE)


async def run(
    workload: Workload, target: Target, mode: Mode, *, records_path: Path | None = None, label: str = "run", show_progress: bool = False
) -> RunResult:
    """Run all of `workload`. A request that fails is a record with its error, and so are those that wait for it.

    records_path: append one JSON line per request. show_progress: a bar on stderr, if that is a terminal. Raises ValueError for a mode that
    the workload cannot be run in.
    """
    times = arrival_times(workload, mode) if isinstance(mode, OpenLoop) else []
    before = await read_metrics(target.url, headers=target.headers)
    with _Progress(workload, show_progress) as progress:
        session = _Session(workload, target, progress.step)
        with Pauses() as pauses:
            cpu_before, session.started_at = time.process_time(), time.perf_counter()
            await (_open_loop(session, times) if isinstance(mode, OpenLoop) else _closed_loop(session, mode.concurrency))
            wall_s, cpu_s = time.perf_counter() - session.started_at, time.process_time() - cpu_before
    after = await read_metrics(target.url, headers=target.headers)
    records = with_zeros([session.records[request.id] for request in workload.requests], before, after)
    # a template's tokens come in front of every prompt and between its parts: the ideal of the bare prompts is not that of the chat
    ideal = None if target.is_chat else workload.ideal_hit_rate
    overhead = overhead_of(records, cpu_s, wall_s, pauses.gc_max_s, pauses.core_wait_s)
    result = RunResult(workload.name, describe_mode(mode), wall_s, ideal, records, before, after, overhead)
    if records_path is not None:
        append_records(records_path, result, label=label)
    return result


async def _open_loop(session: "_Session", times: Sequence[float]) -> None:
    """Requests that wait for nothing go out at their times, whatever is still unanswered; the others when what they wait for is there."""
    async with asyncio.TaskGroup() as group:

        async def ask(request: WorkloadRequest, scheduled_s: float, body: Body) -> None:
            for ready in await session.ask(request, scheduled_s, body):
                group.create_task(ask(ready, session.now_s, session.body(ready)))

        for request, at_s in sorted(zip(session.roots, times), key=lambda pair: pair[1]):
            # made before its time, so that making it delays nothing
            body = session.body(request)
            await asyncio.sleep(max(0.0, at_s - session.now_s))
            group.create_task(ask(request, at_s, body))


async def _closed_loop(session: "_Session", concurrency: int) -> None:
    """So many at a time; what was begun goes on before something new begins."""
    ready = list(reversed(session.roots))
    num_running = 0
    async with asyncio.TaskGroup() as group:

        def start() -> None:
            nonlocal num_running
            while ready and num_running < concurrency:
                num_running += 1
                group.create_task(ask(ready.pop(), session.now_s))

        async def ask(request: WorkloadRequest, scheduled_s: float) -> None:
            nonlocal num_running
            released = await session.ask(request, scheduled_s, session.body(request))
            num_running -= 1
            ready.extend(reversed(released))
            start()

        start()


class Body(NamedTuple):
    """What goes over the wire, and how many tokens its prompt has; None where it is text or a chat."""

    payload: bytes
    prompt_len: int | None


class _Session:
    """One run: what was answered so far, and who waits for it."""

    def __init__(self, workload: Workload, target: Target, on_record: Callable[[], None]) -> None:
        self._target = target
        self._words = workload.words
        self._on_record = on_record
        self._answers: dict[str, Completion] = {}
        self._waiting_for = {request.id: set(request.depends_on) for request in workload.requests}
        self._followers: dict[str, list[WorkloadRequest]] = {}
        self._parts = {request.id: request.parts for request in workload.requests}
        self._is_quoted = {part.request_id for request in workload.requests for part in request.parts if isinstance(part, AnswerOf)}
        for request in workload.requests:
            for one in request.depends_on:
                self._followers.setdefault(one, []).append(request)
        self.roots = [request for request in workload.requests if not request.depends_on]
        self.records: dict[str, RequestRecord] = {}
        self.started_at = 0.0

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.started_at

    def body(self, request: WorkloadRequest) -> Body:
        """Ids of an answer are the server's where it gives them, else those of its text."""
        target = self._target
        if target.is_chat:
            messages = chat_messages(request.parts, self._parts, self._part_text)
            return Body(json.dumps(chat_body(target.model, messages, request.output_len, target.extra)).encode(), None)
        extra = {"return_token_ids": True, **target.extra} if request.id in self._is_quoted else target.extra
        prompt = "".join(map(self._part_text, request.parts)) if target.send_text else self._ids(request)
        payload = json.dumps(completion_body(target.model, prompt, request.output_len, extra)).encode()
        return Body(payload, None if target.send_text else len(prompt))

    def _part_text(self, part: Part) -> str:
        return self._answers[part.request_id].text if isinstance(part, AnswerOf) else self._words.text(part)

    def _ids(self, request: WorkloadRequest) -> Ids:
        return request.prompt({name: self._answer_ids(self._answers[name]) for name in request.depends_on})

    def _answer_ids(self, answer: Completion) -> Ids:
        # as many as the server counted: a count that differs is text held back or merged by it
        is_whole = answer.token_ids is not None and len(answer.token_ids) == answer.num_output_tokens
        return list(answer.token_ids or ()) if is_whole else self._words.encode(answer.text)

    async def ask(self, request: WorkloadRequest, scheduled_s: float, body: Body) -> list[WorkloadRequest]:
        """Send one request, keep its record, and return those that waited for it alone by now."""
        target = self._target
        headers = target.headers if request.routing_key is None else {**target.headers, ROUTING_KEY: request.routing_key}
        sent_s = self.now_s
        try:
            completion = await stream_completion(target.url, body.payload, target.path, target.timeout_s, headers)
        except (RequestFailedError, OSError, TimeoutError) as error:
            self._fail(request, scheduled_s, sent_s, f"{type(error).__name__}: {error}"[:400])
            return []
        self._answers[request.id] = completion
        self._keep(self._record(request, scheduled_s, completion, body.prompt_len))
        released = []
        for follower in self._followers.get(request.id, []):
            self._waiting_for[follower.id].discard(request.id)
            if not self._waiting_for[follower.id] and follower.id not in self.records:
                released.append(follower)
        return released

    def _record(self, request: WorkloadRequest, scheduled_s: float, done: Completion, prompt_len: int | None) -> RequestRecord:
        times = tuple(at - self.started_at for at in done.token_times)
        return RequestRecord(
            id=request.id,
            group=request.group,
            scheduled_s=scheduled_s,
            sent_s=done.sent_at - self.started_at,
            first_token_s=times[0],
            token_times_s=times,
            done_s=done.done_at - self.started_at,
            prompt_tokens=done.num_prompt_tokens,
            cached_tokens=done.num_cached_tokens,
            output_tokens=done.num_output_tokens,
            text=done.text,
            prompt_len=prompt_len,
        )

    def _fail(self, request: WorkloadRequest, scheduled_s: float, sent_s: float, error: str) -> None:
        """Also all that wait for it, directly or not."""
        record = RequestRecord(request.id, request.group, scheduled_s, sent_s, None, (), self.now_s, None, None, 0, error)
        self._keep(record)
        for follower in self._followers.get(request.id, []):
            if follower.id not in self.records:
                now_s = self.now_s
                self._fail(follower, now_s, now_s, f"{NOT_SENT}{request.id} failed: {error}"[:400])

    def _keep(self, record: RequestRecord) -> None:
        self.records[record.id] = record
        self._on_record()


class _Progress:
    """A bar, where somebody looks at it."""

    def __init__(self, workload: Workload, is_wished: bool) -> None:
        self._bar: Any = None
        if is_wished and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=workload.num_requests, desc=workload.name, unit="req", leave=False)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


async def flush(url: str, path: str = "/flush_cache") -> None:
    """POST /flush_cache. Raises RequestFailedError if the server does not do it."""
    status, body = await fetch(url, "POST", path)
    if status != 200:
        raise RequestFailedError(f"{path}: HTTP {status}: {body[:300].decode(errors='replace')}")
