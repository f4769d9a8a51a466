"""Bad input: a clear error in one shape, before any work, and a server that serves the next request."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radixserve.server.fields import show
from tests.http.conftest import Served
from tests.support.byte_tokenizer import VOCAB_SIZE
from tests.support.echo_engine import CONTEXT_LENGTH

JSON = {"content-type": "application/json"}


def assert_error(reply: httpx.Response, status: int, code: str | None, param: str | None) -> str:
    assert reply.status_code == status, reply.text
    assert reply.json().keys() == {"error"}
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert reply.headers["x-request-id"]
    return str(error["message"])


BAD_VALUES: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", ["a", ""]),
    ("prompt", ["a", 1]),
    ("prompt", [1, "a"]),
    ("prompt", [[1], "a"]),
    ("prompt", [[[1]]]),
    ("prompt", 7),
    ("prompt", True),
    ("prompt", {"text": "a"}),
    ("prompt", [-1]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", [None]),
    ("prompt", [VOCAB_SIZE]),
    ("prompt", [999_999]),
    ("prompt", [2**40]),
    ("prompt", [[1], [VOCAB_SIZE]]),
    ("prompt", ["a"] * 1025),
    ("max_tokens", -1),
    ("max_tokens", "16"),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("max_tokens", 10**18),
    ("max_tokens", 1e18),
    ("max_tokens", 10**30),
    ("temperature", -0.1),
    ("temperature", 1e308),
    ("temperature", "hot"),
    ("temperature", False),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", -1),
    ("min_p", 2),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 100_000),
    ("n", "2"),
    ("n", True),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1e30),
    ("seed", "x"),
    ("stop", [""]),
    ("stop", ""),
    ("stop", 5),
    ("stop", [1]),
    ("stop", ["x"] * 65),
    ("stop", "x" * 5000),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", []),
    ("stream_options", "usage"),
    ("ignore_eos", 1),
    ("cache_salt", 5),
    ("extra_key", ["a"]),
    ("model", 5),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("logprobs", "5"),
    ("echo", 1),
    ("frequency_penalty", 2.5),
    ("presence_penalty", -2.1),
    ("presence_penalty", "high"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 2.1),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", [1]),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stop_token_ids", [10**6, -5]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [-5]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("stop_token_ids", [5] * 1025),
    ("skip_special_tokens", 0),
    ("priority", 2**31),
    ("priority", 0.5),
    ("rid", 5),
    ("rid", "x" * 129),
    ("rid", "a\n"),
    ("prompt", [["a"]]),
    ("prompt", [{}]),
    ("prompt", [[1], [-1]]),
    ("prompt", [[1]] * 1025),
]

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
LARGE: Any = [{"name": "x" * 50_000}, *range(5000)]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("field", "value"), BAD_VALUES, ids=lambda value: str(value)[:30])
async def test_bad_value_is_a_400_that_names_the_field(served: Served, field: str, value: Any, is_stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "a", "stream": is_stream} | {field: value}
    message = assert_error(await served.complete(**body), 400, "invalid_value", field)
    assert message.startswith(field)
    assert "expected" in message
    assert len(message) < 300
    assert served.echo.num_steps == 0


async def test_bad_field_of_an_object_is_named_with_its_path(served: Served) -> None:
    reply = await served.complete(prompt="a", stream=True, stream_options={"include_usage": "yes"})
    assert_error(reply, 400, "invalid_value", "stream_options.include_usage")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"prompt=a",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 10_000,
        b"\x80\x04]",
    ],
)
async def test_what_is_no_json_is_a_400(served: Served, content: bytes) -> None:
    message = assert_error(await served.http.post("/v1/completions", content=content, headers=JSON), 400, "invalid_value", None)
    assert "valid JSON" in message


@pytest.mark.parametrize("content", [b"null", b"[]", b'"a"', b"1"])
async def test_json_that_is_no_object_is_a_400(served: Served, content: bytes) -> None:
    message = assert_error(await served.http.post("/v1/completions", content=content, headers=JSON), 400, "invalid_value", None)
    assert "expected a JSON object" in message


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", ""])
async def test_content_type_of_the_body_does_not_matter(served: Served, content_type: str) -> None:
    reply = await served.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": content_type})
    assert reply.status_code == 200


@pytest.mark.parametrize("value", [DEEP, LARGE, {"a": DEEP}, [LARGE, DEEP]], ids=["deep", "large", "deep-object", "both"])
@pytest.mark.parametrize("field", ["prompt", "temperature", "stop", "model", "n", "seed", "logprobs", "best_of", "tools"])
async def test_deep_and_large_values_are_refused_in_few_words(served: Served, field: str, value: Any) -> None:
    body = json.dumps({"prompt": "a"} | {field: value}).encode()
    reply = await served.http.post("/v1/completions", content=body, headers=JSON)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field
    assert len(reply.json()["error"]["message"]) < 300


@pytest.mark.parametrize("depth", [300, 1000, 1023, 1024, 1025, 40_000])
@pytest.mark.parametrize(("head", "tail"), [(b'{"prompt": ', b"}"), (b'{"prompt": "a", "colour": ', b"}"), (b"", b"")])
async def test_no_depth_is_an_internal_error(served: Served, depth: int, head: bytes, tail: bytes) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        content = head + opening * min(depth, 15_000) + b"1" + closing * min(depth, 15_000) + tail
        reply = await served.http.post("/v1/completions", content=content, headers=JSON)
        assert reply.status_code in (200, 400), reply.text
        assert reply.status_code == 400 or b"colour" in head


class Watched(list[Any]):
    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.num_read += 1
            yield item


def test_a_value_is_shown_at_the_cost_of_what_is_shown() -> None:
    huge = Watched([7] * 100_000)
    assert show({"a": huge}) == '{"a":[' + "7,7," * 13 + "7," + "..."
    assert huge.num_read < 60
    assert show(DEEP) == "[" * 60 + "..."
    assert [show(value) for value in ([], {}, [[]], None, True, 1.5, [1, "a"], {"a": {"b": []}}, object())] == [
        *("[]", "{}", "[[]]", "null", "true", "1.5", '[1,"a"]', '{"a":{"b":[]}}', "object"),
    ]


@pytest.mark.parametrize("prompt", [[999_999] * (CONTEXT_LENGTH + 1), [[97], ["x"] * CONTEXT_LENGTH]])
async def test_too_many_token_ids_are_refused_before_they_are_looked_at(served: Served, prompt: Any) -> None:
    assert_error(await served.complete(prompt=prompt), 400, "context_length_exceeded", "prompt")


async def test_many_middling_texts_are_encoded_off_the_loop_in_one_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    encode = served.app.state.context.tokenizer.encode

    def watched(text: str, add_special_tokens: bool) -> list[int]:
        threads.append(threading.get_ident())
        return encode(text, add_special_tokens)

    monkeypatch.setattr(served.app.state.context.tokenizer, "encode", watched)
    assert (await served.complete(prompt=["a" * 900] * 10, max_tokens=1)).status_code == 200
    assert len(threads) == 10
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    assert (await served.complete(prompt=["a" * 900] * 2, max_tokens=1)).status_code == 200
    assert threads[10:] == [threading.get_ident()] * 2


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [(600, CONTEXT_LENGTH - 599, "prompt"), (CONTEXT_LENGTH, 1, "prompt"), (1, CONTEXT_LENGTH, "max_tokens"), (1, 2**31 - 1, "max_tokens")],
)
async def test_prompt_and_max_tokens_above_the_context_are_refused(
    served: Served, num_prompt: int, max_tokens: int, param: str, is_stream: bool
) -> None:
    reply = await served.complete(prompt="a" * num_prompt, max_tokens=max_tokens, stream=is_stream)
    message = assert_error(reply, 400, "context_length_exceeded", param)
    assert message.startswith(f"This model's maximum context length is {CONTEXT_LENGTH} tokens. However, you requested")
    assert f"({num_prompt} in the prompt, {max_tokens} in the completion)" in message


async def test_the_whole_context_may_be_used(served: Served) -> None:
    reply = await served.complete(prompt="a" * 600, max_tokens=CONTEXT_LENGTH - 600)
    assert reply.json()["usage"]["total_tokens"] == CONTEXT_LENGTH


class TestSmallPool:
    @pytest.fixture
    def max_total_tokens(self) -> int:
        return 100

    async def test_what_does_not_fit_the_pool_is_refused(self, served: Served) -> None:
        message = assert_error(await served.complete(prompt="a" * 90, max_tokens=11), 400, "context_length_exceeded", "prompt")
        assert message.startswith("This model's maximum context length is 100 tokens. However, you requested 101 tokens (90 in the prompt,")
        assert "KV pool" in message
        assert (await served.complete(prompt="a" * 90, max_tokens=10)).status_code == 200


UNSUPPORTED: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("best_of", 0),
    ("best_of", True),
    ("suffix", "end"),
    ("regex", "a+"),
    ("ebnf", "root ::= a"),
    ("json_schema", "{}"),
    ("response_format", {"type": "json_object"}),
    ("lora_path", "adapter"),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 1),
    ("max_completion_tokens", 5),
    ("max_new_tokens", 5),
    ("sampling_seed", 5),
    ("return_logprob", True),
    ("prompt_cache_options", {"mode": "explicit"}),
    ("guided_json", {"type": "object"}),
    ("guided_json", {}),  # any JSON
    ("tools", [{"type": "function"}]),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=lambda value: str(value)[:30])
async def test_known_fields_that_are_not_built_are_refused_by_name(served: Served, field: str, value: Any) -> None:
    message = assert_error(await served.complete(prompt="a", **{field: value}), 400, "unsupported_parameter", field)
    assert field in message


NEUTRAL: dict[str, Any] = {
    "echo": False,
    "logprobs": None,
    "best_of": 1,
    "suffix": None,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_tokens": 0,
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "priority": 0,
    "return_token_ids": False,
    "regex": None,
    "response_format": {"type": "text"},
    "lora_path": None,
    "stop": None,
    "seed": None,
    "temperature": None,
    "top_p": None,
    "n": None,
    "stream": None,
    "stream_options": None,
    "user": "someone",
    "metadata": {"a": "b"},
    "return_cached_tokens_details": False,
}


async def test_neutral_values_are_accepted_and_nothing_is_called_ignored(served: Served) -> None:
    for field, value in NEUTRAL.items():
        reply = await served.complete(prompt="a", **{field: value})
        assert reply.status_code == 200, (field, reply.text)
    reply = await served.complete(prompt="ab", **NEUTRAL)
    assert reply.json()["choices"][0]["text"] == "ab" * 8
    assert "x-radixserve-ignored" not in reply.headers


async def test_best_of_equal_to_n_is_accepted(served: Served) -> None:
    assert len((await served.complete(prompt="a", n=2, best_of=2)).json()["choices"]) == 2


@pytest.mark.parametrize("is_stream", [False, True])
async def test_unknown_fields_are_named_in_a_header_and_logged_once(
    served: Served, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "a", "stream": is_stream, "colour": 1, "é\r\nx: y": 2, "stream_options": {"include_mood": True}}
    for _ in range(2):
        reply = await served.complete(**body)
        assert reply.status_code == 200
        assert reply.headers["x-radixserve-ignored"] == "colour, \\xe9??x: y, stream_options.include_mood"
    assert sum("colour" in record.message for record in caplog.records) == 1


async def test_unknown_route_wrong_method_and_large_body_have_the_same_shape(served: Served) -> None:
    assert_error(await served.http.get("/nothing/here"), 404, "not_found", None)
    assert_error(await served.http.post("/v2/completions", json={}), 404, "not_found", None)
    wrong_method = await served.http.get("/v1/completions")
    assert_error(wrong_method, 405, "method_not_allowed", None)
    assert wrong_method.headers["allow"] == "POST"
    assert_error(await served.complete(prompt="a" * 100_001), 413, "request_too_large", None)


async def test_large_body_without_a_length_is_refused_too(served: Served) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 10_000

    assert_error(await served.http.post("/v1/completions", content=chunks()), 413, "request_too_large", None)


@pytest.mark.parametrize("path", ["/v1/models", "/nothing", "/health"])
async def test_request_id_is_returned_as_given(served: Served, path: str) -> None:
    assert (await served.http.get(path, headers={"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"
    first, second = [(await served.http.get(path)).headers["x-request-id"] for _ in range(2)]
    assert first != second
    assert (await served.http.get(path, headers={"x-request-id": "x" * 500})).headers["x-request-id"] != "x" * 500


async def test_an_error_of_ours_tells_the_client_nothing_of_the_inside(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr(served.engine, "submit", fail)
    for is_stream in (False, True):
        reply = await served.complete(prompt="a", stream=is_stream)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal_error"
        assert "secret" not in reply.text
        assert reply.headers["x-request-id"]
