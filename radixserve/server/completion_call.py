"""What POST /v1/completions asks for: the body checked field by field, before any token is computed."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from radixserve.core import SamplingParams
from radixserve.errors import InvalidRequestError, UnsupportedFieldError
from radixserve.server import sampling_fields as shared
from radixserve.server.call import Call, Prompt
from radixserve.server.fields import Fields, show
from radixserve.server.known_fields import refuse_unsupported


@dataclass(frozen=True, slots=True)
class CompletionCall:
    call: Call
    echo: bool
    return_token_ids: bool
    return_cached_tokens_details: bool


def parse_completion_call(body: dict[str, Any], limits: shared.Limits) -> CompletionCall:
    """Raises InvalidRequestError, UnsupportedFieldError or ContextLengthError, with the field as param."""
    fields = Fields(body)
    n = shared.read_n(fields, limits)
    _check_best_of(fields, n)
    echo = fields.boolean("echo")
    logprobs = read_num_logprobs(fields, "logprobs")
    asked = shared.LogprobsAsked(logprobs, logprobs if echo else None)
    sampling = shared.read_sampling(fields, shared.SamplingNames(), limits, SamplingParams().max_tokens, asked)
    special = fields.boolean("skip_special_tokens", True), fields.boolean("add_special_tokens", True)
    contents = [
        prompt if isinstance(prompt, str) else shared.read_token_ids(fields, limits, "prompt", prompt, sampling.max_tokens)
        for prompt in _read_prompts(fields, limits, n)
    ]
    call = read_call(fields, tuple(Prompt(content, sampling, *special) for content in contents), n)
    parsed = CompletionCall(call, echo, fields.boolean("return_token_ids"), fields.boolean("return_cached_tokens_details"))
    refuse_unsupported(fields)
    return dataclasses.replace(parsed, call=dataclasses.replace(call, ignored=(*fields.unread(), *call.ignored)))


def read_call(fields: Fields, prompts: tuple[Prompt, ...], n: int) -> Call:
    """The fields that both OpenAI routes share. Names unread inside stream_options are in `ignored`; others are not yet."""
    stream_options = fields.object("stream_options")
    rid = fields.raw("rid") or fields.raw("request_id")
    # in the order of the prompts of one call, so that each of them can be told apart by its own index
    ids = () if rid is None else (shared.check_rid(fields, "rid", rid),) * (len(prompts) * n)
    call = Call(
        model=fields.string("model") or None,
        prompts=prompts,
        n=n,
        is_stream=fields.boolean("stream"),
        include_usage=stream_options.boolean("include_usage"),
        continuous_usage=stream_options.boolean("continuous_usage_stats"),
        namespace=shared.read_namespace(fields),
        priority=shared.read_priority(fields),
        pin_ttl_s=shared.read_pin_ttl(fields),
        ids=ids,
    )
    return dataclasses.replace(call, ignored=tuple(stream_options.unread()))


def read_num_logprobs(fields: Fields, name: str) -> int | None:
    """false is none: some tools send it. The range is checked with the other sampling parameters."""
    value = fields.raw(name)
    return None if value is False else fields.optional_integer(name)


def _check_best_of(fields: Fields, n: int) -> None:
    best_of = fields.raw("best_of")
    if best_of is not None and (type(best_of) is not int or best_of != n):
        raise UnsupportedFieldError(f"best_of is not supported by this server (accepted: null or n), got {show(best_of)}", param="best_of")


def _read_prompts(fields: Fields, limits: shared.Limits, n: int) -> list[str] | list[list[Any]]:
    """A string, a list of strings, a list of token ids, or a list of lists of token ids; the ids are not looked at yet."""
    prompt = fields.raw("prompt")
    expected = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if prompt is None:
        raise InvalidRequestError(f"prompt: expected {expected}, got nothing", param="prompt")
    if not isinstance(prompt, str) and (not isinstance(prompt, list) or not prompt):
        raise fields.wrong("prompt", f"{expected}, not empty", prompt)
    prompts: list[Any] = prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]
    shared.check_num_choices(limits, "prompt", "n", len(prompts), n)  # before their kinds are looked at: they may be millions
    kind = type(prompts[0])
    if not all(type(item) is kind for item in prompts):
        raise fields.wrong("prompt", expected, prompt)
    return prompts
