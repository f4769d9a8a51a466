"""The fields that all generating routes share: how to sample, when to stop, how many choices. One reading for three protocols."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixserve.core import MAX_PIN_TTL_S, IntArray, Namespace, SamplingParams, token_array
from radixserve.errors import InvalidRequestError
from radixserve.server.fields import Fields

MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_PRIORITY = 2**31 - 1
MAX_RID_CHARS = 128
MAX_NAMESPACE_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may ask for here."""

    vocab_size: int
    max_request_tokens: int  # prompt and output of one request
    check_length: Callable[[int, int], None]  # (num_prompt_tokens, max_tokens); raises ContextLengthError
    max_n: int
    max_choices: int  # prompts times n of one call
    max_requests: int | None  # what may wait and run together; None: no limit
    max_stop_strings: int
    max_stop_chars: int  # of one stop string: the detokenizer holds back that much text


@dataclass(frozen=True, slots=True)
class SamplingNames:
    """What a protocol calls the fields that the others call otherwise."""

    max_tokens: str = "max_tokens"
    min_tokens: str = "min_tokens"
    seed: str = "seed"

    def of(self, param: str) -> str:
        return getattr(self, param, param)


@dataclass(frozen=True, slots=True)
class LogprobsAsked:
    output: int | None = None  # likeliest tokens per position, as in SamplingParams
    prompt: int | None = None
    prompt_start: int = 0


def read_sampling(fields: Fields, names: SamplingNames, limits: Limits, default_max_tokens: int, logprobs: LogprobsAsked) -> SamplingParams:
    """Raises InvalidRequestError under the protocol's own names."""
    defaults = SamplingParams()
    sampling = SamplingParams(
        max_tokens=fields.integer(names.max_tokens, default_max_tokens),
        min_tokens=fields.integer(names.min_tokens, defaults.min_tokens),
        temperature=fields.number("temperature", defaults.temperature),
        top_p=fields.number("top_p", defaults.top_p),
        top_k=fields.integer("top_k", defaults.top_k),
        min_p=fields.number("min_p", defaults.min_p),
        seed=fields.optional_integer(names.seed),
        stop=_read_stop(fields, limits),
        stop_token_ids=_read_stop_token_ids(fields, limits.vocab_size),
        ignore_eos=fields.boolean("ignore_eos"),
        frequency_penalty=fields.number("frequency_penalty", defaults.frequency_penalty),
        presence_penalty=fields.number("presence_penalty", defaults.presence_penalty),
        repetition_penalty=fields.number("repetition_penalty", defaults.repetition_penalty),
        logit_bias=_read_logit_bias(fields, limits.vocab_size),
        logprobs=logprobs.output,
        prompt_logprobs=logprobs.prompt,
        prompt_logprobs_start=logprobs.prompt_start,
    )
    try:
        return sampling.validate()
    except InvalidRequestError as error:
        raise fields.renamed(error, names.of(error.param or "")) from None


def read_n(fields: Fields, limits: Limits) -> int:
    n = fields.integer("n", 1)
    if not 1 <= n <= limits.max_n:
        raise fields.wrong("n", f"an integer in [1, {limits.max_n}]", n)
    return n


def check_num_choices(limits: Limits, prompts_name: str, n_name: str, num_prompts: int, n: int) -> None:
    """A call that could not even run on an idle server is a 400: trying again, which a 429 asks for, would be in vain.

    The names, with their paths, are those of the fields that say how many prompts and choices.
    """
    limit = limits.max_choices if limits.max_requests is None else min(limits.max_choices, limits.max_requests)
    if num_prompts * n > limit:
        why = "" if limit == limits.max_choices else " (--max-queued-requests and --max-running-requests together)"
        name = n_name if num_prompts == 1 else prompts_name
        message = f"{name}: expected at most {limit} choices in one call{why}, got {num_prompts} prompts times n = {n}"
        raise InvalidRequestError(message, param=name)


def read_namespace(fields: Fields) -> Namespace:
    """Both stay in the tree as long as what is cached under them, so neither may be long."""
    for name in ("cache_salt", "extra_key"):
        if len(fields.string(name)) > MAX_NAMESPACE_CHARS:
            raise fields.wrong(name, f"at most {MAX_NAMESPACE_CHARS} characters", fields.raw(name))
    return Namespace(cache_salt=fields.string("cache_salt"), extra_key=fields.string("extra_key"))


def read_priority(fields: Fields) -> int:
    priority = fields.integer("priority", 0)
    if abs(priority) > MAX_PRIORITY:
        raise fields.wrong("priority", f"an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}]", priority)
    return priority


def read_pin_ttl(fields: Fields) -> float | None:
    """cache_control: {"ttl_s": seconds}; {} asks for nothing. Unknown names in it are refused: they would change for how long."""
    control = fields.object("cache_control")
    ttl_s = check_ttl(control) if control.raw("ttl_s") is not None else None
    for name in control.unread():
        raise InvalidRequestError(f"{control.path_of(name)}: expected only ttl_s in cache_control", param=control.path_of(name))
    return ttl_s


def check_ttl(fields: Fields) -> float:
    ttl_s = fields.number("ttl_s", 0.0)
    if not 0 < ttl_s <= MAX_PIN_TTL_S:
        raise fields.wrong("ttl_s", f"a number of seconds in (0, {MAX_PIN_TTL_S:g}]", fields.raw("ttl_s"))
    return ttl_s


def check_rid(fields: Fields, name: str, rid: Any) -> str:
    """A caller's name for a request: by it, or by a beginning of it, /abort_request finds the request."""
    if not isinstance(rid, str) or not 0 < len(rid) <= MAX_RID_CHARS or not (rid.isascii() and rid.isprintable()):
        raise fields.wrong(name, f"1 to {MAX_RID_CHARS} printable ASCII characters", rid)
    return rid


def read_token_ids(fields: Fields, limits: Limits, name: str, ids: list[Any], max_tokens: int) -> IntArray:
    """The length is checked before the ids are looked at: a list may be very long."""
    limits.check_length(len(ids), max_tokens)
    try:
        return token_array(ids, limits.vocab_size)
    except InvalidRequestError as error:
        raise fields.renamed(error, name) from None


def _read_stop(fields: Fields, limits: Limits) -> tuple[str, ...]:
    expected = f"at most {limits.max_stop_strings} strings of at most {limits.max_stop_chars} characters"
    given = fields.raw("stop")
    if isinstance(given, list) and len(given) > limits.max_stop_strings:  # before its items are looked at: they may be millions
        raise fields.wrong("stop", expected, given)
    stop = fields.strings("stop")
    if any(len(text) > limits.max_stop_chars for text in stop):
        raise fields.wrong("stop", expected, list(stop))
    if not all(stop):
        raise fields.wrong("stop", "a string or a list of strings, none of them empty", given)
    return stop


def _read_stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = fields.raw("stop_token_ids")
    if ids is None:
        return ()
    is_list = isinstance(ids, list) and len(ids) <= MAX_STOP_TOKENS
    if not is_list or not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in ids):
        raise fields.wrong("stop_token_ids", f"a list of at most {MAX_STOP_TOKENS} token ids in [0, {vocab_size - 1}]", ids)
    return tuple(dict.fromkeys(ids))


def _read_logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """JSON's keys are strings. Its numbers are checked with the other ranges."""
    biases = fields.raw("logit_bias")
    if biases is None:
        return ()
    is_object = isinstance(biases, dict) and len(biases) <= MAX_BIASES
    if not is_object or not all(_is_id(key, vocab_size) and type(bias) in (int, float) for key, bias in biases.items()):
        expected = f"an object of at most {MAX_BIASES} token ids in [0, {vocab_size - 1}], as strings, with a number each"
        raise fields.wrong("logit_bias", expected, biases)
    return tuple({int(key): float(bias) for key, bias in biases.items()}.items())


def _is_id(key: str, vocab_size: int) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size
