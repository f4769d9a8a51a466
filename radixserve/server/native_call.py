"""What POST /generate asks for, SGLang's native protocol: one prompt or a batch, sampling_params in an object of their own."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from radixserve.core import MAX_LOGPROBS
from radixserve.errors import InvalidRequestError
from radixserve.server import sampling_fields as shared
from radixserve.server.call import Call, Prompt
from radixserve.server.fields import Fields, show
from radixserve.server.known_fields import refuse_unsupported

NAMES = shared.SamplingNames(max_tokens="max_new_tokens", min_tokens="min_new_tokens", seed="sampling_seed")
DEFAULT_MAX_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class NativeCall:
    call: Call
    is_batch: bool  # a list was sent, so a list is answered
    return_logprob: bool
    with_text: bool  # of each token in the log-probabilities

    def prompt_start(self, index: int) -> int | None:
        """First prompt position whose log-probability is shown; None: none is."""
        sampling = self.call.prompts[index // self.call.n].sampling
        return None if sampling.prompt_logprobs is None else sampling.prompt_logprobs_start

    def num_top(self, index: int) -> int:
        return self.call.prompts[index // self.call.n].sampling.logprobs or 0


def parse_native_call(body: dict[str, Any], limits: shared.Limits) -> NativeCall:
    """Raises InvalidRequestError, UnsupportedFieldError or ContextLengthError, with the field as param."""
    fields = Fields(body)
    name, contents, is_batch = _read_prompts(fields)
    return_logprob = fields.boolean("return_logprob")
    asked = _read_logprobs_asked(fields, return_logprob)
    params = _read_params(fields, len(contents))
    n = shared.read_n(params[0], limits)
    if any(shared.read_n(other, limits) != n for other in params):
        raise InvalidRequestError("sampling_params: expected the same n in all of them", param="sampling_params")
    shared.check_num_choices(limits, name, params[0].path_of("n"), len(contents), n)
    prompts = []
    for index, content in enumerate(contents):
        of_prompt = params[index % len(params)]
        sampling = shared.read_sampling(of_prompt, NAMES, limits, DEFAULT_MAX_NEW_TOKENS, asked)
        if isinstance(content, list):
            content = shared.read_token_ids(fields, limits, name, content, sampling.max_tokens)
        prompts.append(Prompt(content, sampling, of_prompt.boolean("skip_special_tokens", True)))
    call = Call(
        model=None,
        prompts=tuple(prompts),
        n=n,
        is_stream=fields.boolean("stream"),
        namespace=shared.read_namespace(fields),
        priority=shared.read_priority(fields),
        pin_ttl_s=shared.read_pin_ttl(fields),
        ids=_read_ids(fields, len(prompts), n),
        logprobs_name="top_logprobs_num",
    )
    parsed = NativeCall(call, is_batch or n > 1, return_logprob, fields.boolean("return_text_in_logprobs"))
    for part in (fields, *params):
        refuse_unsupported(part)
    ignored = dict.fromkeys((*fields.unread(), *(name for part in params for name in part.unread())))
    return dataclasses.replace(parsed, call=dataclasses.replace(call, ignored=tuple(ignored)))


def _read_prompts(fields: Fields) -> tuple[str, list[Any], bool]:
    """(field, prompts, whether they came as a batch): of text one or a list, of input_ids one or a list; the ids are not looked at yet."""
    text, ids = fields.raw("text"), fields.raw("input_ids")
    if (text is None) == (ids is None):
        raise InvalidRequestError("text: expected exactly one of text and input_ids", param="text")
    if isinstance(text, str):
        return "text", [text], False
    name, value, kind = ("text", text, str) if ids is None else ("input_ids", ids, list)
    if not isinstance(value, list) or not value:
        what = "a string or a list of strings" if kind is str else "a list of token ids, or a list of lists of token ids"
        raise fields.wrong(name, f"{what}, not empty", value)
    if kind is list and not isinstance(value[0], list):
        return name, [value], False
    if not all(isinstance(item, kind) for item in value):
        raise fields.wrong(name, "a list of one kind", value)
    return name, value, True


def _read_params(fields: Fields, num_prompts: int) -> list[Fields]:
    """One object for all prompts, or a list with one for each."""
    value = fields.raw("sampling_params")
    if not isinstance(value, list):
        return [fields.object("sampling_params")]
    if len(value) != num_prompts:
        raise fields.wrong("sampling_params", f"an object, or a list of {num_prompts}, one per prompt", value)
    return fields.objects("sampling_params")


def _read_logprobs_asked(fields: Fields, return_logprob: bool) -> shared.LogprobsAsked:
    start = fields.integer("logprob_start_len", -1)
    num_top = fields.integer("top_logprobs_num", 0)
    if start < -1:
        raise fields.wrong("logprob_start_len", "an integer, -1 or above", start)
    if not return_logprob:
        return shared.LogprobsAsked()
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise fields.wrong("top_logprobs_num", f"an integer in [0, {MAX_LOGPROBS}]", num_top)
    return shared.LogprobsAsked(num_top, None if start == -1 else num_top, max(start, 0))


def _read_ids(fields: Fields, num_prompts: int, n: int) -> tuple[str, ...]:
    """One per choice: of one name for several choices SGLang makes name_0, name_1, ...; a list has one for each prompt."""
    rid = fields.raw("rid")
    if rid is None:
        return ()
    if not isinstance(rid, list):
        name = shared.check_rid(fields, "rid", rid)
        return (name,) if num_prompts * n == 1 else tuple(f"{name}_{index}" for index in range(num_prompts * n))
    if len(rid) != num_prompts:
        raise fields.wrong("rid", f"a string, or a list of {num_prompts}, one per prompt", rid)
    names = [shared.check_rid(fields, "rid", item) for item in rid]
    if len(set(names)) < num_prompts:
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise InvalidRequestError(f"rid: expected another name for each prompt, got {show(twice)} more than once", param="rid")
    return tuple(name if n == 1 else f"{name}_{k}" for name in names for k in range(n))
