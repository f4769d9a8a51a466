"""The nouns that cross package borders: plain data, standard library only.

Token ids and page ids travel as `array('i')` (int32): compact, comparable in bulk, viewable by numpy and torch without a copy.
"""

import dataclasses
import numbers
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from radixserve.errors import InvalidRequestError, RadixServeError, shown

if TYPE_CHECKING:
    IntArray = array[int]
else:
    IntArray = array  # not subscriptable at run time before Python 3.12


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token, or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client is gone or asked for it
    ERROR = "error"  # refused or failed; RequestOutput.error says why


class Namespace(NamedTuple):
    """Everything beside the tokens that K and V depend on, or that must not be shared. Equal tokens in two namespaces share no page."""

    adapter: str = ""  # LoRA adapter and its version; "" is the base model
    cache_salt: str = ""
    extra_key: str = ""


BASE_NAMESPACE = Namespace()


MAX_PIN_TTL_S = 86400.0
MAX_LOGPROBS = 20  # likeliest tokens per position


class TokenLogprob(NamedTuple):
    """Natural logarithms of the model's own distribution: before penalties, bias, temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest (token id, logprob), best first; as many as were asked for


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token and when to stop. Names and meanings are OpenAI's, with SGLang's extensions.

    Raises InvalidRequestError from validate().
    """

    max_tokens: int = 16  # 0: only compute the prompt (its log-probabilities, or to have it cached)
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh random one per request
    stop: tuple[str, ...] = ()  # matched by the detokenizer, on the server's side of the wire
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # no EOS and no stop token before so many
    frequency_penalty: float = 0.0  # taken off a logit for each time that its token is in the output so far
    presence_penalty: float = 0.0  # taken off once if it is there at all
    repetition_penalty: float = 1.0  # divides (multiplies, if negative) logits of tokens in prompt or output so far
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    logprobs: int | None = None  # log-probabilities of output tokens, and of so many likeliest ones at each; None: none
    prompt_logprobs: int | None = None  # the same of prompt tokens
    prompt_logprobs_start: int = 0  # first prompt position whose log-probability is wanted; that of position 0 does not exist

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def validate(self) -> "SamplingParams":
        """Return self (with plain integers), or raise InvalidRequestError naming the field, what was expected and what came."""
        _check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if not isinstance(self.stop, tuple | list) or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequestError(f"stop: expected a tuple of non-empty strings, got {shown(self.stop)}", param="stop")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequestError(
                f"stop_token_ids: expected a tuple of token ids, got {shown(self.stop_token_ids)}", param="stop_token_ids"
            )
        for token_id in self.stop_token_ids:
            _check_range("stop_token_ids", token_id, 0, 2**31 - 1)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        for token_id, bias in self.logit_bias:
            _check_range("logit_bias", token_id, 0, 2**31 - 1)
            _check_range("logit_bias", bias, -100.0, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs_start", self.prompt_logprobs_start, 0, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(f"ignore_eos: expected True or False, got {shown(self.ignore_eos)}", param="ignore_eos")
        # numpy's integers wrap around where Python's grow
        foreign: dict[str, Any] = {}
        for spec in dataclasses.fields(self):
            value: Any = getattr(self, spec.name)
            if type(value) not in (int, bool) and isinstance(value, numbers.Integral):
                foreign[spec.name] = int(value)
        return dataclasses.replace(self, **foreign) if foreign else self


def _check_range(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    """The bounds say the type: integers where `low` is one."""
    kind: Any = numbers.Integral if isinstance(low, int) else numbers.Real
    # written so that NaN fails too
    is_kind = isinstance(value, kind) and not isinstance(value, bool)
    if not is_kind or not (low < value if open_low else low <= value) or not value <= high:
        bracket = "(" if open_low else "["
        what = "an integer" if isinstance(low, int) else "a number"
        raise InvalidRequestError(f"{name}: expected {what} in {bracket}{low}, {high}], got {shown(value)}", param=name)


def token_array(ids: Sequence[Any], vocab_size: int) -> IntArray:
    """A prompt's ids, checked; InvalidRequestError names the first that is no id of this vocabulary."""
    if not ids:
        raise InvalidRequestError("prompt: expected at least one token, got an empty list", param="prompt")
    # in bulk, since a prompt may be long; the bad one is looked for only when there is one
    if set(map(type, ids)) != {int} or not is_in_vocabulary(ids, vocab_size):
        raise wrong_token_error(ids, vocab_size)
    return array("i", ids)


def is_in_vocabulary(ids: Sequence[int], vocab_size: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)


def wrong_token_error(ids: Sequence[Any], vocab_size: int) -> InvalidRequestError:
    bad = next(token_id for token_id in ids if type(token_id) is not int or not 0 <= token_id < vocab_size)
    return InvalidRequestError(f"prompt: expected token ids in [0, {vocab_size - 1}], got {shown(bad)}", param="prompt")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt that asks for one continuation. A call with n choices is n requests with equal prompts."""

    request_id: str
    prompt_ids: IntArray  # array('i'), not empty
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0  # concrete, 0 <= seed < 2**64: sampling.seed or a random draw of whoever built the request
    choice_index: int = 0
    namespace: Namespace = BASE_NAMESPACE
    priority: int = 0  # higher runs first
    pin_ttl_s: float | None = None  # keep the prompt's cached pages for so long, once it is computed; 0 < pin_ttl_s <= MAX_PIN_TTL_S


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Overwrite of a slot's page table: page_ids go to table[slot, first_page : first_page + len(page_ids)]."""

    first_page: int
    page_ids: IntArray


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's share of a step: positions start .. start + count of the sequence in `slot`.

    token_ids holds `count` ids, or none for a plain decode row, whose single token is the one that the runner sampled last in this slot.
    A sampled row draws the token that follows its last position. Besides, the log-probabilities of prompt tokens may be wanted: that of
    target_ids[j] is read off the logits at position target_start + j, which lies in [start, start + count).
    """

    slot: int
    start: int
    count: int
    token_ids: IntArray
    page_writes: tuple[PageWrite, ...] = ()
    is_sampled: bool = True  # False: an unfinished prompt chunk, or a prompt that asks for no token
    output_index: int = 0  # i of the token sampled from this row: the draw is a pure function of (seed, choice_index, i)
    request: Request | None = None  # at first sight of the slot: its prompt, sampling, seed and choice index; later None
    output_ids: IntArray = field(default_factory=lambda: array("i"))  # at first sight: output so far, of a request that resumes
    target_ids: IntArray = field(default_factory=lambda: array("i"))
    target_start: int = 0
    adapter_id: int = 0

    @property
    def is_decode(self) -> bool:
        return not self.token_ids


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows (indices into ScheduledBatch.rows) whose page tables begin with the same num_pages page ids."""

    rows: tuple[int, ...]
    num_pages: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step, complete: new each time, ids and ints only. Decode rows come first."""

    step: int
    rows: tuple[ScheduledRow, ...]
    freed_slots: tuple[int, ...] = ()  # slots given back since the last batch; a slot may reappear in `rows` with a new request
    prefix_groups: tuple[PrefixGroup, ...] = ()

    @property
    def num_decode_rows(self) -> int:
        return sum(row.is_decode for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds the runner spent in its parts of a step."""

    plan_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    # parts of forward_s, where they are measured (native products; attention with --profile-steps)
    attention_s: float = 0.0
    products_s: float = 0.0
    row_ops_s: float = 0.0
    head_s: float = 0.0
    # beside plan_s: until the device had read an earlier step's tables, which lie where this step's go
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What one row was asked for beside its token."""

    sampled: TokenLogprob | None  # where the request's sampling.logprobs is set and the row was sampled
    prompt: tuple[TokenLogprob, ...] = ()  # one for each of the row's target_ids


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The runner's answer to one ScheduledBatch: one token id per row, in row order; -1 for a row that is not sampled."""

    step: int
    token_ids: tuple[int, ...]
    times: StepTimes = StepTimes()
    logprobs: tuple[RowLogprobs | None, ...] = ()  # empty, or one per row; None where nothing was asked for


@dataclass(frozen=True, slots=True)
class RequestError:
    """An error on its way through the wire (see errors.py for the fields)."""

    message: str
    http_status: int = 400
    error_type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None

    @classmethod
    def of(cls, error: RadixServeError) -> "RequestError":
        return cls(error.message, error.http_status, error.error_type, error.code, error.param)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """News of one request. Exactly one output of each request has a finish_reason, and it is the last."""

    request_id: str
    token_ids: tuple[int, ...]  # new since the previous output
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, re-used at first admission; a later retraction does not count again
    num_output_tokens: int  # so far, token_ids included
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop token that ended it; it is the last of token_ids
    error: RequestError | None = None
    queue_time_s: float = 0.0  # arrival at the scheduler to first admission
    logprobs: tuple[TokenLogprob, ...] = ()  # of token_ids, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # new ones, in order; the very first is that of position max(1, prompt_logprobs_start)
    num_pinned_tokens: int | None = None  # of the prompt, whole pages from its start; None: no pin was asked for, or not done yet

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None
