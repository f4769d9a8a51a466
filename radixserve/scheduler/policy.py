"""In which order waiting requests are admitted."""

from collections.abc import Callable, Iterator

from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PageCache


class WaitingQueue:
    """The waiting requests by id, in order of arrival; ordered() gives them in the policy's order."""

    def __init__(self, policy: str, cache: PageCache) -> None:
        self._order = POLICIES[policy]
        self._cache = cache
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def add(self, state: RequestState) -> None:
        self._states[state.request.request_id] = state

    def put_back(self, state: RequestState) -> None:
        """Take in a retracted request, at the place that its arrival gives it."""
        self.add(state)
        self._states = {one.request.request_id: one for one in sorted(self, key=lambda one: one.arrival)}

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def remove(self, request_id: str) -> RequestState | None:
        return self._states.pop(request_id, None)

    def ordered(self) -> list[RequestState]:
        return self._order(list(self._states.values()), self._cache)


def fcfs(waiting: list[RequestState], cache: PageCache) -> list[RequestState]:
    """Higher priority first; then first come, first served."""
    return sorted(waiting, key=lambda state: -state.request.priority)


def lpm(waiting: list[RequestState], cache: PageCache) -> list[RequestState]:
    """Higher priority first; then longest cached prefix; equal lengths in order of arrival. Nothing is matched twice in one version."""
    for state in waiting:
        if state.match_version != cache.version and not state.is_following:
            state.matched = cache.match(state.request.namespace, state.token_ids, state.max_cached).num_tokens
            state.match_version = cache.version
    return sorted(waiting, key=lambda state: (-state.request.priority, -state.matched))


POLICIES: dict[str, Callable[[list[RequestState], PageCache], list[RequestState]]] = {"lpm": lpm, "fcfs": fcfs}
