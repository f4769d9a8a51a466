"""POST /v1/completions with a stream: the events, their order, and that they join to the text without a stream."""

import asyncio
import json
from typing import Any

import pytest

from tests.http.conftest import Served
from tests.support.waiting import until


async def stream(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The JSON of all events; checks the frame: one data line each, [DONE] last and once."""
    reply = await served.complete(stream=True, **body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.count("data: [DONE]") == 1
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def texts_by_index(events: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.usefixtures("one_step_at_a_time")
async def test_chunks_have_the_openai_shape(served: Served) -> None:
    events = await stream(served, prompt="abc", max_tokens=4)
    assert len({event["id"] for event in events}) == 1
    for event in events:
        assert event.keys() == {"id", "object", "created", "model", "choices"}
        assert event["object"] == "text_completion"
        assert [choice.keys() for choice in event["choices"]] == [{"index", "text", "logprobs", "finish_reason"}]
        assert event["choices"][0]["index"] == 0
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert [event["choices"][0]["text"] for event in events] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("text", ["😀é한", "plain", "👨‍👩‍👧 <eos>"])
@pytest.mark.parametrize("stop", [None, "né", ["zz", "ain"], "한😀"])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 30])
async def test_joined_stream_equals_the_text_without_a_stream(served: Served, text: str, stop: Any, max_tokens: int) -> None:
    body = {"prompt": [text, text * 2], "stop": stop, "max_tokens": max_tokens}
    whole = (await served.complete(**body)).json()
    events = await stream(served, stream_options={"include_usage": True}, **body)
    assert texts_by_index(events) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    finishes = [(c["index"], c["finish_reason"]) for event in events for c in event["choices"] if c["finish_reason"] is not None]
    assert sorted(finishes) == [(choice["index"], choice["finish_reason"]) for choice in whole["choices"]]
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("step_s", [0.001], indirect=True)
async def test_nothing_of_a_stop_string_is_ever_sent(served: Served) -> None:
    events = await stream(served, prompt="ABCDEFGHIJKLM", max_tokens=50, stop="DEFGHIJ")
    assert texts_by_index(events) == {0: "ABC"}
    assert not any("D" in event["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("step_s", [0.001], indirect=True)
async def test_held_back_text_comes_when_the_stop_string_does_not(served: Served) -> None:
    events = await stream(served, prompt="say User now", max_tokens=12, stop="User:")
    assert texts_by_index(events) == {0: "say User now"}


@pytest.mark.usefixtures("one_step_at_a_time")
async def test_no_event_holds_half_a_character(served: Served) -> None:
    events = await stream(served, prompt="😀", max_tokens=8)
    assert [event["choices"][0]["text"] for event in events] == ["😀", "😀"]


async def test_each_of_n_choices_finishes_once(served: Served) -> None:
    events = await stream(served, prompt="abc", n=3, max_tokens=5)
    finishes = [c["index"] for event in events for c in event["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2]
    assert texts_by_index(events) == {0: "abcab", 1: "abcab", 2: "abcab"}


@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}])
async def test_no_usage_unless_asked(served: Served, options: Any) -> None:
    events = await stream(served, prompt="abc", max_tokens=2, stream_options=options)
    assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize("n", [1, 3])
async def test_usage_chunk_is_last_has_no_choices_and_equals_the_one_without_stream(served: Served, n: int) -> None:
    body = {"prompt": ["abc", "de"], "n": n, "max_tokens": 4}
    await served.complete(**body)
    events = await stream(served, stream_options={"include_usage": True}, **body)
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None for event in events[:-1])
    whole = (await served.complete(**body)).json()["usage"]
    assert events[-1]["usage"] == whole
    assert whole["prompt_tokens_details"]["cached_tokens"] == 3
    assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"] == 5 + 8 * n


@pytest.mark.usefixtures("one_step_at_a_time")
async def test_continuous_usage_knows_the_cached_tokens_from_the_first_chunk(served: Served) -> None:
    await served.complete(prompt="warm", max_tokens=1)
    events = await stream(served, prompt="warm", max_tokens=3, stream_options={"continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert all(event["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 for event in events)


async def test_a_refusal_by_the_engine_is_a_status_and_not_a_stream(served: Served) -> None:
    reply = await served.complete(prompt="x<refuse>", stream=True)
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": "the engine does not like this prompt",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "invalid_value",
    }
    assert (await served.complete(prompt="x<refuse>")).status_code == 400


@pytest.mark.parametrize("step_s", [0.005], indirect=True)
async def test_abort_in_a_stream_is_an_error_event_then_done(served: Served) -> None:
    async def abort_soon() -> None:
        await until(lambda: served.echo.running_ids)
        await asyncio.sleep(0.03)
        for request_id in served.echo.running_ids:
            served.engine.abort(request_id)

    aborting = asyncio.create_task(abort_soon())
    events = await stream(served, prompt="abc", max_tokens=900)
    await aborting
    assert events[-1]["error"]["code"] == "request_aborted"
    assert len(events) > 1


@pytest.mark.parametrize("step_s", [0.005], indirect=True)
async def test_abort_without_a_stream_is_499(served: Served) -> None:
    reply = asyncio.create_task(served.complete(prompt="abc", max_tokens=900))
    await until(lambda: served.echo.running_ids)
    for request_id in served.echo.running_ids:
        served.engine.abort(request_id)
    assert (await reply).status_code == 499
    assert reply.result().json()["error"]["code"] == "request_aborted"
