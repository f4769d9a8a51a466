"""What POST /v1/completions asks for: the body checked field by field, before any token is computed."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixserve.config import ServerConfig
from radixserve.core import IntArray, Namespace, SamplingParams, token_array
from radixserve.errors import InvalidRequestError, UnsupportedFieldError
from radixserve.server.fields import Fields, show
from radixserve.server.known_fields import refuse_unsupported


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """Choice index = prompt index * n + k, k in 0 .. n - 1."""

    model: str | None
    prompts: tuple[str | IntArray, ...]
    sampling: SamplingParams
    n: int
    is_stream: bool
    include_usage: bool  # a last chunk with the usage
    continuous_usage: bool  # usage in every chunk
    namespace: Namespace
    ignored: tuple[str, ...]  # fields that no protocol knows


def parse_completion_call(
    body: dict[str, Any], vocab_size: int, check_length: Callable[[int, int], None], limits: ServerConfig
) -> CompletionCall:
    """Raises InvalidRequestError or UnsupportedFieldError, with the field as param.

    check_length(num_prompt_tokens, max_tokens) raises ContextLengthError; it is asked before a list of token ids is looked at.
    """
    fields = Fields(body)
    n = fields.integer("n", 1)
    if not 1 <= n <= limits.max_n:
        raise fields.wrong("n", f"an integer in [1, {limits.max_n}]", n)
    _check_best_of(fields, n)
    sampling = _parse_sampling(fields, limits)
    prompts = _parse_prompts(fields, n, limits.max_choices)
    stream_options = fields.object("stream_options")
    call = CompletionCall(
        model=fields.string("model") or None,
        prompts=tuple(
            prompt if isinstance(prompt, str) else _parse_token_ids(prompt, vocab_size, sampling.max_tokens, check_length)
            for prompt in prompts
        ),
        sampling=sampling,
        n=n,
        is_stream=fields.boolean("stream"),
        include_usage=stream_options.boolean("include_usage"),
        continuous_usage=stream_options.boolean("continuous_usage_stats"),
        namespace=Namespace(cache_salt=fields.string("cache_salt"), extra_key=fields.string("extra_key")),
        ignored=(),
    )
    refuse_unsupported(fields)
    ignored = (*fields.unread(), *stream_options.unread())
    return dataclasses.replace(call, ignored=ignored)


def _parse_sampling(fields: Fields, limits: ServerConfig) -> SamplingParams:
    defaults = SamplingParams()
    stop = fields.strings("stop")
    if len(stop) > limits.max_stop_strings or any(len(text) > limits.max_stop_chars for text in stop):
        expected = f"at most {limits.max_stop_strings} strings of at most {limits.max_stop_chars} characters"
        raise fields.wrong("stop", expected, list(stop))
    return SamplingParams(
        max_tokens=fields.integer("max_tokens", defaults.max_tokens),
        temperature=fields.number("temperature", defaults.temperature),
        top_p=fields.number("top_p", defaults.top_p),
        top_k=fields.integer("top_k", defaults.top_k),
        min_p=fields.number("min_p", defaults.min_p),
        seed=fields.optional_integer("seed"),
        stop=stop,
        ignore_eos=fields.boolean("ignore_eos"),
    ).validate()


def _check_best_of(fields: Fields, n: int) -> None:
    best_of = fields.raw("best_of")
    if best_of is not None and (type(best_of) is not int or best_of != n):
        raise UnsupportedFieldError(f"best_of is not supported by this server (accepted: null or n), got {show(best_of)}", param="best_of")


def _parse_prompts(fields: Fields, n: int, max_choices: int) -> list[str] | list[list[Any]]:
    """A string, a list of strings, a list of token ids, or a list of lists of token ids; the ids are not looked at yet."""
    prompt = fields.raw("prompt")
    expected = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if prompt is None:
        raise InvalidRequestError(f"prompt: expected {expected}, got nothing", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise fields.wrong("prompt", f"{expected}, not empty", prompt)
    kind = type(prompt[0])
    if kind not in (str, list):
        return [prompt]
    if len(prompt) * n > max_choices:
        message = f"prompt: expected at most {max_choices} choices in one call, got {len(prompt)} prompts times n = {n}"
        raise InvalidRequestError(message, param="prompt")
    if not all(type(item) is kind for item in prompt):
        raise fields.wrong("prompt", expected, prompt)
    return prompt


def _parse_token_ids(ids: list[Any], vocab_size: int, max_tokens: int, check_length: Callable[[int, int], None]) -> IntArray:
    check_length(len(ids), max_tokens)
    return token_array(ids, vocab_size)
