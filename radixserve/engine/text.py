"""OutputText: from a request's outputs to its text, by one rule for LLM and server.

The rule: a stop string ends the text and is cut off; the EOS or stop token that ended a request counts as a token and is no text.
"""

from typing import NamedTuple

from radixserve.core import FinishReason, Request, RequestOutput
from radixserve.tokenizer import Detokenizer, Tokenizer


class TextDelta(NamedTuple):
    text: str  # new and final
    num_tokens: int  # of the whole output so far: those that count
    finish_reason: FinishReason | None  # set once the text is complete
    must_finish: bool  # a stop string was found in a request that still runs: the engine is to finish it after num_tokens
    matched: str | int | None = None  # the stop string, or the EOS or stop token, that ended it


class OutputText:
    """One per request."""

    def __init__(self, tokenizer: Tokenizer, request: Request, skip_special_tokens: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, request.prompt_ids, request.sampling.stop, skip_special_tokens)
        self._is_stopped = False

    def push(self, output: RequestOutput) -> TextDelta:
        """The text that this output adds. After a stop string nothing adds anything any more."""
        was_stopped = self._is_stopped
        ids = output.token_ids if output.stop_token_id is None else output.token_ids[:-1]
        news = self._detokenizer.push(ids)
        if news.matched_stop is not None:
            self._is_stopped = True
            must_finish = not was_stopped and not output.is_final
            return TextDelta(news.text, news.num_tokens, FinishReason.STOP, must_finish, news.matched_stop)
        rest = self._detokenizer.finish() if output.is_final else ""
        return TextDelta(news.text + rest, output.num_output_tokens, output.finish_reason, must_finish=False, matched=output.stop_token_id)
