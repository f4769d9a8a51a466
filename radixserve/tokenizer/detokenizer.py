"""Detokenizer: token ids, as they come, into text that is safe to send.

Safe means: no half character, and nothing that a stop string would take back. The joined text depends on the ids alone, never on how
they were split over calls: bytes go through one incremental UTF-8 decoder, and a stop string is looked for in the joined text.
"""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from radixserve.tokenizer.tokenizer import Tokenizer


class DetokenizedText(NamedTuple):
    text: str  # new and final
    matched_stop: str | None  # the stop string that ended the text; it and what follows are cut off
    num_tokens: int  # of all tokens pushed so far: those that made up the text, the match included


class Detokenizer:
    """One per choice. Holds at most one incomplete character and the longest text that could begin a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: tuple[str, ...] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = tokenizer.strips_first_space
        self._held = ""
        self._num_tokens = 0
        self._matched_stop: str | None = None
        self._take_up(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> DetokenizedText:
        """Add ids. After a match, further ids are ignored and every answer names the same stop and count."""
        if not self._stop:  # nothing to look for between two tokens: all at once
            self._num_tokens += len(token_ids)
            return DetokenizedText(self._utf8.decode(b"".join(map(self._bytes_of, token_ids))), None, self._num_tokens)
        ready = ""
        for token_id in token_ids:
            if self._matched_stop is not None:
                break
            self._num_tokens += 1
            ready += self._release(self._utf8.decode(self._bytes_of(token_id)))
        return DetokenizedText(ready, self._matched_stop, self._num_tokens)

    def finish(self) -> str:
        """What was held back, when no more ids come: a beginning of a stop string, then U+FFFD for an incomplete character."""
        if self._matched_stop is not None:
            return ""
        rest, self._held = self._held + self._utf8.decode(b"", final=True), ""
        return rest

    def _take_up(self, prompt_ids: Sequence[int]) -> None:
        """Go on where the prompt ends: its last bytes may be half a character that the first ids complete."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._visible_bytes(token_id) + tail
            if len(tail) >= 4:  # no UTF-8 character is longer
                break
        if tail:
            self._strip_space = False
        self._utf8.decode(tail)

    def _visible_bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._visible_bytes(token_id)
        if piece and self._strip_space:
            self._strip_space = False
            return piece.removeprefix(b" ")
        return piece

    def _release(self, new_text: str) -> str:
        """Move new text behind what is held; give out what no stop string can claim any more."""
        if not new_text:
            return ""
        text = self._held + new_text
        # the match that ends first wins, whatever the split; of two that end together, the longer
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self._matched_stop = min(matches)
            self._held = ""
            return text[:start]
        num_held = self._num_claimed(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _num_claimed(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stop))
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return len(tail)
        return 0
