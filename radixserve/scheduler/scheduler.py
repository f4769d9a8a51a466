"""Scheduler: add, finish, abort; schedule() -> ScheduledBatch; update(StepOutput) -> RequestOutputs. It does not know tensors.

One token budget per step: decode rows first, then prompt chunks of running requests, then newly admitted ones, all in one forward.
Admission reserves prompt and max_tokens in full, so that a running request never lacks a page:

    free + evictable >= sum of reserved_pages of the running requests        (kept by admission, relied on by reserve)
"""

import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from radixserve.config import SchedulerConfig
from radixserve.core import (
    FinishReason,
    PageWrite,
    Request,
    RequestError,
    RequestOutput,
    RowLogprobs,
    ScheduledBatch,
    ScheduledRow,
    StepOutput,
)
from radixserve.errors import InvalidRequestError, QueueFullError, RequestTimeoutError, context_length_error
from radixserve.metrics import EngineStats
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.sharing import is_worth_waiting
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PageCache


class _Blocked(NamedTuple):
    """How things stood when the head of the queue did not fit."""

    num_pages: int  # free + evictable - promised
    growth: int  # of the cache


class Scheduler:
    """`config` is resolved: chunked_prefill_size and max_running_requests are numbers, the former not below the latter."""

    def __init__(self, config: SchedulerConfig, cache: PageCache, context_length: int, eos_token_ids: frozenset[int] = frozenset()) -> None:
        assert config.chunked_prefill_size is not None and config.max_running_requests is not None
        assert config.chunked_prefill_size >= config.max_running_requests, "each running request needs a token of every step's budget"
        self._config = config
        self.cache = cache
        self.context_length = context_length
        self.max_step_tokens = config.chunked_prefill_size
        self._eos_token_ids = eos_token_ids
        self._waiting = WaitingQueue(config.schedule_policy, cache)
        self._running: dict[str, RequestState] = {}  # in order of admission
        self._free_slots = list(range(config.max_running_requests - 1, -1, -1))
        self._freed_slots: list[int] = []  # since the last batch
        self._reserved_pages = 0  # sum over the running requests
        self._to_abort: list[str] = []
        self._to_finish: dict[str, int] = {}
        self._in_flight: list[tuple[RequestState, ScheduledRow]] = []  # the rows of the last batch, until update()
        self._outbox: list[RequestOutput] = []
        self._blocked: _Blocked | None = None
        self._step = 0
        self.totals = EngineStats()  # only the *_total fields are kept here

    # ---- requests come and go

    def add(self, request: Request, now: float) -> None:
        """Accept a request, or raise InvalidRequestError. An accepted one ends in exactly one final RequestOutput."""
        if not request.prompt_ids:
            raise InvalidRequestError("prompt: expected at least one token, got none", param="prompt")
        if request.request_id in self._running or request.request_id in self._waiting:
            raise InvalidRequestError(f"request_id: {request.request_id!r} is in use by a request that is not finished")
        self._check_length(len(request.prompt_ids), request.sampling.max_tokens)
        limit = self._config.max_queued_requests
        # who was added since the last step and will find a free slot does not wait
        if limit is not None and len(self._waiting) >= limit + len(self._free_slots):
            raise QueueFullError(f"the server is busy: {limit} requests wait already; try again later")
        num_positions = len(request.prompt_ids) + max(request.sampling.max_tokens, 1) - 1  # the last token is not fed back
        total_pages = -(-num_positions // self.cache.page_size)
        self._blocked = None
        self.totals.requests_total += 1
        self._waiting.add(RequestState(request, now, total_pages))

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        limit = min(self.context_length, self.cache.num_pages * self.cache.page_size)
        if num_prompt + max_tokens > limit:
            raise context_length_error(num_prompt, max_tokens, limit, is_pool=limit < self.context_length)

    def abort(self, request_id: str) -> None:
        """End a request at the next step. Unknown ids, of requests that have just ended, are fine."""
        if request_id in self._running or request_id in self._waiting:
            self._to_abort.append(request_id)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string was completed by output token number num_output_tokens: end the request there, with reason stop."""
        if request_id in self._running:
            self._to_finish[request_id] = num_output_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._outbox or self._to_abort or self._to_finish)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # ---- one step

    def schedule(self, now: float) -> ScheduledBatch | None:
        """Plan the next step; None if there is nothing to compute. Each batch is answered by update() before the next one is planned."""
        assert not self._in_flight, "the last batch was not answered yet"
        self._apply_marks(now)
        self._time_out(now)
        decoding = [state for state in self._running.values() if state.is_decoding]
        prefilling = [state for state in self._running.values() if not state.is_decoding]
        self.cache.make_room(sum(state.needs_page(1, self.cache.page_size) for state in decoding), now)
        planned = [(state, self._row(state, 1, now)) for state in decoding]
        budget = self.max_step_tokens - len(planned)
        for state in chain(prefilling, self._admissions(now)) if budget > 0 else ():
            row = self._row(state, min(budget, state.num_uncomputed), now)
            planned.append((state, row))
            budget -= row.count
            if budget == 0:
                break
        if not planned:
            return None
        self._in_flight = planned
        self._step += 1
        batch = ScheduledBatch(self._step, tuple(row for _, row in planned), tuple(self._freed_slots))
        self._freed_slots.clear()
        return batch

    def update(self, output: StepOutput, now: float) -> list[RequestOutput]:
        """Take in what the runner computed for the last batch; returns the news of all requests."""
        assert output.step == self._step, f"expected the output of step {self._step}, got that of step {output.step}"
        assert len(output.token_ids) == len(self._in_flight)
        asked = output.logprobs or (None,) * len(self._in_flight)
        for (state, row), token_id, logprobs in zip(self._in_flight, output.token_ids, asked, strict=True):
            state.num_computed += row.count
            if not row.is_decode:
                self.totals.prefill_tokens_total += row.count
                self._publish(state, now)
            self._take_result(state, row, token_id, logprobs, now)
        self._in_flight = []
        return self.take_outputs()

    def repeat_decode(self, num_steps: int) -> None:
        """For simulation: as if the last batch, of decode rows alone, were planned and answered num_steps times more with the same tokens.

        Nobody may end, need a page or fit in meanwhile; the news of these steps are not told.
        """
        for state in self._running.values():
            assert state.is_decoding and not state.needs_page(num_steps + 1, self.cache.page_size), "expected steps that change no page"
            state.token_ids.extend(state.token_ids[-1:] * num_steps)
            state.num_computed += num_steps
        self.totals.generation_tokens_total += num_steps * len(self._running)

    def take_outputs(self) -> list[RequestOutput]:
        """News that waits to be sent: of update(), and final ones of requests that were aborted or finished from outside."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def flush(self, now: float) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests wait or run."""
        self._apply_marks(now)
        if self._waiting or self._running:
            return False
        self.cache.flush(now)
        return True

    def check_account(self) -> None:
        """Recount every page (see tree/account.py), and the promises of admission."""
        states = list(self._running.values())
        self.cache.check_account([state.path for state in states if state.path is not None])
        assert self._reserved_pages == sum(state.reserved_pages for state in states)
        assert self.cache.num_free_pages + self.cache.num_evictable_pages >= self._reserved_pages, "more pages are promised than there are"
        slots = [state.slot for state in states]
        assert sorted(slots + self._free_slots) == list(range(len(slots) + len(self._free_slots))), "a slot has no owner or several"

    # ---- admission

    def _admissions(self, now: float) -> Iterator[RequestState]:
        """Admit waiting requests one by one, in the policy's order, while the caller asks for more; the first that does not fit ends it."""
        if not self._waiting or not self._free_slots or self._is_still_blocked():
            return
        for state in self._waiting.ordered():
            if is_worth_waiting(state, self._running.values(), self.cache):
                continue
            if not self._free_slots or not self._try_admit(state, now):
                return
            yield state

    def _is_still_blocked(self) -> bool:
        """Nothing has changed in favour of the request that did not fit last time, so the queue need not be looked at again."""
        blocked = self._blocked
        return blocked is not None and self._unpromised_pages() <= blocked.num_pages and self.cache.growth == blocked.growth

    def _unpromised_pages(self) -> int:
        return self.cache.num_free_pages + self.cache.num_evictable_pages - self._reserved_pages

    def _try_admit(self, state: RequestState, now: float) -> bool:
        """A request that does not fit leaves no trace."""
        match = self.cache.match(state.request.namespace, state.token_ids, state.max_cached)
        num_needed = state.total_pages - match.num_tokens // self.cache.page_size
        if num_needed > self._unpromised_pages() - match.num_unlocked_pages:
            self._blocked = _Blocked(self._unpromised_pages(), self.cache.growth)
            return False
        self._blocked = None
        self._waiting.remove(state.request.request_id)
        self._running[state.request.request_id] = state
        state.path = self.cache.lock(match, now)
        state.slot = self._free_slots.pop()
        state.num_computed = match.num_tokens
        state.page_writes = [PageWrite(0, state.path.pages[:])] if state.path.pages else []
        self._reserved_pages += state.reserved_pages
        state.num_cached = match.num_tokens
        state.queue_time_s = now - state.arrival_s
        self.totals.prompt_tokens_total += state.num_prompt
        self.totals.cached_tokens_total += state.num_cached
        return True

    # ---- rows and pages

    def _row(self, state: RequestState, count: int, now: float) -> ScheduledRow:
        """The next `count` positions of a running request."""
        assert state.path is not None and 0 < count <= state.num_uncomputed
        held = len(state.path.pages)
        write = self.cache.reserve(state.path, state.num_computed + count, now)
        self._reserved_pages -= len(state.path.pages) - held
        if write is not None:
            state.page_writes.append(write)
        return state.next_row(count)

    def _publish(self, state: RequestState, now: float) -> None:
        """Let others share the prompt that is computed so far."""
        assert state.path is not None
        write = self.cache.commit(state.path, state.token_ids, state.num_computed, now)
        if write is not None:
            state.page_writes.append(write)

    def _take_result(self, state: RequestState, row: ScheduledRow, token_id: int, logprobs: RowLogprobs | None, now: float) -> None:
        """The news of one row: a token, log-probabilities of prompt tokens, or the end of a request that wanted no token."""
        reason: FinishReason | None = None
        token_ids: tuple[int, ...] = ()
        if row.is_sampled:
            state.token_ids.append(token_id)
            token_ids = (token_id,)
            self.totals.generation_tokens_total += 1
            reason = state.finish_reason(self._eos_token_ids)
        elif state.num_uncomputed == 0:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._release(state, now)
            self.totals.finished_total += 1
        output = state.output(token_ids, reason, token_id if reason is FinishReason.STOP else None, logprobs)
        if token_ids or reason or output.prompt_logprobs:
            self._outbox.append(output)

    def _release(self, state: RequestState, now: float) -> None:
        """Take a request out of the running ones; what it computed stays in the tree."""
        assert state.path is not None
        del self._running[state.request.request_id]
        self._reserved_pages -= state.reserved_pages
        self.cache.release(state.path, state.token_ids, min(state.num_computed, len(state.token_ids)), now)
        state.path = None
        self._free_slots.append(state.slot)
        self._freed_slots.append(state.slot)

    # ---- ends from outside

    def _apply_marks(self, now: float) -> None:
        for request_id, num_output_tokens in self._to_finish.items():
            state = self._running.get(request_id)
            if state is not None:
                del state.token_ids[state.num_prompt + num_output_tokens :]
                self._release(state, now)
                self.totals.finished_total += 1
                self._outbox.append(state.output((), FinishReason.STOP))
        for request_id in self._to_abort:
            state = self._waiting.remove(request_id) or self._running.get(request_id)
            self._blocked = None
            if state is not None:
                if state.path is not None:
                    self._release(state, now)
                self.totals.aborted_total += 1
                self._outbox.append(state.output((), FinishReason.ABORT))
        self._to_finish.clear()
        self._to_abort.clear()

    def _time_out(self, now: float) -> None:
        """End what waited or took longer than the config allows."""
        config = self._config
        if config.queue_timeout_s is None and config.request_timeout_s is None:
            return
        for states, limit, doing in (
            (self._waiting, config.queue_timeout_s, "waited"),
            (self._waiting, config.request_timeout_s, "waited"),
            (self._running.values(), config.request_timeout_s, "took"),
        ):
            for state in [state for state in states if limit is not None and now - state.arrival_s > limit]:
                if state.path is None:
                    self._waiting.remove(state.request.request_id)
                else:
                    self._release(state, now)
                self._blocked = None  # it may have been the one that did not fit
                self.totals.timed_out_total += 1
                error = RequestTimeoutError(f"the request {doing} longer than the {limit:g} s that this server allows")
                self._outbox.append(dataclasses.replace(state.output((), FinishReason.ERROR), error=RequestError.of(error)))
