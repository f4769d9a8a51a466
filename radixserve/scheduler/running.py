"""RunningRequests: who runs, in which slot, holding which pages; and who has ended while a row of it is still under way."""

from collections.abc import Iterator, Mapping, Sequence, ValuesView

from radixserve.core import PageWrite, ScheduledRow
from radixserve.scheduler.pressure import expected_pages, promised_pages
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PageCache, PrefixMatch


class RunningRequests(Mapping[str, RequestState]):
    """By request id, in order of admission. It hands slots and pages to requests and takes them back; whose turn it is, others decide."""

    def __init__(self, cache: PageCache, num_slots: int) -> None:
        self._cache = cache
        self._states: dict[str, RequestState] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._freed_slots: list[int] = []  # since the last batch
        self._leaving: list[RequestState] = []  # ended; slot and pages are theirs until their last row is answered

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def values(self) -> ValuesView[RequestState]:
        return self._states.values()

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def take_freed_slots(self) -> tuple[int, ...]:
        freed, self._freed_slots = tuple(self._freed_slots), []
        return freed

    # ---- a request's life in here

    def start(self, state: RequestState, match: PrefixMatch, now: float) -> None:
        """Give it a free slot, and a hold of the pages that it re-uses."""
        self._states[state.request.request_id] = state
        state.path = self._cache.lock(match, now, state.request.priority)
        state.slot = self._free_slots.pop()
        state.num_computed = match.num_tokens
        state.page_writes = [PageWrite(0, state.path.pages[:])] if state.path.pages else []

    def row(self, state: RequestState, count: int, now: float) -> ScheduledRow:
        """The next `count` positions of one that is not decoding, with the pages for them."""
        assert state.path is not None and 0 < count <= state.num_uncomputed
        write = self._cache.reserve(state.path, state.num_computed + count, now)
        if write is not None:
            state.page_writes.append(write)
        state.num_unanswered += 1
        return state.next_row(count)

    def decode_rows(self, states: Sequence[RequestState], now: float) -> list[ScheduledRow]:
        """The next position of each of these, which are decoding, with the pages for them."""
        wanted = [(state.path, state.num_computed + 1) for state in states if state.path is not None]
        rows = []
        for state, write in zip(states, self._cache.reserve_all(wanted, now), strict=True):
            if write is not None:
                state.page_writes.append(write)
            state.num_unanswered += 1
            rows.append(state.next_decode_row())
        return rows

    def answered(self, state: RequestState, now: float) -> None:
        """One of its rows is no longer under way: nobody writes any more to what only that row named."""
        assert state.path is not None and state.num_unanswered > 0
        state.num_unanswered -= 1
        if state.path.replaced:
            self._cache.drop_replaced(state.path)
        if state.has_ended and not state.num_unanswered:
            self._leaving.remove(state)
            self._release(state, now, is_over=True)

    def publish(self, state: RequestState, now: float) -> None:
        """Let others share what it has computed so far, and keep its prompt where that was asked for."""
        assert state.path is not None
        write = self._cache.commit(state.path, state.token_ids, state.num_computed, now, state.num_unanswered > 0)
        if write is not None:
            state.page_writes.append(write)
        ttl_s = state.request.pin_ttl_s
        if ttl_s is not None and state.num_pinned is None and state.num_computed >= state.num_prompt:
            state.num_pinned = self._cache.pin(state.request.namespace, state.request.prompt_ids, ttl_s, now).num_tokens

    def stop(self, state: RequestState, now: float, is_over: bool = True) -> None:
        """Take back slot and pages once no row of it is under way; what it computed stays in the tree. is_over: it will not run again."""
        del self._states[state.request.request_id]
        state.has_ended = is_over
        if state.num_unanswered:
            assert is_over, "expected nobody to be put back to wait while a row of it is under way"
            self._leaving.append(state)
        else:
            self._release(state, now, is_over)

    def _release(self, state: RequestState, now: float, is_over: bool) -> None:
        assert state.path is not None
        self._cache.release(state.path, state.token_ids, min(state.num_computed, len(state.token_ids)), now, is_over)
        state.path = None
        self._free_slots.append(state.slot)
        self._freed_slots.append(state.slot)

    # ---- how much room there is

    def num_missing_pages(self) -> int:
        """How many pages too few there are for all to go on; 0 or less where there are enough."""
        page_size = self._cache.page_size
        promised = sum(promised_pages(state, page_size) for state in self._states.values())
        return promised - self._cache.num_free_pages - self._cache.num_evictable_pages

    def num_unexpected_pages(self, ratio: float) -> int:
        """Pages that nobody here is expected to need: the room for admissions. May be negative."""
        page_size = self._cache.page_size
        expected = sum(expected_pages(state, ratio, page_size) for state in self._states.values())
        return self._cache.num_free_pages + self._cache.num_evictable_pages - expected

    def check_account(self) -> None:
        """Recount pages (see tree/account.py), promises and slots, after a step."""
        states, page_size = list(self._states.values()), self._cache.page_size
        holders = states + self._leaving
        self._cache.check_account([state.path for state in holders if state.path is not None])
        assert all(state.has_ended and state.num_unanswered for state in self._leaving), "one that left still holds pages"
        # a decode row's next page is found, or made by a retraction, when the next step is planned
        promised = sum(promised_pages(state, page_size) for state in states if state.is_guaranteed or not state.is_decoding)
        available = self._cache.num_free_pages + self._cache.num_evictable_pages
        assert promised <= available, f"{promised} pages are promised, and {available} are free or evictable"
        slots = [state.slot for state in holders]
        assert sorted(slots + self._free_slots) == list(range(len(slots) + len(self._free_slots))), "a slot has no owner or several"
