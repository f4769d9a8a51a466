"""Log-probabilities as the protocols show them, and the text of single tokens."""

from collections.abc import Sequence
from typing import Any

from radixserve.core import IntArray, TokenLogprob
from radixserve.server.json_arrays import EncodedArray
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


class CompletionLists:
    """The four parallel lists of OpenAI's completions, encoded; offsets are characters of the choice's whole text."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {name: [] for name in ("text_offset", "tokens", "token_logprobs", "top_logprobs")}

    def append(self, tokenizer: Tokenizer, offset: int, token_id: int, entry: TokenLogprob | None) -> None:
        """entry: None for the first token of a prompt, which nothing precedes; it has null for a log-probability."""
        self._lists["text_offset"].append(offset)
        self._lists["tokens"].append(token_text(tokenizer, token_id))
        self._lists["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
        self._lists["top_logprobs"].append(None if entry is None else _top(tokenizer, entry))

    def encoded(self) -> dict[str, EncodedArray]:
        return {name: EncodedArray(items) for name, items in self._lists.items()}


def prompt_lists(tokenizer: Tokenizer, prompt_ids: IntArray, echo_text: str, entries: Sequence[TokenLogprob]) -> dict[str, EncodedArray]:
    """Of an echoed prompt. entries: one for each token but the first."""
    lists = CompletionLists()
    text, offset = Detokenizer(tokenizer, (), (), skip_special_tokens=False), 0
    for token_id, entry in zip(prompt_ids, (None, *entries), strict=True):
        lists.append(tokenizer, offset, token_id, entry)
        piece = text.push([token_id]).text
        # a special token that the tokenizer added is not part of the text
        if echo_text.startswith(piece, offset):
            offset += len(piece)
    return lists.encoded()


class OutputLists:
    """One per choice: the lists of its output, delta by delta."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: IntArray, num_echoed_chars: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._offset = num_echoed_chars
        self._text = Detokenizer(tokenizer, prompt_ids, (), skip_special_tokens)

    def of(self, entries: Sequence[TokenLogprob]) -> dict[str, EncodedArray]:
        lists = CompletionLists()
        for entry in entries:
            lists.append(self._tokenizer, self._offset, entry.token_id, entry)
            self._offset += len(self._text.push([entry.token_id]).text)
        return lists.encoded()


def _top(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    """The token itself is always among them, as OpenAI has it. Of two tokens with one text the likelier stays."""
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(token_text(tokenizer, token_id), _finite(logprob))
    return top


def num_shown(entries: Sequence[TokenLogprob]) -> int:
    """Tokens that these entries show, the likeliest ones included; all have as many of those."""
    return len(entries) * (1 + len(entries[0].top)) if entries else 0
