"""Log-probabilities as the protocols show them, and the text of single tokens."""

from collections.abc import Sequence
from typing import Any

from radixserve.core import IntArray, TokenLogprob
from radixserve.tokenizer import Detokenizer, Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's number for "as good as impossible"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone, as text; for one that is no whole text OpenAI's notation, which tells such tokens apart: bytes:\\xf0\\x9f."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The bytes of all entries join to the UTF-8 of the text, EOS and stop strings aside."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        data = list(tokenizer.token_bytes(token_id))
        return {"token": token_text(tokenizer, token_id), "logprob": _finite(logprob), "bytes": data}

    content = [{**shown(entry.token_id, entry.logprob), "top_logprobs": [shown(*top) for top in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def native_logprob(tokenizer: Tokenizer, token_id: int, logprob: float | None, with_text: bool) -> list[Any]:
    """SGLang's triple: [logprob, id, text]."""
    return [None if logprob is None else _finite(logprob), token_id, token_text(tokenizer, token_id) if with_text else None]


class CompletionLogprobs:
    """One per choice: the four parallel lists of OpenAI's completions, delta by delta, with offsets into the choice's whole text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: IntArray, echo_text: str | None, skip_special_tokens: bool) -> None:
        """echo_text: the prompt as it is shown before the output; None without echo."""
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._echo_text = echo_text
        self._offset = 0
        self._text = Detokenizer(tokenizer, prompt_ids, (), skip_special_tokens)

    def prompt(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of the echoed prompt: nothing precedes its first token, which has null for a log-probability."""
        assert self._echo_text is not None
        lists = _empty_lists()
        text = Detokenizer(self._tokenizer, (), (), skip_special_tokens=False)
        known = [None, *entries]
        for token_id, entry in zip(self._prompt_ids, known, strict=True):
            self._append(lists, token_id, entry)
            piece = text.push([token_id]).text
            # a special token that the tokenizer added is not part of the text
            if self._echo_text.startswith(piece, self._offset):
                self._offset += len(piece)
        self._offset = len(self._echo_text)
        return lists

    def output(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        lists = _empty_lists()
        for entry in entries:
            self._append(lists, entry.token_id, entry)
            self._offset += len(self._text.push([entry.token_id]).text)
        return lists

    def _append(self, lists: dict[str, Any], token_id: int, entry: TokenLogprob | None) -> None:
        lists["text_offset"].append(self._offset)
        lists["tokens"].append(token_text(self._tokenizer, token_id))
        lists["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        lists["top_logprobs"].append(None if entry is None else self._top(entry))

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The token itself is always among them, as OpenAI has it. Of two tokens with one text the likelier stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_text(self._tokenizer, token_id), _finite(logprob))
        return top


def _empty_lists() -> dict[str, Any]:
    return {"text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}


def concatenated(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: one[name] + other[name] for name in one}
