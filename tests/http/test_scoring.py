"""What evaluation harnesses read of /v1/completions: echo, log-probabilities, token ids; and the routes of the tokenizer."""

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from radixserve.core import Request, RequestOutput
from radixserve.engine.streams import RequestStream, StreamGroup
from radixserve.tokenizer import ChatTemplate
from tests.http.conftest import Served
from tests.support.byte_tokenizer import EOS_ID
from tests.support.echo_engine import echo_logprob

LISTS = ("text_offset", "tokens", "token_logprobs", "top_logprobs")


async def choice(served: Served, **body: Any) -> dict[str, Any]:
    reply = await served.complete(**body)
    assert reply.status_code == 200, reply.text
    (only,) = reply.json()["choices"]
    shown: dict[str, Any] = only
    return shown


async def streamed(served: Served, **body: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream, joined."""
    reply = await served.complete(stream=True, **body)
    assert reply.status_code == 200, reply.text
    joined: dict[int, dict[str, Any]] = {}
    for block in reply.text.removesuffix("\n\n").split("\n\n")[:-1]:
        for part in json.loads(block.removeprefix("data: "))["choices"]:
            whole = joined.setdefault(part["index"], {"text": "", "logprobs": None, "token_ids": []})
            whole["text"] += part["text"]
            whole["token_ids"] += part.get("token_ids") or []
            if part.get("prompt_token_ids"):
                whole["prompt_token_ids"] = part["prompt_token_ids"]
            if part["logprobs"] is not None:
                earlier = whole["logprobs"] or {name: [] for name in LISTS}
                whole["logprobs"] = {name: earlier[name] + part["logprobs"][name] for name in LISTS}
    return joined


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
async def test_echo_with_log_probabilities_has_an_entry_per_token(served: Served, prompt: Any, max_tokens: int) -> None:
    """USAGE-04, USAGE-05, API-07; twice, since the second finds its prompt cached (USAGE-01)."""
    for _ in range(2):
        shown = await choice(served, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
        assert shown["text"] == "abc" + "a" * max_tokens
        assert shown["finish_reason"] == "length"
        logprobs = shown["logprobs"]
        assert logprobs["tokens"] == list(shown["text"])
        assert logprobs["text_offset"] == list(range(3 + max_tokens))
        assert logprobs["token_logprobs"] == [None, *(echo_logprob(ord(char), 1).logprob for char in shown["text"][1:])]
        assert logprobs["top_logprobs"][0] is None
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:]] == logprobs["token_logprobs"][1:]


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_the_choices_of_a_prompt_score_it_once(served: Served, monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    """All of them show it, also where a later choice is the first that the engine has news of."""
    added: list[Request] = []
    submit = served.engine.submit

    def noting(request: Request) -> RequestStream:
        added.append(request)
        return submit(request)

    monkeypatch.setattr(served.engine, "submit", noting)
    body = {"prompt": ["abc", "de"], "n": 3, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    reply = await served.complete(**body)
    whole = reply.json()["choices"]
    assert [request.sampling.prompt_logprobs for request in added] == [2, None, None] * 2
    monkeypatch.setattr(StreamGroup, "take", newest_first(StreamGroup.take))
    parts = await streamed(served, **body)
    for index, choice in enumerate(whole):
        assert choice["logprobs"] == whole[index - index % 3]["logprobs"]
        assert choice["logprobs"]["tokens"] == list(choice["text"])
        assert len(choice["text"]) == (3, 2)[index // 3] + max_tokens
        assert parts[index] == {"text": choice["text"], "logprobs": choice["logprobs"], "token_ids": []}


def newest_first(
    take: Callable[[StreamGroup], tuple[int, RequestOutput] | None],
) -> Callable[[StreamGroup], tuple[int, RequestOutput] | None]:
    def take_newest(group: StreamGroup) -> tuple[int, RequestOutput] | None:
        group._ready = deque(sorted(group._ready, reverse=True))
        return take(group)

    return take_newest


async def test_a_batch_as_evaluation_harnesses_send_it(served: Served) -> None:
    """Token ids, one token more than the prompt, and that token stays in the lists though it is EOS."""
    prompts = [[97, 98, 99], [100], [EOS_ID, 97]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234, "model": "echo"}
    reply = (await served.complete(**body)).json()
    for index, shown in enumerate(reply["choices"]):
        assert shown["index"] == index
        assert len(shown["logprobs"]["token_logprobs"]) == len(prompts[index]) + 1
        assert shown["logprobs"]["token_logprobs"][0] is None
    assert reply["choices"][2]["logprobs"]["tokens"] == ["<eos>", "a", "<eos>"]
    assert reply["choices"][2]["text"] == "a"
    assert reply["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("num_top", [0, 1, 5])
async def test_top_log_probabilities_hold_the_token_itself(served: Served, num_top: int) -> None:
    shown = await choice(served, prompt="ab", logprobs=num_top, max_tokens=2)
    assert [len(top) for top in shown["logprobs"]["top_logprobs"]] == [max(1, num_top)] * 2
    assert shown["logprobs"]["top_logprobs"][0]["a"] == shown["logprobs"]["token_logprobs"][0]
    assert shown["logprobs"]["text_offset"] == [0, 1]


async def test_offsets_count_characters_of_the_text(served: Served) -> None:
    shown = await choice(served, prompt="é<eos>b", echo=True, logprobs=0, max_tokens=5, ignore_eos=True)
    assert shown["text"] == "é<eos>bé" + "b" + "\ufffd"
    logprobs = shown["logprobs"]
    assert logprobs["tokens"][:4] == ["bytes:\\xc3", "bytes:\\xa9", "<eos>", "b"]
    assert logprobs["text_offset"] == [0, 0, 1, 6, 7, 7, 8, 8, 9]


@pytest.mark.parametrize("step_s", [0.001], indirect=True)
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "é😀", "max_tokens": 9, "logprobs": 2, "echo": True},
        {"prompt": ["abc", "de"], "n": 2, "max_tokens": 4, "logprobs": 0, "echo": True},
        {"prompt": [[97, 0xC3], [98]], "max_tokens": 3, "logprobs": 1, "echo": True},
        {"prompt": "abcdef", "stop": "de", "logprobs": 1, "return_token_ids": True},
        {"prompt": "ab<eos>", "logprobs": 1, "return_token_ids": True, "echo": True},
        {"prompt": "ab<eos>", "skip_special_tokens": False, "ignore_eos": True, "max_tokens": 4, "echo": True},
        {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": "abc", "max_tokens": 0},
    ],
    ids=str,
)
async def test_a_stream_joins_to_the_whole(served: Served, body: dict[str, Any]) -> None:
    whole = (await served.complete(**body)).json()
    joined = await streamed(served, **body)
    for shown in whole["choices"]:
        mine = joined[shown["index"]]
        for name in ("text", "logprobs", "token_ids", "prompt_token_ids"):
            assert mine.get(name) == shown.get(name, [] if name == "token_ids" else None), name
    num_tokens = whole["usage"]["completion_tokens"]
    if "logprobs" in body and "echo" not in body:
        assert len(whole["choices"][0]["logprobs"]["tokens"]) == num_tokens
    if "return_token_ids" in body:
        assert len(whole["choices"][0]["token_ids"]) == num_tokens


async def test_token_ids_are_returned_where_asked(served: Served) -> None:
    shown = await choice(served, prompt="ab<eos>", return_token_ids=True)
    assert (shown["prompt_token_ids"], shown["token_ids"]) == ([97, 98, EOS_ID], [97, 98, EOS_ID])


async def test_cached_tokens_by_tier(served: Served) -> None:
    await served.complete(prompt="abcd", max_tokens=1)
    body = (await served.complete(prompt="abcd", max_tokens=1, return_cached_tokens_details=True)).json()
    assert body["sglext"] == {"cached_tokens_details": {"device": 3, "host": 0}}
    reply = await served.complete(prompt="abcd", max_tokens=1, return_cached_tokens_details=True, stream=True)
    assert json.loads(reply.text.split("\n\n")[-3].removeprefix("data: "))["sglext"] == body["sglext"]


async def test_stop_tokens_and_min_tokens(served: Served) -> None:
    shown = await choice(served, prompt="abcd", stop_token_ids=[ord("c")], max_tokens=20)
    assert (shown["text"], shown["finish_reason"]) == ("ab", "stop")
    shown = await choice(served, prompt="abcd", stop_token_ids=[ord("c")], min_tokens=5, max_tokens=20)
    assert (shown["text"], shown["finish_reason"]) == ("abcdab", "stop")


async def test_what_the_engine_is_asked_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Request] = []
    submit = served.engine.submit

    def watched(request: Request) -> RequestStream:
        requests.append(request)
        return submit(request)

    monkeypatch.setattr(served.engine, "submit", watched)
    asked = {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.5, "temperature": 0.5, "top_k": 3}
    common = {**asked, "logit_bias": {"5": 1, "05": -2.5, "7": 100}}
    template = ChatTemplate("{{ messages[0].content }}", {})
    monkeypatch.setattr(served.app.state.context.tokenizer, "chat_template", template)
    limits = {"max_tokens": 4, "min_tokens": 2, "priority": -3}
    for path, body in {
        "/v1/completions": {"prompt": "a", **limits, **common},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], **limits, **common},
        "/generate": {"text": "a", "priority": -3, "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 2, **common}},
    }.items():
        requests.clear()
        reply = await served.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        (request,) = requests
        sampling = request.sampling
        assert {name: getattr(sampling, name) for name in asked} == asked
        assert (sampling.logit_bias, sampling.max_tokens, sampling.min_tokens) == (((5, -2.5), (7, 100.0)), 4, 2)
        assert (request.priority, list(request.prompt_ids)) == (-3, [97])


@pytest.mark.parametrize("path", ["", "/v1"])
async def test_tokenize_and_detokenize(served: Served, path: str) -> None:
    one = (await served.http.post(f"{path}/tokenize", json={"prompt": "é<eos>"})).json()
    assert one == {"tokens": [0xC3, 0xA9, EOS_ID], "count": 3, "max_model_len": 1000}
    several = (await served.http.post(f"{path}/tokenize", json={"prompt": ["a", "bc"], "model": "echo"})).json()
    assert (several["tokens"], several["count"]) == ([[97], [98, 99]], [1, 2])
    assert (await served.http.post(f"{path}/detokenize", json={"tokens": one["tokens"]})).json() == {"prompt": "é", "text": "é"}
    kept = await served.http.post(f"{path}/detokenize", json={"tokens": [one["tokens"], []], "skip_special_tokens": False})
    assert kept.json()["prompt"] == kept.json()["text"] == ["é<eos>", ""]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages"),  # there is no chat template
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
    ],
)
async def test_bad_input_of_the_tokenizer_routes(served: Served, route: str, body: dict[str, Any], param: str) -> None:
    reply = await served.http.post(route, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert (await served.http.post(route, json={**body, "model": "other"})).status_code == 404


async def test_tokenizer_info(served: Served) -> None:
    info = (await served.http.get("/tokenizer_info")).json()
    assert info == {"bos_token": None, "eos_token": "<eos>", "pad_token": None, "chat_template": None}
