"""Bodies that no good client sends, as bytes: data for test_hostile.py. Each is to be answered, with a 4xx unless it says otherwise."""

import gzip
import json
from typing import Any, NamedTuple

from tests.support.byte_tokenizer import VOCAB_SIZE

JSON = "application/json"
MEGABYTE = 2**20


class Hostile(NamedTuple):
    name: str
    body: bytes
    may_be_200: bool = False
    headers: tuple[str, ...] = (f"Content-Type: {JSON}",)
    method: str = "POST"
    path: str = "/v1/completions"
    is_chunked: bool = False


def field(name: str, value: Any, may_be_200: bool = False) -> Hostile:
    body = json.dumps({"prompt": "a", "max_tokens": 2} | {name: value}).encode()
    return Hostile(f"{name}={str(value)[:20]}", body, may_be_200)


def raw(name: str, body: bytes | str, may_be_200: bool = False) -> Hostile:
    return Hostile(name, body if isinstance(body, bytes) else body.encode(), may_be_200)


DEEP_LIST = "[" * 900 + "1" + "]" * 900
LARGE_TEXT = "x" * (10 * MEGABYTE)

VALUES = [
    *(field("prompt", value) for value in (None, "", [], [[]], ["", "a"], 7, True, {}, {"a": 1}, [[[1]]], [1, "a"], ["a", [1]], [None])),
    *(field("prompt", value) for value in ([-1], [VOCAB_SIZE], [2**31], [2**63], [1.5], [True], [[1], [-5]], [[1], [VOCAB_SIZE]])),
    *(field("max_tokens", value) for value in (-1, "16", True, 1.5, 2**31, 10**18, 10**30, [], {})),
    *(field("temperature", value) for value in (1e308, -0.1, "hot", True, [], {}, 10**30)),
    *(field("top_p", value) for value in (0, -1, 1.01, "x", 1e300)),
    *(field("top_k", value) for value in (-2, 0.5, 2**40, "x")),
    *(field("min_p", value) for value in (-1, 2, [])),
    *(field("n", value) for value in (0, -1, 129, 100_000, 2**70, "2", True, 1.0)),
    *(field("seed", value) for value in (2**63, -(2**63) - 1, 1e30, "x", [1])),
    *(field("stop", value) for value in ([""], "", 5, [1], [None], [["a"]], ["x"] * 65, "x" * 5000, {})),
    *(field("stream", value) for value in ("yes", 1, [])),
    *(field("stream_options", value) for value in ([], "usage", {"include_usage": "yes"})),
    *(field("best_of", value) for value in (-1, 100_000, "x")),
    *(field("model", value) for value in (5, "no-such-model", "../../etc/passwd", ["echo"], "m" * MEGABYTE)),
    *(field("logit_bias", value) for value in ({"x": 1}, {"-1": 1}, {"5": 1e9}, [1])),
    *(field("tools", value) for value in ([{"type": "function"}], "x")),
    *(field("response_format", value) for value in ({"type": "json_object"}, "x")),
    field("prompt", ["a"] * 1025),
    field("logprobs", 10**9),
    field("logprobs", "x"),
    field("cache_salt", 5),
    field("extra_key", ["a"]),
    field("ignore_eos", 1),
    field("regex", "(a+)+$"),
    field("unknown", {"deep": [[[]]]}, may_be_200=True),
    field("unknown\r\nx-evil: 1", 1, may_be_200=True),
    field("prompt", "\u0000\u0001\ufffe\uffff\u202e", may_be_200=True),
    field("prompt", "e" + "\u0301" * 400, may_be_200=True),
    field("prompt", "<eos><eos>", may_be_200=True),
]

SYNTAX = [
    raw("empty", b""),
    raw("truncated", b'{"prompt": "a", "max_tok'),
    raw("no object: null", b"null"),
    raw("no object: list", b"[]"),
    raw("no object: string", b'"a"'),
    raw("NaN", b'{"prompt": "a", "temperature": NaN}'),
    raw("Infinity", b'{"prompt": "a", "temperature": -Infinity}'),
    raw("overflowing float", b'{"prompt": "a", "temperature": 1e999}'),
    raw("integer of a thousand digits", b'{"prompt": "a", "seed": ' + b"9" * 1000 + b"}"),
    raw("lone surrogate", rb'{"prompt": "\ud800"}'),
    raw("lone low surrogate in stop", rb'{"prompt": "a", "stop": "\udc00"}'),
    raw("reversed surrogates", rb'{"prompt": "\udc00\ud800"}'),
    raw("invalid UTF-8", b'{"prompt": "\xff\xfe"}'),
    raw("UTF-16", '{"prompt": "a"}'.encode("utf-16")),
    raw("byte order mark", b'\xef\xbb\xbf{"prompt": "a"}'),
    raw("single quotes", b"{'prompt': 'a'}"),
    raw("trailing comma", b'{"prompt": "a",}'),
    raw("comment", b'{"prompt": "a" /* b */}'),
    raw("two objects", b'{"prompt": "a"}{"prompt": "b"}'),
    raw("pickle", b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94."),
    raw("form", b"prompt=a&max_tokens=1"),
    raw("duplicate keys", b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', may_be_200=True),
    raw("duplicate keys, the last one wrong", b'{"prompt": "a", "n": 1, "n": 0}'),
    raw("deep prompt", '{"prompt": ' + DEEP_LIST + "}"),
    raw("deep temperature", '{"prompt": "a", "temperature": ' + DEEP_LIST + "}"),
    raw("deep unknown", '{"prompt": "a", "max_tokens": 1, "x": ' + DEEP_LIST + "}", may_be_200=True),
    raw("too deep", b"[" * 100_000),
    raw("too deep, closed", b'{"prompt":' * 5000 + b"1" + b"}" * 5000),
]

LARGE = [
    raw("prompt of 10 MB", json.dumps({"prompt": LARGE_TEXT})),
    raw("prompt of 10 MB in a list", json.dumps({"prompt": ["a", LARGE_TEXT]})),
    raw("cache_salt of 10 MB", json.dumps({"prompt": "a", "cache_salt": LARGE_TEXT})),
    raw("stop of 10 MB", json.dumps({"prompt": "a", "stop": LARGE_TEXT})),
    raw("10 MB of token ids", json.dumps({"prompt": [97] * (2 * MEGABYTE)})),
    raw("10 MB of prompts", json.dumps({"prompt": ["ab"] * (2 * MEGABYTE)})),
    raw("10 MB of stop strings", json.dumps({"prompt": "a", "stop": ["ab"] * (2 * MEGABYTE)})),
    raw("10 MB of empty lists", b'{"prompt": [' + b"[]," * (3 * MEGABYTE) + b"[]]}"),
    raw("30 MB of empty lists", b'{"prompt": [' + b"[]," * (10 * MEGABYTE) + b"[]]}"),
    raw("1.8 M unknown fields", b'{"prompt": "a"' + b"".join(b',"k%d":1' % i for i in range(1_800_000)) + b"}"),
    raw("10 MB of text full of brackets", json.dumps({"prompt": '[{:,"' * (2 * MEGABYTE)})),
    raw("10 MB of blanks", b" " * (10 * MEGABYTE)),
    raw("200,000 unknown fields", json.dumps({"prompt": "a", "max_tokens": 1} | {f"f{i}": i for i in range(200_000)}), may_be_200=True),
    raw("a field name of 1 MB", json.dumps({"prompt": "a", "max_tokens": 1, "k" * MEGABYTE: 1}), may_be_200=True),
    raw("a body of 40 MB", b'{"prompt": "' + b"x" * (40 * MEGABYTE) + b'"}'),
    Hostile("a chunked body of 40 MB", b'{"prompt": "' + b"x" * (40 * MEGABYTE) + b'"}', is_chunked=True),
]

GOOD_BODY = b'{"prompt": "a", "max_tokens": 1}'

TRANSPORT = [
    Hostile("gzip", gzip.compress(GOOD_BODY), headers=(f"Content-Type: {JSON}", "Content-Encoding: gzip")),
    Hostile("gzip bomb", gzip.compress(b" " * (50 * MEGABYTE)), headers=("Content-Encoding: gzip",)),
    Hostile("an encoding that nobody knows", GOOD_BODY, headers=("Content-Encoding: sdch",)),
    Hostile("content type form", GOOD_BODY, True, headers=("Content-Type: application/x-www-form-urlencoded",)),
    Hostile("content type multipart", GOOD_BODY, True, headers=("Content-Type: multipart/form-data; boundary=x",)),
    Hostile("content type of nonsense", GOOD_BODY, True, headers=("Content-Type: \xff;;;",)),
    Hostile("no content type", GOOD_BODY, True, headers=()),
    Hostile("chunked", GOOD_BODY, True, is_chunked=True),
    Hostile("chunked, truncated JSON", GOOD_BODY[:-1], is_chunked=True),
    Hostile("request id with a line break", GOOD_BODY, True, headers=("x-request-id: a\tb",)),
    Hostile("request id of 10,000 characters", GOOD_BODY, True, headers=("x-request-id: " + "i" * 10_000,)),
    Hostile("wrong method", GOOD_BODY, method="PUT"),
    Hostile("method that nobody knows", GOOD_BODY, method="BREW"),
    Hostile("path of 10,000 characters", GOOD_BODY, path="/" + "p" * 10_000),
    Hostile("path that climbs", GOOD_BODY, path="/v1/../../etc/passwd"),
    Hostile("path with a null byte", GOOD_BODY, path="/v1/completions%00"),
    Hostile("flush with a timeout of nonsense", b"", path="/flush_cache?timeout=1e999"),
]

CHAT = "/v1/chat/completions"


def at(path: str, body: Any, may_be_200: bool = False) -> Hostile:
    return Hostile(f"{path} {str(body)[:90]}", json.dumps(body).encode(), may_be_200, path=path)


HELLO = {"role": "user", "content": "hello"}

OTHER_ROUTES = [
    at(CHAT, {}),
    *(
        at(CHAT, {"messages": value})
        for value in (None, [], "hello", [[]], [1], [{}], [{"role": "user"}], [{"role": "evil", "content": "x"}])
    ),
    *(at(CHAT, {"messages": [{"role": "user", "content": value}]}) for value in (5, [1], [{"type": "image_url"}], {"text": "x"})),
    at(CHAT, {"messages": [HELLO], "max_tokens": 2}, may_be_200=True),
    at(CHAT, {"logprobs": 3, "messages": [HELLO]}),
    at(CHAT, {"top_logprobs": 10**9, "messages": [HELLO]}),
    at(CHAT, {"chat_template_kwargs": {"messages": []}, "messages": [HELLO]}),
    at(CHAT, {"messages": [HELLO] * 20_000}),
    at(CHAT, {"x": 10, "messages": [{"role": "user", "content": LARGE_TEXT}]}),
    *(at("/generate", value) for value in ({}, {"text": ""}, {"text": "a", "input_ids": [1]}, {"input_ids": [[]]}, {"input_ids": [-1]})),
    *(at("/generate", {"text": "a", "sampling_params": value}) for value in (5, "x", [1], [{}, {}], {"n": 0}, {"max_new_tokens": -1})),
    *(at("/generate", {"text": "a", "rid": value}) for value in (5, "", ["a", "b"], "x" * 1000)),
    at("/generate", {"text": LARGE_TEXT}),
    at("/generate", {"logprob_start_len": -2, "text": "a"}),
    at("/v1/completions", {"n": 128, "echo": True, "logprobs": 20, "prompt": [[97] * 500] * 8, "max_tokens": 0}),
    *(
        at("/tokenize", value)
        for value in ({}, {"prompt": 5}, {"prompt": []}, {"prompt": "a", "messages": [HELLO]}, {"prompt": LARGE_TEXT})
    ),
    *(
        at("/detokenize", value)
        for value in ({}, {"tokens": 5}, {"tokens": [-1]}, {"tokens": [10**9]}, {"tokens": ["a"]}, {"tokens": [[1], 2]})
    ),
    *(at("/abort_request", value) for value in ({}, {"rid": ""}, {"rid": 5}, {"rid": ["a"]}, {"abort_all": "yes"})),
]

ALL = [*OTHER_ROUTES, *VALUES, *SYNTAX, *LARGE, *TRANSPORT]

# Nothing is wrong with these: answered by a 200 of megabytes, in a stream too.
SCORED_IDS = [97 + number % 20 for number in range(900)]
_NATIVE = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20, "return_text_in_logprobs": True}
LARGE_AND_VALID = [
    at(path, body | {"stream": is_stream}, may_be_200=True)
    for is_stream in (False, True)
    for path, body in (
        ("/v1/completions", {"prompt": SCORED_IDS, "echo": True, "logprobs": 20, "max_tokens": 2, "n": 4}),
        ("/v1/completions", {"prompt": [SCORED_IDS] * 4, "echo": True, "logprobs": 20, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "a", "logprobs": 20, "max_tokens": 200, "ignore_eos": True, "n": 4}),
        ("/generate", {"input_ids": SCORED_IDS, "sampling_params": {"max_new_tokens": 30}, **_NATIVE}),
        ("/generate", {"input_ids": [SCORED_IDS] * 4, "sampling_params": {"max_new_tokens": 2}, **_NATIVE}),
    )
]
