"""The OpenAI protocol as a client needs it: the body of a request, and what the events of its answer say. Completions and chats.

Knows nothing of sockets.
"""

from dataclasses import dataclass, field
from typing import Any

CHAT_ROUTE = "/chat/completions"  # how the path of a chat route ends
# a model that thinks aloud sends its thoughts by another name, and its calls of tools by a third: tokens all the same
_CONTENT = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class RequestFailedError(Exception):
    """The server refused, sent an error event, or ended the stream early."""


def completion_body(model: str, prompt: list[int] | str, max_tokens: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The request's JSON. `extra` is merged over it; a field that is None there is dropped."""
    return _body({"model": model, "prompt": prompt}, max_tokens, extra)


def chat_body(model: str, messages: list[dict[str, str]], max_tokens: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """As completion_body, for a chat."""
    return _body({"model": model, "messages": messages}, max_tokens, extra)


def _body(asked: dict[str, Any], max_tokens: int, extra: dict[str, Any] | None) -> dict[str, Any]:
    body = {
        **asked,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        # usage in every chunk says how many tokens it holds; servers that do not know the wish ignore it
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "seed": 0,
    }
    return {name: value for name, value in {**body, **(extra or {})}.items() if value is not None}


@dataclass(slots=True)
class AnswerStream:
    """What has come so far. token_times: as in bench.client.Completion."""

    token_times: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False

    def add(self, event: dict[str, Any], now: float) -> None:
        """Raises RequestFailedError for an error's event; what is no event of this protocol raises whatever it runs into."""
        if event.get("error"):
            raise RequestFailedError(str(event["error"]))
        usage = event.get("usage")
        self.usage = usage or self.usage
        choice = (event.get("choices") or [{}])[0]
        ids = choice.get("token_ids")
        if ids:
            self.token_ids = [*(self.token_ids or []), *ids]
        if not choice:
            return
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        self.text.append(text or "")
        if usage:
            num_new = usage["completion_tokens"] - len(self.token_times)
        elif ids:
            num_new = len(ids)
        else:
            num_new = 1 if _may_be_a_token(choice, text) else 0
        before = self.token_times[-1] if self.token_times else now
        self.token_times += [before + (now - before) * (index + 1) / num_new for index in range(num_new)]


def _may_be_a_token(choice: dict[str, Any], text: str | None) -> bool:
    """Where nobody counts. A last chunk with only a finish reason is none, nor is a chat's first one with only a role; an empty text
    without either is a token held back."""
    delta = choice.get("delta") or {}
    if text or any(delta.get(name) for name in _CONTENT):
        return True
    return not choice.get("finish_reason") and not delta.get("role")
