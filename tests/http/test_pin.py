"""Pins over HTTP: POST /pin and the body field cache_control, through the wire to an engine that says what it pinned."""

import time
from typing import Any

import pytest

from radixserve.core import Request
from radixserve.errors import UnsupportedFieldError
from radixserve.server.generation import Generation
from radixserve.tokenizer import ChatTemplate
from tests.http.conftest import Served


async def test_pin_says_how_many_tokens_until_when(served: Served) -> None:
    before = time.time()
    for prompt, num_cached in (("abc", 0), ([97, 98, 99], 2)):
        reply = await served.http.post("/pin", json={"prompt": prompt, "ttl_s": 60})
        assert reply.status_code == 200, reply.text
        body = reply.json()
        assert before + 60 <= body.pop("expires_at") <= time.time() + 60
        assert body == {"prompt_tokens": 3, "cached_tokens": num_cached, "pinned_tokens": 3}
    assert 'radixserve_pinned_tokens{model_name="echo"} 3.0' in (await served.http.get("/metrics")).text


async def test_what_is_not_pinned_does_not_expire(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generation, "num_pinned", lambda generation, index: 0)  # less than a page, or no room in the budget
    reply = await served.http.post("/pin", json={"prompt": "abc", "ttl_s": 60})
    assert reply.json() == {"prompt_tokens": 3, "cached_tokens": 0, "pinned_tokens": 0, "expires_at": None}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"ttl_s": 5}, "prompt"),
        ({"prompt": "", "ttl_s": 5}, "prompt"),
        ({"prompt": [-1], "ttl_s": 5}, "prompt"),
        ({"prompt": "a"}, "ttl_s"),
        ({"prompt": "a", "ttl_s": 0}, "ttl_s"),
        ({"prompt": "a", "ttl_s": -1}, "ttl_s"),
        ({"prompt": "a", "ttl_s": "5"}, "ttl_s"),
        ({"prompt": "a", "ttl_s": 86401}, "ttl_s"),
        ({"prompt": "a" * 2000, "ttl_s": 5}, None),
    ],
)
async def test_what_pin_refuses(served: Served, body: dict[str, Any], param: str | None) -> None:
    reply = await served.http.post("/pin", json=body)
    assert reply.status_code == 400, reply.text
    assert param is None or reply.json()["error"]["param"] == param


async def test_pin_does_not_blame_a_field_that_it_does_not_have(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Request) -> None:
        raise UnsupportedFieldError("cache_control: nothing can be pinned with --disable-radix-cache", param="cache_control")

    monkeypatch.setattr(served.echo, "add", refuse)
    error = (await served.http.post("/pin", json={"prompt": "a", "ttl_s": 5})).json()["error"]
    assert (error["message"], error["param"]) == ("/pin: nothing can be pinned with --disable-radix-cache", None)
    error = (await served.complete(prompt="a", cache_control={"ttl_s": 5})).json()["error"]
    assert error["param"] == "cache_control"


async def test_cache_control_pins_on_the_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"cache_control": {"ttl_s": 60}, "max_tokens": 1}
    completion = (await served.complete(prompt="abc", **asked)).json()
    assert completion["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "pinned_tokens": 3}
    messages = [{"role": "user", "content": "hi"}]
    template = ChatTemplate("{{ messages[0].content }}", {})
    monkeypatch.setattr(served.app.state.context.tokenizer, "chat_template", template)
    chat = (await served.http.post("/v1/chat/completions", json={"messages": messages, **asked})).json()
    assert chat["usage"]["prompt_tokens_details"]["pinned_tokens"] == chat["usage"]["prompt_tokens"]
    native = (await served.http.post("/generate", json={"text": "abc", "cache_control": {"ttl_s": 1.5}})).json()
    assert native["meta_info"]["pinned_tokens"] == 3


@pytest.mark.parametrize("control", [None, {}])
async def test_without_a_time_nothing_is_pinned(served: Served, control: Any) -> None:
    reply = (await served.complete(prompt="abc", max_tokens=1, cache_control=control)).json()
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("control", [{"type": "ephemeral"}, {"ttl_s": 0}, {"ttl_s": True}, {"ttl_s": 5, "scope": "all"}, "5m", 5])
async def test_what_cache_control_refuses(served: Served, control: Any) -> None:
    for path, prompt in (("/v1/completions", {"prompt": "abc"}), ("/generate", {"text": "abc"})):
        reply = await served.http.post(path, json={**prompt, "cache_control": control})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"].startswith("cache_control")
