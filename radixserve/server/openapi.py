"""The OpenAPI description's bodies: the routes read JSON themselves (fields.py), so what they read is written down here for tools.

The description says types and ranges; what the model and the limits allow besides is checked by the routes alone.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from radixserve.config import ServerConfig
from radixserve.core import MAX_LOGPROBS, MAX_PIN_TTL_S

Schema = dict[str, Any]

_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT: Schema = {"type": "string", "minLength": 1}
_TEXTS: Schema = {"type": "array", "items": _TEXT, "minItems": 1}
_TEXT_OR_TEXTS: Schema = {"anyOf": [_TEXT, _TEXTS]}
_ID_LISTS: Schema = {"type": "array", "items": _TOKEN_IDS, "minItems": 1}
_FLAG: Schema = {"type": ["boolean", "null"]}
_STRING: Schema = {"type": ["string", "null"]}
_TTL: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_PIN_TTL_S}
_CACHE_CONTROL: Schema = {"type": ["object", "null"], "properties": {"ttl_s": _TTL}, "additionalProperties": False}


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, **({} if high is None else {"maximum": high})}


def _number(low: float, high: float, is_open_low: bool = False) -> Schema:
    return {"type": ["number", "null"], "exclusiveMinimum" if is_open_low else "minimum": low, "maximum": high}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def add_description(app: FastAPI, config: ServerConfig) -> None:
    """Give `app` an openapi() that knows the bodies. It is made at the first call and kept."""
    bodies = _bodies(config)

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(get_openapi(title=app.title, version=app.version, routes=app.routes), bodies)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: Schema, bodies: dict[str, Schema]) -> Schema:
    error = _object(("message", "type", "param", "code"), message={"type": "string"}, type={"type": "string"}, param=_STRING, code=_STRING)
    document["components"] = {"schemas": {"Error": _object(("error",), error=error)}}
    failure = {"description": "An error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)  # the framework's own shape, which no client ever sees
            operation["responses"]["default"] = failure
            operation["operationId"] = f"{method} {path}"
            if path in bodies and method in ("post", "put"):
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": bodies[path]}}}
    return document


def _bodies(config: ServerConfig) -> dict[str, Schema]:
    tokenize = _object(prompt=_TEXT_OR_TEXTS, messages=_messages(), add_special_tokens=_FLAG, model=_STRING)
    id_lists = {"anyOf": [_TOKEN_IDS, _ID_LISTS]}
    detokenize = _object(("tokens",), tokens=id_lists, skip_special_tokens=_FLAG, model=_STRING)
    names = {"model": _STRING, "cache_salt": _STRING, "extra_key": _STRING}
    pin = _object(("prompt", "ttl_s"), prompt={"anyOf": [_TEXT, _TOKEN_IDS]}, ttl_s=_TTL, **names)
    return {
        "/pin": pin,
        "/v1/completions": _completion(config),
        "/v1/chat/completions": _chat(config),
        "/generate": _native(config),
        "/abort_request": _object(rid={"type": "string", "minLength": 1, "maxLength": 128}, abort_all=_FLAG),
        **dict.fromkeys(("/tokenize", "/v1/tokenize"), tokenize),
        **dict.fromkeys(("/detokenize", "/v1/detokenize"), detokenize),
    }


def _sampling(config: ServerConfig) -> dict[str, Schema]:
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": config.max_stop_chars}
    return {
        "n": _integer(1, config.max_n),
        "temperature": _number(0.0, 100.0),
        "top_p": _number(0.0, 1.0, is_open_low=True),
        "top_k": _integer(-1, 2**31 - 1),
        "min_p": _number(0.0, 1.0),
        "stop": {"anyOf": [{"type": "null"}, stop, {"type": "array", "items": stop, "maxItems": config.max_stop_strings}]},
        "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}, "maxItems": 1024},
        "ignore_eos": _FLAG,
        "skip_special_tokens": _FLAG,
        "frequency_penalty": _number(-2.0, 2.0),
        "presence_penalty": _number(-2.0, 2.0),
        "repetition_penalty": _number(0.0, 2.0, is_open_low=True),
        "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    }


def _openai_fields(config: ServerConfig) -> dict[str, Schema]:
    options = _object(include_usage=_FLAG, continuous_usage_stats=_FLAG)
    return {
        **_sampling(config),
        "model": _STRING,
        "max_tokens": _integer(0, 2**31 - 1),
        "min_tokens": _integer(0, 2**31 - 1),
        "seed": _integer(-(2**63), 2**63 - 1),
        "stream": _FLAG,
        "stream_options": {"anyOf": [{"type": "null"}, options]},
        "priority": _integer(-(2**31) + 1, 2**31 - 1),
        "cache_salt": _STRING,
        "cache_control": _CACHE_CONTROL,
        "extra_key": _STRING,
        "rid": {"type": ["string", "null"], "minLength": 1, "maxLength": 128},
        "return_token_ids": _FLAG,
        "user": _STRING,
    }


def _completion(config: ServerConfig) -> Schema:
    fields = _openai_fields(config) | {
        "prompt": {"anyOf": [_TEXT, _TEXTS, _TOKEN_IDS, _ID_LISTS]},
        "echo": _FLAG,
        "logprobs": _integer(0, MAX_LOGPROBS),
        "best_of": _integer(1),
    }
    return _object(("prompt",), **fields)


def _messages() -> Schema:
    part = _object(("type", "text"), type={"const": "text"}, text={"type": "string"})
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    role = {"enum": ["developer", "system", "user", "assistant", "tool"]}
    return {"type": "array", "items": _object(("role", "content"), role=role, content=content), "minItems": 1}


def _chat(config: ServerConfig) -> Schema:
    fields = _openai_fields(config) | {
        "messages": _messages(),
        "max_completion_tokens": _integer(0, 2**31 - 1),
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, MAX_LOGPROBS),
        "continue_final_message": _FLAG,
        "add_generation_prompt": _FLAG,
        "chat_template_kwargs": {"type": ["object", "null"]},
    }
    return _object(("messages",), **fields)


def _native(config: ServerConfig) -> Schema:
    fields = _sampling(config) | {
        "max_new_tokens": _integer(0, 2**31 - 1),
        "min_new_tokens": _integer(0, 2**31 - 1),
        "sampling_seed": _integer(-(2**63), 2**63 - 1),
    }
    params = _object((), **fields)
    return _object(
        text=_TEXT_OR_TEXTS,
        input_ids={"anyOf": [_TOKEN_IDS, _ID_LISTS]},
        sampling_params={"anyOf": [{"type": "null"}, params, {"type": "array", "items": params}]},
        rid={"anyOf": [_STRING, {"type": "array", "items": {"type": "string"}}]},
        stream=_FLAG,
        return_logprob=_FLAG,
        logprob_start_len=_integer(-1),
        top_logprobs_num=_integer(0, MAX_LOGPROBS),
        return_text_in_logprobs=_FLAG,
        priority=_integer(-(2**31) + 1, 2**31 - 1),
        cache_salt=_STRING,
        cache_control=_CACHE_CONTROL,
        extra_key=_STRING,
    )
