"""POST /v1/chat/completions over the echo engine: the answer is the rendered prompt, so that a test sees what the template made of it."""

import json
from typing import Any

import pytest

from radixserve.tokenizer import ChatTemplate
from tests.http.conftest import Served

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% if not loop.last or "
    "add_generation_prompt %}]{% endif %}{% endfor %}{{ flag }}{% if messages[0].role == 'tool' %}{{ raise_exception('no tool first') }}"
    "{% endif %}"
)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def chat_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.app.state.context.tokenizer, "chat_template", ChatTemplate(TEMPLATE, {"eos_token": "<eos>"}))


async def chat(served: Served, *messages: Any, **fields: Any) -> dict[str, Any]:
    reply = await served.http.post("/v1/chat/completions", json={"messages": messages or [USER], **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


async def rendered(served: Served, *messages: Any, **fields: Any) -> str:
    """The prompt, as the answer of exactly its length shows it."""
    num_tokens = (await chat(served, *messages, **fields, max_tokens=1))["usage"]["prompt_tokens"]
    content: str = (await chat(served, *messages, **fields, max_tokens=num_tokens))["choices"][0]["message"]["content"]
    return content


async def stream(served: Served, **fields: Any) -> list[dict[str, Any]]:
    reply = await served.http.post("/v1/chat/completions", json={"messages": [USER], "stream": True, **fields})
    assert reply.status_code == 200, reply.text
    blocks = reply.text.removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_answer_has_the_openai_shape(served: Served) -> None:
    body = await chat(served, max_tokens=4)
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "echo")
    message = {"role": "assistant", "content": "[use", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == usage


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "a"}], "[user:a]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}], "[user:a b]"),
        ([{"role": "user", "content": []}], "[user:]"),
        ([{"role": "developer", "content": "d"}, USER], "[system:d][user:hi]"),
        ([{"role": "system", "content": "s", "name": None}, USER], "[system:s][user:hi]"),
        (
            [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
                {"role": "tool", "content": "7", "tool_call_id": "1"},
            ],
            '[user:hi][assistant:[{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}]][tool:7]',
        ),
        ([USER, {"role": "assistant", "content": None}], "[user:hi][assistant:]"),
    ],
)
async def test_what_the_template_sees(served: Served, messages: list[Any], text: str) -> None:
    assert await rendered(served, *messages) == text


async def test_options_of_the_template(served: Served) -> None:
    assert await rendered(served, chat_template_kwargs={"flag": "!"}) == "[user:hi]!"
    assert await rendered(served, add_generation_prompt=False) == "[user:hi"
    half = {"role": "assistant", "content": "I say "}
    assert await rendered(served, USER, half, continue_final_message=True) == "[user:hi][assistant:I say "


async def test_the_rest_of_the_context_is_the_default_and_max_completion_tokens_wins(served: Served) -> None:
    assert (await chat(served))["usage"]["total_tokens"] == 1000
    for limits, num_tokens in [
        ({"max_completion_tokens": 2, "max_tokens": 5}, 2),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 0}, 0),
    ]:
        assert (await chat(served, **limits))["usage"]["completion_tokens"] == num_tokens


async def test_the_same_messages_hit_the_cache_of_other_routes(served: Served) -> None:
    """TOK-02."""
    await chat(served, max_tokens=1)
    body = (await served.complete(prompt="[user:hi]", max_tokens=1)).json()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == body["usage"]["prompt_tokens"] - 1
    tokens = (await served.http.post("/tokenize", json={"messages": [USER]})).json()
    assert tokens == {"tokens": list(b"[user:hi]"), "count": 9, "max_model_len": 1000}


@pytest.mark.parametrize("step_s", [0.002], indirect=True)
async def test_a_stream_begins_with_the_role_and_joins_to_the_whole(served: Served) -> None:
    events = await stream(served, n=2, max_tokens=3, stream_options={"include_usage": True}, return_token_ids=True)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    whole = await chat(served, n=2, max_tokens=3, return_token_ids=True)
    assert whole["prompt_token_ids"] == list(b"[user:hi]")
    assert events.pop().items() >= {"choices": [], "usage": whole["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}}.items()
    for choice in whole["choices"]:
        mine = [(event, c) for event in events for c in event["choices"] if c["index"] == choice["index"]]
        head, c = mine[0]
        assert (c["delta"], c["finish_reason"], head["prompt_token_ids"]) == (
            {"role": "assistant", "content": ""},
            None,
            list(b"[user:hi]"),
        )
        assert all("role" not in c["delta"] for _, c in mine[1:])
        assert "".join(c["delta"].get("content", "") for _, c in mine) == choice["message"]["content"] == "[us"
        assert [token for _, c in mine for token in c.get("token_ids", [])] == choice["token_ids"] == list(b"[us")
        assert [c["finish_reason"] for _, c in mine if c["finish_reason"]] == ["length"]


async def test_log_probabilities_and_bytes_join_to_the_text(served: Served) -> None:
    """TOK-07."""
    say = {"role": "user", "content": "é한😀"}
    num_tokens = (await chat(served, say, max_tokens=1))["usage"]["prompt_tokens"]
    body = await chat(served, say, logprobs=True, top_logprobs=2, max_tokens=num_tokens)
    content = body["choices"][0]["logprobs"]["content"]
    assert (
        bytes(byte for entry in content for byte in entry["bytes"]).decode() == body["choices"][0]["message"]["content"] == "[user:é한😀]"
    )
    assert len(content) == num_tokens
    assert content[0].items() >= {"token": "[", "bytes": [91]}.items()
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * num_tokens
    assert content[0]["top_logprobs"][0].items() == {"token": "[", "logprob": content[0]["logprob"], "bytes": [91]}.items()
    assert content[6]["token"] == "bytes:\\xc3"
    events = await stream(served, messages=[say], logprobs=True, top_logprobs=2, max_tokens=num_tokens)
    parts = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == content
    bare = await chat(served, say, logprobs=True, max_tokens=1)
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_stop_and_eos(served: Served) -> None:
    choice = (await chat(served, stop="er"))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("[us", "stop")
    choice = (await chat(served, {"role": "user", "content": "x<eos>"}, logprobs=True))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("[user:x", "stop")
    assert choice["logprobs"]["content"][-1]["token"] == "<eos>"
    choice = await chat(served, {"role": "user", "content": "x<eos>"}, skip_special_tokens=False, ignore_eos=True, max_tokens=9)
    assert choice["choices"][0]["message"]["content"] == "[user:x<eos>]"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": "x"}, "max_tokens"),
    ({"min_tokens": 995}, "min_tokens"),
    ({"n": 0}, "n"),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_bad_values_are_named(served: Served, fields: dict[str, Any], param: str, is_stream: bool) -> None:
    reply = await served.http.post("/v1/chat/completions", json={"messages": [USER], "stream": is_stream} | fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert error["message"].startswith(param)
    assert served.echo.num_steps == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages[0].content[1].type",
        ),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = await served.http.post("/v1/chat/completions", json={"messages": [USER]} | fields)
    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", ["cache_control", "prompt_cache_breakpoint"])
@pytest.mark.parametrize("is_in_part", [True, False])
async def test_wishes_for_the_cache_inside_messages_are_refused_by_name(served: Served, route: str, name: str, is_in_part: bool) -> None:
    part: dict[str, Any] = {"type": "text", "text": "hi", **({name: {"type": "ephemeral"}} if is_in_part else {})}
    message = {"role": "user", "content": [part], **({} if is_in_part else {name: {"type": "ephemeral"}})}
    reply = await served.http.post(route, json={"messages": [USER, message]})
    assert reply.status_code == 400
    error = reply.json()["error"]
    param = f"messages[1].content[0].{name}" if is_in_part else f"messages[1].{name}"
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
async def test_unknown_names_inside_parts_are_named_once(served: Served, route: str) -> None:
    part = {"type": "text", "text": "hi", "detail": "high", "mood": 1, "cache_control": None, "user": "x"}
    reply = await served.http.post(route, json={"messages": [{"role": "user", "content": [part, part]}] * 2})
    assert reply.status_code == 200
    names = ("detail", "mood", "user")
    assert reply.headers["x-radixserve-ignored"] == ", ".join(f"messages[].content[].{name}" for name in names)


async def test_neutral_values_are_accepted(served: Served) -> None:
    neutral = {"tools": None, "tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True, "logprobs": False}
    neutral |= {"top_logprobs": None, "store": False, "user": "u", "modalities": ["text"], "logit_bias": None, "add_special_tokens": False}
    neutral |= {"prompt_cache_options": {"mode": "implicit"}}
    reply = await served.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1, **neutral})
    assert reply.status_code == 200, reply.text
    assert "x-radixserve-ignored" not in reply.headers


async def test_too_long_messages_and_a_model_without_a_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, fields in (("a" * 1000, {}), ("a" * 990, {"max_tokens": 4})):
        body = {"messages": [{"role": "user", "content": content}], "stream": True, **fields}
        reply = await served.http.post("/v1/chat/completions", json=body)
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert len((await chat(served, {"role": "user", "content": "a" * 991}))["choices"][0]["message"]["content"]) == 2
    monkeypatch.setattr(served.app.state.context.tokenizer, "chat_template", None)
    reply = await served.http.post("/v1/chat/completions", json={"messages": [USER]})
    assert reply.status_code == 400
    assert "no chat template" in reply.json()["error"]["message"]
