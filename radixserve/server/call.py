"""What every generating route asks for, whatever its protocol, and how it becomes requests of the engine."""

import dataclasses
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixserve.core import BASE_NAMESPACE, IntArray, Namespace, Request, SamplingParams
from radixserve.errors import InvalidRequestError
from radixserve.server.context import ServerContext
from radixserve.server.generation import Generation
from radixserve.server.off_loop import off_loop_from
from radixserve.server.sampling_fields import Limits

# From here on encoding the texts of one call is worth a thread.
LONG_TEXT_CHARS = 8192


class Prompt(NamedTuple):
    """One prompt of a call and how to go on from it."""

    content: str | IntArray
    sampling: SamplingParams
    skip_special_tokens: bool = True  # in the output's text
    add_special_tokens: bool = True  # to a text, by the tokenizer's rule; a rendered chat has its own already


@dataclass(frozen=True, slots=True)
class Call:
    """Choice index = prompt index * n + k, k in 0 .. n - 1."""

    model: str | None
    prompts: tuple[Prompt, ...]
    n: int = 1
    is_stream: bool = False
    include_usage: bool = False  # a last chunk with the usage
    continuous_usage: bool = False  # usage in every chunk
    namespace: Namespace = BASE_NAMESPACE
    priority: int = 0
    pin_ttl_s: float | None = None
    ids: tuple[str, ...] = ()  # the caller's names, one per choice; empty: ours
    takes_rest: bool = False  # no max_tokens was given: what is left of the context, and of --max-logprobs
    logprobs_name: str = "logprobs"  # what the protocol calls the number of likeliest tokens
    ignored: tuple[str, ...] = ()  # fields that no protocol knows

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt_index(self, choice_index: int) -> int:
        return choice_index // self.n


def limits_of(context: ServerContext) -> Limits:
    config = context.config
    return Limits(
        vocab_size=context.engine.info.vocab_size,
        max_request_tokens=context.max_request_tokens,
        check_length=context.check_length,
        max_n=config.max_n,
        max_choices=config.max_choices,
        max_requests=context.engine.room.max_requests,
        max_stop_strings=config.max_stop_strings,
        max_stop_chars=config.max_stop_chars,
    )


async def start_generation(context: ServerContext, call: Call, call_id: str, started_at: float) -> Generation:
    """Encode, check and submit. Raises InvalidRequestError, ContextLengthError, QueueFullError, EngineDeadError; nothing runs then."""
    context.check_model(call.model)
    context.engine.room.require(call.num_choices)  # before the work of encoding; submitting asks again
    requests = await _make_requests(context, call, call_id)
    skips = [prompt.skip_special_tokens for prompt in call.prompts for _ in range(call.n)]
    return Generation(context.engine, context.tokenizer, requests, call.n, context.latency, started_at, skips)


async def _make_requests(context: ServerContext, call: Call, call_id: str) -> list[Request]:
    """A seed of the client's is that of every prompt, so that each answer is the one that its prompt would get alone."""
    encoded = await _encode_all(context, call.prompts)
    samplings = [_fitted(context, call, prompt.sampling, len(ids)) for prompt, ids in zip(call.prompts, encoded)]
    _check_num_logprobs(context, call, [len(ids) for ids in encoded], samplings)
    seeds = [_concrete_seed(sampling) for sampling in samplings]  # the n choices of a prompt differ by their choice index
    names = [f"{name}-{call_id}" for name in call.ids] or [call_id] * call.num_choices
    priority = context.client_priority(call.priority)
    return [
        Request(
            f"{names[i * call.n + k]}-{i * call.n + k}",
            prompt_ids,
            samplings[i] if k == 0 else dataclasses.replace(samplings[i], prompt_logprobs=None),  # see Generation: scored once
            seeds[i],
            k,
            call.namespace,
            priority,
            call.pin_ttl_s,
        )
        for i, prompt_ids in enumerate(encoded)
        for k in range(call.n)
    ]


def _fitted(context: ServerContext, call: Call, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
    if call.takes_rest:
        context.check_length(num_prompt_tokens, 1)
        rest = context.max_request_tokens - num_prompt_tokens
        if sampling.logprobs is not None:  # a limit on what was not asked for cuts it, and is no reason to refuse
            rest = min(rest, max(1, context.config.max_logprobs // (call.n * (1 + sampling.logprobs))))
        sampling = dataclasses.replace(sampling, max_tokens=rest).validate()  # min_tokens may be above it
    context.check_length(num_prompt_tokens, sampling.max_tokens)
    if sampling.prompt_logprobs is not None and sampling.prompt_logprobs_start >= num_prompt_tokens:
        expected = f"expected less than the {num_prompt_tokens} tokens of the prompt"
        raise InvalidRequestError(f"logprob_start_len: {expected}, got {sampling.prompt_logprobs_start}", param="logprob_start_len")
    return sampling


def _check_num_logprobs(context: ServerContext, call: Call, prompt_lens: Sequence[int], samplings: Sequence[SamplingParams]) -> None:
    """Each is an object of its own on its way to the reply, so what one call may hold of them has a limit."""
    num_logprobs, limit = 0, context.config.max_logprobs
    for num_tokens, sampling in zip(prompt_lens, samplings):
        if sampling.prompt_logprobs is not None:
            num_logprobs += call.n * (num_tokens - sampling.prompt_logprobs_start) * (1 + sampling.prompt_logprobs)
        if sampling.logprobs is not None:
            num_logprobs += call.n * sampling.max_tokens * (1 + sampling.logprobs)
    if num_logprobs > limit:
        expected = f"expected at most {limit} in one call (--max-logprobs: tokens times (1 + likeliest ones) times choices)"
        message = f"{call.logprobs_name}: {expected}, got {num_logprobs}; fewer tokens, choices or likeliest ones will do"
        raise InvalidRequestError(message, param=call.logprobs_name)


async def _encode_all(context: ServerContext, prompts: Sequence[Prompt]) -> list[IntArray]:
    def encode(prompt: Prompt) -> IntArray:
        if not isinstance(prompt.content, str):
            return prompt.content
        return array("i", context.tokenizer.encode(prompt.content, add_special_tokens=prompt.add_special_tokens))

    texts = [prompt.content for prompt in prompts if isinstance(prompt.content, str)]
    for text in texts:
        context.check_text(text)
    num_chars = sum(map(len, texts))
    encoded = await off_loop_from(LONG_TEXT_CHARS, num_chars, lambda: [encode(prompt) for prompt in prompts])
    if not all(encoded):
        raise InvalidRequestError("prompt: expected at least one token, got an empty string", param="prompt")
    return encoded


def _concrete_seed(sampling: SamplingParams) -> int:
    return secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64
