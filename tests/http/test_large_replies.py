"""Replies with many log-probabilities: encoded once, built off the loop, bounded; and what happens when making a reply fails."""

import dataclasses
import json
import threading
from typing import Any

import pytest

from radixserve.config import ServerConfig
from radixserve.server import answering, logprobs, native, openai, openai_reply
from radixserve.tokenizer import ChatTemplate
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.http.conftest import Served
from tests.support.echo_engine import EchoEngine
from tests.support.live_server import live_app, send_request
from tests.support.waiting import until

TEMPLATE = ChatTemplate("{{ messages[0].content }}", {})
HELLO = [{"role": "user", "content": "hello"}]


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[threading.Thread]:
    """The thread of each call of a function of this module."""
    threads: list[threading.Thread] = []
    function = getattr(module, name)

    def counted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return function(*args)

    monkeypatch.setattr(module, name, counted)
    return threads


@pytest.mark.usefixtures("one_step_at_a_time")
@pytest.mark.parametrize("start", [0, 2])
async def test_a_native_stream_encodes_each_log_probability_once(served: Served, monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    body = {"text": "abcdef", "sampling_params": {"max_new_tokens": 10}, "return_logprob": True, "logprob_start_len": start}
    body |= {"top_logprobs_num": 2, "return_text_in_logprobs": True}
    whole = (await served.http.post("/generate", json=body)).json()["meta_info"]
    calls = count_calls(monkeypatch, native, "native_logprob")
    reply = await served.http.post("/generate", json=body | {"stream": True})
    events = [json.loads(block.removeprefix("data: ")) for block in reply.text.split("\n\n")[:-2]]
    num_inputs = 6 - start
    assert len(events) == 10
    assert len(calls) == (num_inputs + 10) * (1 + 2) - (2 if start == 0 else 0)
    for number, event in enumerate(events, start=1):
        meta = event["meta_info"]
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert meta[name] == whole[name]
            assert len(meta[name]) == num_inputs
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert meta[name] == whole[name][:number]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_lists_of_an_echoed_prompt_are_made_once_per_prompt(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    calls = count_calls(monkeypatch, openai_reply, "prompt_lists")
    body = {"prompt": ["abc", "de"], "n": 3, "echo": True, "logprobs": 2, "max_tokens": 1, "stream": is_stream}
    assert (await served.complete(**body)).status_code == 200
    assert len(calls) == 2


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("num_tokens", "is_large"), [(20, False), (900, True)])
@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
async def test_only_large_bodies_are_built_off_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_stream: bool, num_tokens: int, is_large: bool, route: str
) -> None:
    calls = count_calls(monkeypatch, logprobs, "token_text")
    ids = [97] * num_tokens
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ids, "echo": True, "logprobs": 20, "max_tokens": 1},
        "/generate": {
            "input_ids": ids,
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 20,
            "sampling_params": {"max_new_tokens": 1},
        },
    }
    reply = await served.http.post(route, json={**bodies[route], "stream": is_stream})
    assert reply.status_code == 200
    assert len(calls) >= num_tokens
    assert {thread is not threading.current_thread() for thread in calls} == {is_large}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1] * 900, "n": 20, "echo": True, "logprobs": 20}, "logprobs"),
        ("/v1/completions", {"prompt": [[1] * 900] * 20, "echo": True, "logprobs": 20}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "n": 20, "max_tokens": 900, "logprobs": 20}, "logprobs"),
        (
            "/generate",
            {
                "input_ids": [1] * 800,
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 20,
                "sampling_params": {"n": 20},
            },
            "top_logprobs_num",
        ),
        ("/v1/chat/completions", {"messages": HELLO, "n": 20, "max_tokens": 900, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": HELLO, "n": 128, "logprobs": True, "min_tokens": 900, "max_tokens": 900}, "top_logprobs"),
    ],
)
async def test_what_one_call_may_show_has_a_limit(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    context = served.app.state.context
    monkeypatch.setattr(context.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(context, "config", _with_max_logprobs(context.config, 100_000))
    reply = await served.http.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert "at most 100000" in error["message"]
    assert "--max-logprobs" in error["message"]
    assert served.echo.stats().requests_total == 0


async def test_a_call_at_the_limit_is_served(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    context = served.app.state.context
    body = {"prompt": [1, 2, 3], "n": 2, "echo": True, "logprobs": 4, "max_tokens": 2}
    monkeypatch.setattr(context, "config", _with_max_logprobs(context.config, 2 * (3 + 2) * 5))
    assert (await served.complete(**body)).status_code == 200
    monkeypatch.setattr(context, "config", _with_max_logprobs(context.config, 2 * (3 + 2) * 5 - 1))
    assert (await served.complete(**body)).status_code == 400


@pytest.mark.parametrize("num_top", [0, 3])
async def test_a_chat_that_asked_for_no_length_gets_what_the_limit_leaves(
    served: Served, monkeypatch: pytest.MonkeyPatch, num_top: int
) -> None:
    context = served.app.state.context
    monkeypatch.setattr(context.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(context, "config", _with_max_logprobs(context.config, 2 * 7 * (1 + num_top) + 1))
    body = {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": num_top}
    reply = await served.http.post("/v1/chat/completions", json=body)
    assert [(len(choice["logprobs"]["content"]), choice["finish_reason"]) for choice in reply.json()["choices"]] == [(7, "length")] * 2
    monkeypatch.setattr(context, "config", _with_max_logprobs(context.config, 2 * (1 + num_top) - 1))
    refused = await served.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")


def _with_max_logprobs(config: Any, limit: int) -> Any:
    return dataclasses.replace(config, max_logprobs=limit)


class BrokenReply(openai_reply.CompletionReply):
    def __init__(self, *args: Any) -> None:
        raise RuntimeError("secret")


@pytest.mark.parametrize("step_s", [0.005], indirect=True)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_nothing_runs_on_when_making_the_reply_fails(served: Served, monkeypatch: pytest.MonkeyPatch, is_stream: bool) -> None:
    monkeypatch.setattr(openai, "CompletionReply", BrokenReply)
    reply = await served.complete(prompt="abc", n=2, max_tokens=900, stream=is_stream)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in reply.text
    await until(lambda: served.echo.stats().aborted_total == 2)
    assert not served.echo.running_ids


async def test_a_client_that_leaves_while_a_large_body_is_built_ends_its_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "LARGE_BODY_TOKENS", 0)
    is_building, may_go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        is_building.set()
        may_go_on.wait(5)
        return original(*args)

    original = openai_reply.prompt_lists
    monkeypatch.setattr(openai_reply, "prompt_lists", slow)
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 900, "stream": True}
    async with live_app(tokenizer, ServerConfig(), lambda config: EchoEngine(config, 0.005)) as live:
        writer = await send_request(live, "POST /v1/completions", json.dumps(body).encode())
        await until(is_building.is_set)
        writer.close()
        await until(lambda: not live.echo.running_ids)
        assert live.echo.stats().aborted_total == 1
        may_go_on.set()
