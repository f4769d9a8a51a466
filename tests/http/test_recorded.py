"""What foreign tools really send, as `make compat` recorded it, against the app: the same status, and what they read of the answers."""

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig, ServerConfig
from radixserve.engine.client import AsyncEngine
from radixserve.server.app import create_app
from radixserve.tokenizer import ChatTemplate
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.support.byte_tokenizer import EOS_ID
from tests.support.echo_engine import EchoEngine
from tests.support.thread_link import ThreadLink

FOLDER = Path(__file__).with_name("recorded")
TOOLS = ("bench_serving", "guidellm", "kvlint", "lm-eval", "sdks", "smg")
MODEL = "smollm2-135m-instruct"
TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
TOKEN_FIELDS = {"prompt", "input_ids", "tokens"}

# what the tools read of the other routes
REPLY_FIELDS = {
    "/v1/models": {"object", "data"},
    f"/v1/models/{MODEL}": {"id", "object", "created", "owned_by"},
    "/server_info": {"model_path", "tokenizer_path", "max_total_num_tokens"},
    "/model_info": {"model_path", "tokenizer_path"},
    "/v1/loads": {"loads", "dp_rank_count", "timestamp"},
    "/tokenizer_info": {"eos_token", "bos_token", "pad_token", "chat_template"},
    "/tokenize": {"tokens", "count"},
    "/detokenize": {"prompt"},
}
METRICS = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "sglang:cache_hit_rate",
    "sglang:token_usage",
    "sglang:num_running_reqs",
)


def recorded() -> list[Any]:
    requests = [(tool, json.loads(line)) for tool in TOOLS for line in (FOLDER / f"{tool}.jsonl").read_text("utf-8").splitlines()]
    return [pytest.param(request, id=f"{tool}-{number}-{request['path']}") for number, (tool, request) in enumerate(requests)]


@pytest.fixture
async def http(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    engine = await AsyncEngine.start(EngineConfig(), make_link=lambda: ThreadLink(EchoEngine(EngineConfig())))
    app = create_app(engine, tokenizer, ServerConfig(served_model_name=MODEL))
    monkeypatch.setattr(app.state.context.tokenizer, "chat_template", ChatTemplate(TEMPLATE, {"eos_token": "<eos>"}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client
    await engine.stop()


def in_vocabulary(value: Any, is_tokens: bool = False) -> Any:
    """The body with ids of the recorded model folded into those of the byte tokenizer."""
    if isinstance(value, dict):
        return {name: in_vocabulary(item, name in TOKEN_FIELDS) for name, item in value.items()}
    if isinstance(value, list):
        return [in_vocabulary(item, is_tokens) for item in value]
    return value % EOS_ID if is_tokens and isinstance(value, int) else value


@pytest.mark.parametrize("request_", recorded())
async def test_it_is_answered_as_the_tool_needs_it(http: httpx.AsyncClient, request_: dict[str, Any]) -> None:
    body = in_vocabulary(request_["body"])
    reply = await http.request(request_["method"], request_["path"], json=body)
    assert reply.status_code == request_["status"], reply.text
    assert "x-radixserve-ignored" not in reply.headers
    path = reply.url.path
    if reply.status_code != 200:
        assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    elif path in {"/v1/completions", "/v1/chat/completions", "/generate"}:
        check_generation(path, body, reply.text)
    elif path == "/metrics":
        assert [name for name in METRICS if f"\n{name}" not in reply.text] == []
    elif path in REPLY_FIELDS and request_["method"] != "HEAD":
        assert reply.json().keys() >= REPLY_FIELDS[path]


def check_generation(path: str, body: dict[str, Any], text: str) -> None:
    stream = body.get("stream", False)
    events = events_of(text) if stream else [json.loads(text)]
    if path == "/generate":
        check_native(body, events)
    elif stream:
        check_stream(path, body, events)
    elif path == "/v1/completions":
        check_completion(body, events[0])
    else:
        check_chat(body, events[0])


def events_of(text: str) -> list[dict[str, Any]]:
    """Every line is an event or empty: a load generator parses all others as JSON."""
    lines = [line for line in text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def prompts_of(body: dict[str, Any]) -> list[Any]:
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def check_usage(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)


def check_completion(body: dict[str, Any], reply: dict[str, Any]) -> None:
    assert reply.keys() >= {"id", "object", "created", "model", "choices", "usage"}
    check_usage(reply["usage"])
    prompts = prompts_of(body)
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(prompts) * (body.get("n") or 1)))
    for prompt, choice in zip([prompt for prompt in prompts for _ in range(body.get("n") or 1)], reply["choices"], strict=True):
        assert choice["finish_reason"] in {"stop", "length"}
        if body.get("echo") and body.get("logprobs") is not None:
            # the harness cuts by the length of what it sent, and compares a token with the largest of its top_logprobs
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(prompt) + body["max_tokens"]
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert all(max(top.values()) >= own for own, top in list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"]))[1:])


def check_chat(body: dict[str, Any], reply: dict[str, Any]) -> None:
    assert reply.keys() >= {"id", "object", "created", "model", "choices", "usage"}
    check_usage(reply["usage"])
    for choice in reply["choices"]:
        assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
        if body.get("logprobs"):
            entries = choice["logprobs"]["content"]
            assert len(entries) == reply["usage"]["completion_tokens"]
            assert all(len(entry["top_logprobs"]) == body["top_logprobs"] for entry in entries)


def check_stream(path: str, body: dict[str, Any], events: list[dict[str, Any]]) -> None:
    assert len({event["id"] for event in events}) == 1
    options = body.get("stream_options") or {}
    if options.get("include_usage"):
        last = events.pop()
        assert last["choices"] == []
        check_usage(last["usage"])
    if options.get("continuous_usage_stats"):
        assert all(event["usage"]["prompt_tokens"] > 0 for event in events)
    assert all(len(event["choices"]) == 1 for event in events)
    if path == "/v1/chat/completions":
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [event["choices"][0]["finish_reason"] for event in events][-1] in {"stop", "length"}
    if body.get("return_cached_tokens_details"):
        details = [event["sglext"]["cached_tokens_details"] for event in events if event.get("sglext")]
        assert details and details[-1]["device"] >= 0


def check_native(body: dict[str, Any], events: list[dict[str, Any]]) -> None:
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    meta = events[-1]["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert meta["completion_tokens"] == body["sampling_params"]["max_new_tokens"]
    assert meta.keys() >= {"id", "prompt_tokens", "cached_tokens", "cached_tokens_details"}
