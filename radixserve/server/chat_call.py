"""What POST /v1/chat/completions asks for: the body checked field by field, before any token is computed."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from radixserve.core import MAX_LOGPROBS
from radixserve.server import sampling_fields as shared
from radixserve.server.call import Call, Prompt
from radixserve.server.completion_call import read_call
from radixserve.server.fields import Fields
from radixserve.server.known_fields import refuse_unsupported
from radixserve.server.messages import Chat, read_chat


@dataclass(frozen=True, slots=True)
class ChatCall:
    """The prompt of `call` is empty until the chat is rendered."""

    call: Call
    chat: Chat
    return_token_ids: bool
    return_cached_tokens_details: bool

    def with_prompt(self, text: str) -> "ChatCall":
        (prompt,) = self.call.prompts
        return dataclasses.replace(self, call=dataclasses.replace(self.call, prompts=(prompt._replace(content=text),)))


def parse_chat_call(body: dict[str, Any], limits: shared.Limits) -> ChatCall:
    """Raises InvalidRequestError or UnsupportedFieldError, with the field as param."""
    fields = Fields(body)
    n = shared.read_n(fields, limits)
    shared.check_num_choices(limits, "messages", "n", 1, n)
    # max_completion_tokens wins; both are checked
    asked_max = {name: fields.optional_integer(name) for name in ("max_tokens", "max_completion_tokens")}
    name = "max_tokens" if asked_max["max_completion_tokens"] is None else "max_completion_tokens"
    asked = shared.LogprobsAsked(_read_logprobs(fields))
    sampling = shared.read_sampling(fields, shared.SamplingNames(max_tokens=name), limits, limits.max_request_tokens, asked)
    prompt = Prompt("", sampling, fields.boolean("skip_special_tokens", True), fields.boolean("add_special_tokens"))
    call = read_call(fields, (prompt,), n)
    call = dataclasses.replace(call, takes_rest=asked_max[name] is None, logprobs_name="top_logprobs")
    flags = fields.boolean("return_token_ids"), fields.boolean("return_cached_tokens_details")
    parsed = ChatCall(call, read_chat(fields), *flags)
    refuse_unsupported(fields)
    return dataclasses.replace(parsed, call=dataclasses.replace(call, ignored=(*fields.unread(), *call.ignored, *parsed.chat.ignored)))


def _read_logprobs(fields: Fields) -> int | None:
    is_asked = fields.boolean("logprobs")
    num_top = fields.optional_integer("top_logprobs")
    if num_top is not None and not 0 <= num_top <= MAX_LOGPROBS:
        raise fields.wrong("top_logprobs", f"an integer in [0, {MAX_LOGPROBS}]", num_top)
    if num_top and not is_asked:
        raise fields.wrong("top_logprobs", "0 or null without logprobs: true", num_top)
    return (num_top or 0) if is_asked else None
