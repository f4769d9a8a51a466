"""No field of one generating route is ignored in silence by another: it is served there, or refused by its name."""

from typing import Any

import pytest

from radixserve.server.fields import Fields
from radixserve.server.known_fields import HARMLESS, NEUTRAL_VALUES
from radixserve.tokenizer import ChatTemplate
from tests.http.conftest import Served

HELLO = [{"role": "user", "content": "hello"}]
PARAMS = "sampling_params"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/generate": {"text": "a", PARAMS: {"max_new_tokens": 1}},
}

# A value that asks for something, of each name that a route reads.
ASKING: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "best_of": 2,
    "cache_control": {"ttl_s": 5},
    "cache_salt": "mine",
    "chat_template_kwargs": {"mood": "good"},
    "continue_final_message": True,
    "echo": True,
    "extra_key": "mine",
    "frequency_penalty": 1,
    "ignore_eos": True,
    "input_ids": [5],
    "logit_bias": {"5": 1},
    "logprob_start_len": 0,
    "logprobs": 1,
    "max_completion_tokens": 1,
    "max_new_tokens": 1,
    "max_tokens": 1,
    "messages": HELLO,
    "min_new_tokens": 1,
    "min_p": 0.5,
    "min_tokens": 1,
    "n": 2,
    "presence_penalty": 1,
    "priority": -1,
    "prompt": "a",
    "repetition_penalty": 1.5,
    "return_cached_tokens_details": True,
    "return_logprob": True,
    "return_text_in_logprobs": True,
    "return_token_ids": True,
    "sampling_params": {"n": 2},
    "sampling_seed": 5,
    "seed": 5,
    "skip_special_tokens": False,
    "stop": "b",
    "stop_token_ids": [5],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "text": "a",
    "top_k": 5,
    "top_logprobs": 1,
    "top_logprobs_num": 1,
    "top_p": 0.5,
}


@pytest.fixture
def read_names(served: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Path of the object ("" for the body) -> the names that were read in it, whether they were there or not."""
    names: dict[str, set[str]] = {"": set(), PARAMS: set()}
    raw = Fields.raw

    def noting(fields: Fields, name: str) -> Any:
        path = fields.path_of("").rstrip(".")
        if path in names:
            names[path].add(name)
        return raw(fields, name)

    monkeypatch.setattr(Fields, "raw", noting)
    monkeypatch.setattr(served.app.state.context.tokenizer, "chat_template", ChatTemplate("{{ messages[0].content }}", {}))
    return names


async def names_of(served: Served, read_names: dict[str, set[str]], route: str, place: str) -> set[str]:
    for names in read_names.values():
        names.clear()
    assert (await served.http.post(route, json=BODIES[route])).status_code == 200
    return read_names[place] - HARMLESS


PLACES = [*((route, "") for route in BODIES), ("/generate", PARAMS)]


@pytest.mark.parametrize(("route", "place"), PLACES)
async def test_a_name_that_another_route_reads_is_never_ignored(
    served: Served, read_names: dict[str, set[str]], route: str, place: str
) -> None:
    all_names = {name for other in PLACES for name in await names_of(served, read_names, *other)}
    assert all_names == ASKING.keys()
    foreign = all_names - await names_of(served, read_names, route, place)
    assert len(foreign) >= 10
    for name in sorted(foreign):
        body = dict(BODIES[route])
        if place:
            body[place] = body[place] | {name: ASKING[name]}
        else:
            body[name] = ASKING[name]
        reply = await served.http.post(route, json=body)
        assert reply.status_code == 400, (name, reply.text)
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", f"{place}.{name}" if place else name)


@pytest.mark.parametrize(("route", "place"), PLACES)
async def test_all_neutral_values_of_what_a_route_does_not_read_are_accepted(
    served: Served, read_names: dict[str, set[str]], route: str, place: str
) -> None:
    own = await names_of(served, read_names, route, place)
    values = {name: neutral for name, neutral in NEUTRAL_VALUES.items() if name not in own}
    for number in range(max(map(len, values.values()))):
        neutral = {name: given[number] for name, given in values.items() if number < len(given)}
        body = BODIES[route]
        body = body | {place: body[place] | neutral} if place else body | neutral
        reply = await served.http.post(route, json=body)
        assert reply.status_code == 200, reply.text
        assert "x-radixserve-ignored" not in reply.headers


@pytest.mark.parametrize("name", ["cache_control", "tools", "documents", "chat_template"])
@pytest.mark.parametrize("body", [{"messages": HELLO}, {"prompt": "a"}, {"tokens": [5]}])
async def test_what_would_change_the_tokens_is_refused_by_the_routes_of_the_tokenizer(
    served: Served, body: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.app.state.context.tokenizer, "chat_template", ChatTemplate("{{ messages[0].content }}", {}))
    route = "/detokenize" if "tokens" in body else "/tokenize"
    assert (await served.http.post(route, json=body | {name: None})).status_code == 200
    reply = await served.http.post(route, json=body | {name: {"a": "b"}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("place", ["message", "tool call", "function"])
async def test_a_wish_for_the_cache_is_refused_wherever_it_hangs(served: Served, place: str) -> None:
    function: dict[str, Any] = {"name": "f", "arguments": "{}"}
    call: dict[str, Any] = {"type": "function", "function": function}
    message: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    paths = {
        "message": (message, "messages[0].cache_control"),
        "tool call": (call, "messages[0].tool_calls[0].cache_control"),
        "function": (function, "messages[0].tool_calls[0].function.cache_control"),
    }
    owner, path = paths[place]
    owner["cache_control"] = {"type": "ephemeral"}
    reply = await served.http.post("/v1/chat/completions", json={"messages": [message]})
    assert (reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]) == (400, "unsupported_parameter", path)
