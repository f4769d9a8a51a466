"""The OpenAI routes: POST /v1/completions, POST /v1/chat/completions and GET /v1/models."""

import time
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.errors import ModelNotFoundError
from radixserve.server.answering import Reply, answer
from radixserve.server.call import Call, limits_of
from radixserve.server.chat_call import ChatCall, parse_chat_call
from radixserve.server.completion_call import parse_completion_call
from radixserve.server.context import DEFAULT_MODEL_ALIAS, ServerContext
from radixserve.server.fields import read_parsed
from radixserve.server.generation import Generation
from radixserve.server.messages import render
from radixserve.server.openai_reply import ChatReply, CompletionReply
from radixserve.server.replies import json_reply


def openai_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def model_card() -> dict[str, Any]:
        return {
            "id": context.served_name,
            "object": "model",
            "created": created,
            "owned_by": "radixserve",
            "root": context.served_name,
            "parent": None,
            "max_model_len": context.engine.info.context_length,
        }

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_reply({"object": "list", "data": [model_card()]})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        if name not in (context.served_name, DEFAULT_MODEL_ALIAS):
            raise ModelNotFoundError(f"model: expected {context.served_name} or {DEFAULT_MODEL_ALIAS}, got {name[:100]}", param="model")
        return json_reply(model_card())

    @router.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        started_at = time.monotonic()
        limits = limits_of(context)
        asked = await read_parsed(http, context.config.max_body_bytes, lambda body: parse_completion_call(body, limits))
        call_id = f"cmpl-{uuid.uuid4().hex}"

        def make_reply(generation: Generation) -> Reply:
            return CompletionReply(asked, generation, context.tokenizer, reply_id(asked.call, call_id), context.served_name)

        return await answer(http, context, asked.call, call_id, started_at, make_reply)

    @router.post("/v1/chat/completions")
    async def chat_completions(http: HttpRequest) -> Response:
        started_at = time.monotonic()
        limits = limits_of(context)

        def parse(body: dict[str, Any]) -> ChatCall:
            asked = parse_chat_call(body, limits)
            return asked.with_prompt(render(context.tokenizer.chat_template, asked.chat))

        asked = await read_parsed(http, context.config.max_body_bytes, parse)
        call_id = f"chatcmpl-{uuid.uuid4().hex}"

        def make_reply(generation: Generation) -> Reply:
            return ChatReply(asked, generation, context.tokenizer, reply_id(asked.call, call_id), context.served_name)

        return await answer(http, context, asked.call, call_id, started_at, make_reply)

    return router


def reply_id(call: Call, call_id: str) -> str:
    return call.ids[0] if call.ids else call_id
