"""A client that leaves, streaming or not: its requests are aborted within two steps. A client that reads slowly: nobody else waits."""

import asyncio
import json
from typing import Any

import pytest

from tests.http.conftest import Served
from tests.support.waiting import until

STEP_S = 0.02


class Caller:
    """One ASGI call whose client can leave, or stop reading, at any moment."""

    def __init__(self, served: Served, *, path: str = "/v1/completions", query: bytes = b"", **body: Any) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[dict[str, Any]] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(served.app(scope, self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.may_send.wait()
        self.sent.append(message)

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


async def until_running(served: Served, count: int, steps: int = 3) -> None:
    await until(lambda: len(served.echo.running_ids) >= count and served.echo.num_steps >= steps)


@pytest.mark.parametrize("step_s", [STEP_S], indirect=True)
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "abc", "stream": True},
        {"prompt": "abc", "stream": False},
        {"prompt": ["abc", "de"], "n": 2, "stream": True},
        {"prompt": ["abc", "de"], "n": 2, "stream": False},
        # no text is safe to send before the stop string is told apart: the client leaves before the first event
        {"prompt": "a", "stop": "a" * 800 + "b", "stream": True},
    ],
)
async def test_leaving_aborts_within_two_steps(served: Served, body: dict[str, Any]) -> None:
    caller = Caller(served, max_tokens=900, **body)
    num_choices = 4 if "n" in body else 1
    await until_running(served, num_choices)
    step_before = served.echo.num_steps
    caller.leave()
    await asyncio.wait_for(caller.task, 5)
    await until(lambda: not served.echo.running_ids)
    assert len(served.echo.abort_steps) == num_choices
    assert max(served.echo.abort_steps) - step_before <= 2
    assert (await served.engine.stats()).aborted_total == num_choices


@pytest.mark.parametrize("step_s", [0.001], indirect=True)
async def test_a_slow_reader_gets_everything_in_few_events_and_slows_nobody(served: Served) -> None:
    slow = Caller(served, prompt="abc", max_tokens=300, stream=True)
    await until_running(served, 1)
    slow.may_send.clear()
    fast = await served.complete(prompt="xy", max_tokens=300)
    assert fast.status_code == 200
    await until(lambda: not served.echo.running_ids)
    await served.engine.stats()  # its answer comes after all outputs
    num_sent = len(slow.sent)
    slow.may_send.set()
    await asyncio.wait_for(slow.task, 5)
    # all that came meanwhile was merged: one event that was being sent, one with the rest, [DONE], and the end of the body
    assert len(slow.sent) - num_sent <= 4
    events = b"".join(message.get("body", b"") for message in slow.sent).split(b"\n\n")
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events if event.startswith(b"data: {")]
    assert "".join(texts) == "abc" * 100


@pytest.mark.parametrize("step_s", [STEP_S], indirect=True)
async def test_a_flush_whose_client_left_asks_no_more(served: Served) -> None:
    running = Caller(served, prompt="abc", max_tokens=900)
    await until_running(served, 1)
    flush = Caller(served, path="/flush_cache", query=b"timeout=60")
    await until(lambda: served.echo.num_flushes)
    flush.leave()
    await asyncio.wait_for(flush.task, 5)
    await served.engine.stats()  # what was under way has arrived
    num_flushes = served.echo.num_flushes
    await asyncio.sleep(5 * STEP_S)
    assert served.echo.num_flushes == num_flushes
    assert flush.sent == []
    running.leave()
    await asyncio.wait_for(running.task, 5)
