"""A queue with a limit: calls that could never fit are a 400, calls that do not fit now a 429 as a whole, and neither starts anything."""

import asyncio
from typing import Any

import httpx
import pytest

from radixserve.engine.queue_room import QueueRoom
from radixserve.errors import QueueFullError
from tests.http.conftest import Served
from tests.support.waiting import until

NUM_SLOTS = 64  # of the EchoEngine
LIMIT = 3
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
def max_queued_requests() -> int:
    return LIMIT


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "n": 68}, "n"),
        ("/v1/completions", {"prompt": [1, 2], "n": 68}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 68}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 34, "n": 2}, "prompt"),
        ("/v1/chat/completions", {"messages": [HELLO], "n": 68}, "n"),
        ("/generate", {"text": "a", "sampling_params": {"n": 68}}, "sampling_params.n"),
        ("/generate", {"input_ids": [[1]] * 68}, "input_ids"),
    ],
)
async def test_more_choices_than_ever_fit_are_a_400(served: Served, path: str, body: dict[str, Any], param: str, is_stream: bool) -> None:
    reply = await served.http.post(path, json={**body, "stream": is_stream})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert "at most 67" in error["message"]
    assert "--max-queued-requests" in error["message"]
    assert served.echo.stats().requests_total == 0


async def test_what_just_fits_is_served(served: Served) -> None:
    reply = await served.complete(prompt="ab", n=NUM_SLOTS + LIMIT, max_tokens=1)
    assert len(reply.json()["choices"]) == NUM_SLOTS + LIMIT


@pytest.mark.parametrize("step_s", [0.005], indirect=True)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_call_that_does_not_fit_now_is_refused_whole(served: Served, is_stream: bool) -> None:
    running = asyncio.create_task(served.complete(prompt="abc", n=60, max_tokens=900))
    await until(lambda: len(served.echo.running_ids) == 60)
    refused = await served.complete(prompt="abc", n=8, max_tokens=1, stream=is_stream)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert refused.headers["retry-after"]
    assert served.echo.stats().requests_total == 60
    assert (await served.complete(prompt="abc", n=7, max_tokens=1, stream=is_stream)).status_code == 200
    text = (await served.http.get("/metrics")).text
    assert 'radixserve_queue_refusals_total{model_name="echo"} 1.0' in text
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("step_s", [0.02], indirect=True)
async def test_an_aborted_call_makes_room_when_the_engine_has_ended_it(served: Served) -> None:
    """In between the engine still counts it, and would refuse some choices of a call that was let in."""
    running = asyncio.create_task(served.complete(prompt="abc", n=60, max_tokens=900))
    await until(lambda: len(served.echo.running_ids) == 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(QueueFullError):
        served.engine.room.require(8)

    def has_room() -> bool:
        try:
            served.engine.room.require(NUM_SLOTS + LIMIT)
        except QueueFullError:
            return False
        return True

    await until(has_room)
    assert not served.echo.running_ids


@pytest.mark.parametrize("step_s", [0.005], indirect=True)
async def test_many_calls_at_once_never_meet_a_refusal_of_the_engine(served: Served) -> None:
    replies: list[httpx.Response] = await asyncio.gather(*(served.complete(prompt="abc", n=10, max_tokens=5) for _ in range(20)))
    assert {reply.status_code for reply in replies} == {200, 429}
    num_served = sum(reply.status_code == 200 for reply in replies)
    assert num_served == (NUM_SLOTS + LIMIT) // 10
    assert (served.echo.stats().requests_total, served.echo.num_queue_refusals) == (10 * num_served, 0)


@pytest.mark.parametrize("step_s", [0.02], indirect=True)
async def test_the_engine_refuses_by_the_same_rule(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests here would find nobody who could refuse."""
    monkeypatch.setattr(served.engine.room, "require", lambda num_requests: None)
    reply = await served.complete(prompt="abc", n=NUM_SLOTS + LIMIT, max_tokens=1)
    assert reply.status_code == 200
    running = asyncio.create_task(served.complete(prompt="abc", n=NUM_SLOTS + LIMIT, max_tokens=900))
    await until(lambda: len(served.echo.running_ids) == NUM_SLOTS + LIMIT)
    assert (await served.complete(prompt="abc", n=2, max_tokens=1)).status_code == 429
    assert served.echo.num_queue_refusals >= 1  # the first refusal may have aborted the other on its way
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("step_s", [0.02], indirect=True)
async def test_what_does_not_fit_is_refused_before_it_is_encoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    running = asyncio.create_task(served.complete(prompt="abc", n=60, max_tokens=900))
    await until(lambda: len(served.echo.running_ids) == 60)
    texts, encode = [], served.app.state.context.tokenizer.encode

    def noting(text: str, **kwargs: Any) -> list[int]:
        texts.append(text)
        return encode(text, **kwargs)

    monkeypatch.setattr(served.app.state.context.tokenizer, "encode", noting)
    assert (await served.complete(prompt="refused", n=8, max_tokens=1)).status_code == 429
    assert (await served.complete(prompt="served", n=7, max_tokens=1)).status_code == 200
    assert texts == ["served"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_dead_engine_leaves_no_one_in_the_queue(served: Served) -> None:
    assert (await served.complete(prompt=["x<crash>", *["abc"] * 60], max_tokens=900)).status_code == 503
    await until(lambda: served.engine.is_alive)
    served.engine.room.require(NUM_SLOTS + LIMIT)


def test_without_a_limit_there_is_always_room() -> None:
    room = QueueRoom(None)
    for number in range(1000):
        room.enter(str(number))
    room.require(10_000)
    assert (room.max_requests, room.num_refusals) == (None, 0)
