"""What the routes of one app share. Made by create_app and handed to each router; there is no module state."""

import logging
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from radixserve.config import ServerConfig
from radixserve.engine.client import AsyncEngine
from radixserve.errors import ContextLengthError, ModelNotFoundError, context_length_error
from radixserve.server.gate import Gate
from radixserve.server.latency import LatencyMetrics
from radixserve.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("radixserve.server")

DEFAULT_MODEL_ALIAS = "default"
_MIN_PRIORITY = -(2**31)
_MAX_LOGGED_NAMES = 1000
_MAX_NAMES_IN_HEADER = 20
_MAX_NAME_CHARS = 64


@dataclass(slots=True)
class ServerContext:
    engine: AsyncEngine
    tokenizer: Tokenizer
    config: ServerConfig
    registry: CollectorRegistry
    latency: LatencyMetrics
    served_name: str
    gate: Gate = field(default_factory=Gate)
    _logged_names: set[str] = field(default_factory=set)

    def check_model(self, name: str | None) -> None:
        is_known = name is None or name in (self.served_name, DEFAULT_MODEL_ALIAS) or self.config.accept_any_model
        if name is not None and not is_known:
            raise ModelNotFoundError(f"model: expected {self.served_name} or {DEFAULT_MODEL_ALIAS}, got {name[:100]}", param="model")

    @property
    def max_request_tokens(self) -> int:
        """What prompt and output of one request may have together."""
        return min(self.engine.info.context_length, self.engine.info.max_total_tokens)

    def client_priority(self, asked: int) -> int:
        """A client's wish, held to what --max-client-priority allows."""
        return max(_MIN_PRIORITY, min(asked, self.config.max_client_priority))

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """One rule at every endpoint: prompt and max_tokens together fit the context and the pool, or the request is refused."""
        longest = self.max_request_tokens
        if num_prompt_tokens + max_tokens > longest:
            is_pool = longest < self.engine.info.context_length
            raise context_length_error(num_prompt_tokens, max_tokens, longest, is_pool)

    def check_text(self, text: str) -> None:
        """Refuse, before the work of encoding it, a text that has many times more characters than the longest prompt could have."""
        longest = self.max_request_tokens
        # the factor leaves room for normalizers, which make one character of several
        if len(text) > 4 * longest * self.tokenizer.max_token_chars:
            raise ContextLengthError(
                f"This model's maximum context length is {longest} tokens. However, you sent {len(text)} characters, which hold more.",
                param="prompt",
            )

    def ignored_header(self, names: tuple[str, ...]) -> dict[str, str]:
        """Names the fields that were ignored, to the client in a header and once to the log."""
        if not names:
            return {}
        # A name comes from the client: nothing but printable ASCII may reach a header or the log.
        shown = [name[:_MAX_NAME_CHARS].encode("ascii", "backslashreplace").decode() for name in names[:_MAX_NAMES_IN_HEADER]]
        clean = ["".join(char if char.isprintable() else "?" for char in name) for name in shown]
        for name in clean:
            if name not in self._logged_names and len(self._logged_names) < _MAX_LOGGED_NAMES:
                self._logged_names.add(name)
                logger.warning("unknown request field ignored: %s", name)
        return {"x-radixserve-ignored": ", ".join(clean)}
