"""The messages of a chat: checked part by part, and brought to what chat templates read."""

import json
import re
from dataclasses import dataclass
from typing import Any

from radixserve.errors import InvalidRequestError, UnsupportedFieldError
from radixserve.server.fields import Fields, show
from radixserve.server.known_fields import CACHE_HINTS, refuse_known
from radixserve.tokenizer import ChatTemplate
from radixserve.tokenizer.chat_template import RESERVED_NAMES

ROLES = ("developer", "system", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
_POSITION = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]  # further names for the template
    ignored: tuple[str, ...] = ()  # names inside content parts that no protocol knows, without the positions


def read_chat(fields: Fields) -> Chat:
    """Raises InvalidRequestError, or UnsupportedFieldError for a part that is no text."""
    messages = fields.objects("messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages: expected at most {MAX_MESSAGES}, got {len(messages)}", param="messages")
    variables = fields.object("chat_template_kwargs").all()
    for name in RESERVED_NAMES & variables.keys():
        path = f"chat_template_kwargs.{name}"
        raise InvalidRequestError(f"{path}: expected a name of the template's own, not one that this server sets", param=path)
    continue_final_message = fields.boolean("continue_final_message")
    add_generation_prompt = fields.boolean("add_generation_prompt", not continue_final_message)
    if continue_final_message and add_generation_prompt:
        message = "continue_final_message: expected false together with add_generation_prompt, got true"
        raise InvalidRequestError(message, param="continue_final_message")
    read = [_read_message(message) for message in messages]
    ignored = dict.fromkeys(name for _, names in read for name in names)  # in order, each once: a long chat repeats them
    return Chat(tuple(body for body, _ in read), add_generation_prompt, continue_final_message, variables, tuple(ignored))


def render(template: ChatTemplate | None, chat: Chat) -> str:
    """The prompt as text. Raises InvalidRequestError where there is no template, or where it refuses the messages."""
    if template is None:
        raise InvalidRequestError("messages: this model has no chat template; use /v1/completions with the whole prompt", param="messages")
    # where a template has no developer, what a developer says is what systems said before
    knows_developer = "developer" in template.source
    messages = [
        {**message, "role": "system"} if message["role"] == "developer" and not knows_developer else message for message in chat.messages
    ]
    return template.render(
        messages,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        variables=chat.variables,
    )


def _read_message(message: Fields) -> tuple[dict[str, Any], list[str]]:
    """The message, which may have any name for its template to read, and the names that were ignored in its parts.

    Only wishes for the cache are no template's.
    """
    refuse_known(message, CACHE_HINTS)
    role = message.raw("role")
    if role not in ROLES:
        raise message.wrong("role", f"one of {', '.join(ROLES)}", role)
    # Null fields are left out: templates write None where they see it. Content is always there, for the same reason.
    body = {name: value for name, value in message.all().items() if value is not None}
    tool_calls = message.raw("tool_calls")
    if tool_calls is not None:
        body["tool_calls"] = [_read_tool_call(call) for call in message.objects("tool_calls")] if tool_calls else []
    may_be_empty = role == "assistant"
    content, ignored = _read_content(message, may_be_empty)
    return {**body, "content": content}, ignored


def _read_content(message: Fields, may_be_empty: bool) -> tuple[str, list[str]]:
    content = message.raw("content")
    if isinstance(content, str):
        return content, []
    if content is None and may_be_empty:
        return "", []
    if not isinstance(content, list):
        raise message.wrong("content", "a string or a list of text parts", content)
    if not content:
        return "", []
    parts = message.objects("content")
    return "".join(map(_read_part, parts)), [_POSITION.sub("[]", name) for part in parts for name in part.unread()]


def _read_part(part: Fields) -> str:
    kind = part.raw("type")
    if kind != "text":
        path = part.path_of("type")
        raise UnsupportedFieldError(f"{path}: only text parts are supported by this server, got {show(kind)}", param=path)
    text = part.raw("text")
    if not isinstance(text, str):
        raise part.wrong("text", "a string", text)
    refuse_known(part)
    return text


def _read_tool_call(call: Fields) -> dict[str, Any]:
    """OpenAI sends arguments as JSON in a string; templates expect the object."""
    function = call.object("function")
    for fields in (call, function):
        refuse_known(fields, CACHE_HINTS)
    body = function.all()
    if isinstance(body.get("arguments"), str):
        try:
            body = {**body, "arguments": json.loads(body["arguments"])}
        except (ValueError, RecursionError):
            raise function.wrong("arguments", "valid JSON", body["arguments"]) from None
    return {**call.all(), "function": body}
