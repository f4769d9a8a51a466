"""What may come in at all, and for whom there is room now."""

from typing import NamedTuple

from radixserve.core import Request
from radixserve.errors import InvalidRequestError, context_length_error
from radixserve.scheduler.pressure import NewTokenRatio, expected_pages
from radixserve.scheduler.running import RunningRequests
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PageCache, PrefixMatch


def check_length(request: Request, context_length: int, num_pool_tokens: int) -> None:
    """InvalidRequestError unless prompt and max_tokens fit the context, and the pool when nobody else is there."""
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if not num_prompt:
        raise InvalidRequestError("prompt: expected at least one token, got none", param="prompt")
    limit = min(context_length, num_pool_tokens)
    if num_prompt + max_tokens > limit:
        raise context_length_error(num_prompt, max_tokens, limit, is_pool=limit < context_length)


class _Blocked(NamedTuple):
    """How things stood when the head of the queue did not fit."""

    state: RequestState
    num_pages: int  # that it needs
    growth: int  # of the cache


class Room:
    """Pages that nobody who runs is expected to need, and the memory of who did not fit last time."""

    def __init__(self, cache: PageCache, running: RunningRequests, ratio: NewTokenRatio) -> None:
        self._cache = cache
        self._running = running
        self._ratio = ratio
        self._num_pages = 0
        self._blocked: _Blocked | None = None

    def recount(self) -> None:
        """Count anew, before a pass of admissions."""
        self._num_pages = self._running.num_unexpected_pages(self._ratio.value)

    def is_blocked(self, state: RequestState) -> bool:
        """It is the one that did not fit last time, and by the last count nothing has changed in its favour."""
        blocked = self._blocked
        return (
            blocked is not None and blocked.state is state and self._num_pages < blocked.num_pages and self._cache.growth == blocked.growth
        )

    def num_lacking(self, state: RequestState, match: PrefixMatch) -> int:
        """Pages that are too few, by the last count, for a request with its output in full; 0 or less where it fits."""
        return self._num_needed(state, match) - self._num_pages

    def take(self, state: RequestState, match: PrefixMatch) -> bool:
        """Set pages aside for a request, with its output in full; False, and nothing done, if there are too few."""
        num_needed = self._num_needed(state, match)
        if num_needed > self._num_pages:
            self._blocked = _Blocked(state, num_needed, self._cache.growth)
            return False
        self._blocked = None
        self._num_pages -= num_needed
        return True

    def _num_needed(self, state: RequestState, match: PrefixMatch) -> int:
        page_size = self._cache.page_size
        return expected_pages(state, 1.0, page_size) - match.num_tokens // page_size + match.num_unlocked_pages
