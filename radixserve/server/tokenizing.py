"""Routes of the tokenizer alone: /tokenize, /detokenize (also under /v1) and /tokenizer_info. They never wait for the engine."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.core import token_array
from radixserve.errors import InvalidRequestError
from radixserve.server.call import off_loop_if_long
from radixserve.server.context import ServerContext
from radixserve.server.fields import Fields, read_parsed
from radixserve.server.messages import read_chat, render
from radixserve.server.replies import json_reply

MAX_TEXTS = 1024  # of one call


def tokenizing_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(http: HttpRequest) -> Response:
        def parse(body: dict[str, Any]) -> tuple[Fields, list[str], bool, bool, tuple[str, ...]]:
            fields = _fields_of(body, context)
            return fields, *_read_texts(fields, context)

        fields, texts, is_list, adds_special, ignored = await read_parsed(http, context.config.max_body_bytes, parse)
        for text in texts:
            context.check_text(text)
        num_chars = sum(map(len, texts))
        ids = await off_loop_if_long(num_chars, lambda: [context.tokenizer.encode(text, adds_special) for text in texts])
        counts = [len(of_text) for of_text in ids]
        body = {"tokens": ids if is_list else ids[0], "count": counts if is_list else counts[0]}
        return _reply(context, fields, body | {"max_model_len": context.engine.info.context_length}, ignored)

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(http: HttpRequest) -> Response:
        fields = await read_parsed(http, context.config.max_body_bytes, lambda body: _fields_of(body, context))
        skip_special_tokens = fields.boolean("skip_special_tokens", True)
        tokens, is_list = _read_tokens(fields, context.tokenizer.vocab_size)
        num_tokens = sum(map(len, tokens))
        decode = context.tokenizer.decode
        texts = await off_loop_if_long(num_tokens, lambda: [decode(ids, skip_special_tokens) for ids in tokens])
        text = texts if is_list else texts[0]
        return _reply(context, fields, {"prompt": text, "text": text})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        tokenizer = context.tokenizer
        names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
        template = tokenizer.chat_template
        return json_reply({**names, "chat_template": None if template is None else template.source})

    return router


def _fields_of(body: dict[str, Any], context: ServerContext) -> Fields:
    fields = Fields(body)
    context.check_model(fields.string("model") or None)
    return fields


def _reply(context: ServerContext, fields: Fields, body: dict[str, Any], ignored: tuple[str, ...] = ()) -> Response:
    return json_reply(body, headers=context.ignored_header((*fields.unread(), *ignored)))


def _read_texts(fields: Fields, context: ServerContext) -> tuple[list[str], bool, bool, tuple[str, ...]]:
    """(texts, whether a list was sent, whether special tokens are added, ignored names inside messages).

    By default they are added to a prompt and not to rendered messages.
    """
    prompt, messages = fields.raw("prompt"), fields.raw("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("prompt: expected exactly one of prompt and messages", param="prompt")
    adds_special = fields.boolean("add_special_tokens", messages is None)
    if messages is not None:
        chat = read_chat(fields)
        return [render(context.tokenizer.chat_template, chat)], False, adds_special, chat.ignored
    texts = list(fields.strings("prompt"))
    if not texts or len(texts) > MAX_TEXTS:
        raise fields.wrong("prompt", f"a string or a list of 1 to {MAX_TEXTS} strings", prompt)
    return texts, isinstance(prompt, list), adds_special, ()


def _read_tokens(fields: Fields, vocab_size: int) -> tuple[list[list[int]], bool]:
    tokens = fields.raw("tokens")
    if not isinstance(tokens, list):
        raise fields.wrong("tokens", "a list of token ids, or a list of lists of token ids", tokens)
    is_list = bool(tokens) and isinstance(tokens[0], list)
    lists = tokens if is_list else [tokens]
    if len(lists) > MAX_TEXTS or not all(isinstance(item, list) for item in lists):
        raise fields.wrong("tokens", f"a list of token ids, or 1 to {MAX_TEXTS} of them", tokens)
    try:
        return [list(token_array(ids, vocab_size)) if ids else [] for ids in lists], is_list
    except InvalidRequestError as error:
        raise fields.renamed(error, "tokens") from None
