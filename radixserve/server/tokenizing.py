"""Routes of the tokenizer alone: /tokenize, /detokenize (also under /v1) and /tokenizer_info. They never wait for the engine."""

from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.core import token_array
from radixserve.errors import InvalidRequestError
from radixserve.server.call import LONG_TEXT_CHARS
from radixserve.server.context import ServerContext
from radixserve.server.fields import Fields, read_parsed
from radixserve.server.known_fields import PROMPT_FIELDS, refuse_known
from radixserve.server.messages import read_chat, render
from radixserve.server.off_loop import off_loop_from
from radixserve.server.replies import json_reply

MAX_TEXTS = 1024  # of one call


class Texts(NamedTuple):
    """What /tokenize was asked for."""

    texts: list[str]
    is_list: bool  # so that a list is answered
    adds_special_tokens: bool
    ignored: tuple[str, ...]


class Ids(NamedTuple):
    """What /detokenize was asked for."""

    lists: list[list[int]]
    is_list: bool
    skips_special_tokens: bool
    ignored: tuple[str, ...]


def tokenizing_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(http: HttpRequest) -> Response:
        asked = await read_parsed(http, context.config.max_body_bytes, lambda body: _read_texts(Fields(body), context))
        for text in asked.texts:
            context.check_text(text)
        num_chars, encode = sum(map(len, asked.texts)), context.tokenizer.encode
        ids = await off_loop_from(LONG_TEXT_CHARS, num_chars, lambda: [encode(text, asked.adds_special_tokens) for text in asked.texts])
        counts = [len(of_text) for of_text in ids]
        body = {"tokens": ids if asked.is_list else ids[0], "count": counts if asked.is_list else counts[0]}
        body["max_model_len"] = context.engine.info.context_length
        return json_reply(body, headers=context.ignored_header(asked.ignored))

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(http: HttpRequest) -> Response:
        asked = await read_parsed(http, context.config.max_body_bytes, lambda body: _read_ids(Fields(body), context))
        num_tokens, decode = sum(map(len, asked.lists)), context.tokenizer.decode
        texts = await off_loop_from(LONG_TEXT_CHARS, num_tokens, lambda: [decode(ids, asked.skips_special_tokens) for ids in asked.lists])
        text = texts if asked.is_list else texts[0]
        return json_reply({"prompt": text, "text": text}, headers=context.ignored_header(asked.ignored))

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        tokenizer = context.tokenizer
        names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
        template = tokenizer.chat_template
        return json_reply({**names, "chat_template": None if template is None else template.source})

    return router


def _read_texts(fields: Fields, context: ServerContext) -> Texts:
    """By default special tokens are added to a prompt and not to rendered messages."""
    context.check_model(fields.string("model") or None)
    prompt, messages = fields.raw("prompt"), fields.raw("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("prompt: expected exactly one of prompt and messages", param="prompt")
    adds_special_tokens = fields.boolean("add_special_tokens", messages is None)
    texts = list(fields.strings("prompt"))
    inside: tuple[str, ...] = ()
    if messages is not None:
        chat = read_chat(fields)
        texts, inside = [render(context.tokenizer.chat_template, chat)], chat.ignored
    if not texts or len(texts) > MAX_TEXTS:
        raise fields.wrong("prompt", f"a string or a list of 1 to {MAX_TEXTS} strings", prompt)
    refuse_known(fields, PROMPT_FIELDS)
    return Texts(texts, isinstance(prompt, list), adds_special_tokens, (*fields.unread(), *inside))


def _read_ids(fields: Fields, context: ServerContext) -> Ids:
    context.check_model(fields.string("model") or None)
    skips_special_tokens = fields.boolean("skip_special_tokens", True)
    lists, is_list = _read_id_lists(fields, context.tokenizer.vocab_size)
    refuse_known(fields, PROMPT_FIELDS)
    return Ids(lists, is_list, skips_special_tokens, tuple(fields.unread()))


def _read_id_lists(fields: Fields, vocab_size: int) -> tuple[list[list[int]], bool]:
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
