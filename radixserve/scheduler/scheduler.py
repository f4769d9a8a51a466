"""Scheduler: add, finish, abort; schedule() -> ScheduledBatch; update(StepOutput) -> RequestOutputs. It does not know tensors.

One token budget per step: decode rows first, then prompt chunks of running requests, then newly admitted ones, all in one forward.
A step may be planned while the one before it is under way (unanswered.py), unless somebody has to give way.
Every running request can go on, or one that loses less gives way to it (pressure.py). Whenever a step is planned:

    free + evictable >= sum of promised pages of the running requests
    promised: what its known tokens lack; all that it may ask for, once it has been retracted --max-retractions times

Admission keeps it, with an estimate of the output to come on top; retraction.py makes it true again where the estimate was too low; reserve
relies on it.
"""

import dataclasses
from collections.abc import Iterator
from itertools import chain

from radixserve.config import SchedulerConfig
from radixserve.core import (
    FinishReason,
    Request,
    RequestError,
    RequestOutput,
    RowLogprobs,
    ScheduledBatch,
    ScheduledRow,
    StepOutput,
)
from radixserve.errors import InvalidRequestError, QueueFullError
from radixserve.metrics import EngineStats
from radixserve.scheduler.admission import Room, check_length
from radixserve.scheduler.chunk_size import ChunkSize
from radixserve.scheduler.ends import End, OutsideEnds, count_end
from radixserve.scheduler.order.ranking import Rules
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.preemption import Preemption
from radixserve.scheduler.pressure import NewTokenRatio
from radixserve.scheduler.retraction import Retractions
from radixserve.scheduler.running import RunningRequests
from radixserve.scheduler.state import RequestState
from radixserve.scheduler.unanswered import PlannedStep, Unanswered
from radixserve.tree.prefix_cache import PageCache


class Scheduler:
    """`config` is resolved: chunked_prefill_size and max_running_requests are numbers, the former not below the latter."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PageCache,
        context_length: int,
        eos_token_ids: frozenset[int] = frozenset(),
        forced_retraction_interval: int | None = None,
        rules: Rules | None = None,
    ) -> None:
        """For tests: retract somebody every so many steps (RADIXSERVE_TEST_RETRACT), another waiting order than the config's."""
        assert config.chunked_prefill_size is not None and config.max_running_requests is not None
        assert config.chunked_prefill_size >= config.max_running_requests, "each running request needs a token of every step's budget"
        self._config = config
        self.cache = cache
        self.context_length = context_length
        self.max_step_tokens = config.chunked_prefill_size
        self._eos_token_ids = eos_token_ids
        self._waiting = WaitingQueue(config, cache, rules)
        self._running = RunningRequests(cache, config.max_running_requests)
        self._new_token_ratio = NewTokenRatio(config.schedule_conservativeness)
        self._chunk_size = ChunkSize(config.target_step_ms / 1000, self.max_step_tokens) if config.target_step_ms else None
        self._room = Room(cache, self._running, self._new_token_ratio)
        self._preemption = Preemption(config, cache, self._waiting, self._running, self._room)
        self._ends = OutsideEnds(config, self._waiting, self._running)
        self._unanswered = Unanswered()
        self._outbox: list[RequestOutput] = []
        self._step = 0
        self._answered_at = 0.0
        self.totals = EngineStats()  # only the *_total fields are kept here
        self._retractions = Retractions(
            config, self._waiting, self._running, self._new_token_ratio, self.totals, forced_retraction_interval
        )

    # ---- requests come and go

    def add(self, request: Request, now: float) -> None:
        """Accept a request, or raise InvalidRequestError. An accepted one ends in exactly one final RequestOutput."""
        check_length(request, self.context_length, self.cache.num_pages * self.cache.page_size)
        if request.request_id in self._running or request.request_id in self._waiting:
            raise InvalidRequestError(f"request_id: {request.request_id!r} is in use by a request that is not finished")
        limit = self._config.max_queued_requests
        # who was added since the last step and will find a free slot does not wait
        if limit is not None and len(self._waiting) >= limit + self._running.num_free_slots:
            raise QueueFullError(f"the server is busy: {limit} requests wait already; try again later")
        num_positions = len(request.prompt_ids) + max(request.sampling.max_tokens, 1) - 1  # the last token is not fed back
        total_pages = -(-num_positions // self.cache.page_size)
        self.totals.requests_total += 1
        state = RequestState(request, now, total_pages, self.totals.requests_total)
        state.is_guaranteed = self._config.max_retractions == 0
        self._waiting.add(state)
        self._ends.added(state)

    def abort(self, request_id: str) -> None:
        """End a request at the next step. Unknown ids, of requests that have just ended, are fine."""
        self._ends.abort(request_id)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string was completed by output token number num_output_tokens: end the request there, with reason stop."""
        self._ends.finish(request_id, num_output_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._outbox or self._ends.has_marks or self._unanswered)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def new_token_ratio(self) -> float:
        return self._new_token_ratio.value

    @property
    def max_prompt_tokens(self) -> int:
        """Prompt tokens that the next step takes at most."""
        return self._chunk_size.num_tokens if self._chunk_size is not None else self.max_step_tokens

    # ---- one step

    def schedule(self, now: float) -> ScheduledBatch | None:
        """Plan the next step; None if there is nothing to compute, or nothing before the step under way is answered.

        One step may be planned ahead, while the answer to the one before it is outstanding; the runner takes them in this order.
        """
        for state, row in self._unanswered.assume():
            self._assume(state, row, now)
        self._apply_marks(now)
        for end in self._ends.late(now):
            self._end(end, now)
        if self._unanswered and self._retractions.are_due(self._step, self._preempted):
            return None
        for end in () if self._unanswered else self._retractions.make_all(self._step, self._preempted, now):
            self._end(end, now)
        going_on = [state for state in self._running.values() if not state.is_ending]
        decoding = [state for state in going_on if state.is_decoding]
        prefilling = [state for state in going_on if not state.is_decoding]
        planned = list(zip(decoding, self._running.decode_rows(decoding, now), strict=True)) if decoding else []
        budget = min(self.max_step_tokens - len(planned), self.max_prompt_tokens)
        for state in chain(prefilling, self._admissions(now)) if budget > 0 else ():
            row = self._running.row(state, min(budget, state.num_uncomputed), now)
            planned.append((state, row))
            budget -= row.count
            if budget == 0:
                break
        if not planned:
            return None
        if decoding:
            self._new_token_ratio.after_decode_steps()
        self._step += 1
        self._unanswered.add(PlannedStep(self._step, planned, now))
        return ScheduledBatch(self._step, tuple(row for _, row in planned), self._running.take_freed_slots())

    def update(self, output: StepOutput, now: float) -> list[RequestOutput]:
        """Take in what the runner computed for the oldest batch that was not answered; returns the news of all requests."""
        planned = self._unanswered.take(output.step)
        asked = output.logprobs or (None,) * len(planned.rows)
        num_prompt_tokens = 0
        for (state, row), token_id, logprobs in zip(planned.rows, output.token_ids, asked, strict=True):
            num_prompt_tokens += 0 if row.is_decode else row.count
            self._running.answered(state, now)
            if not planned.is_assumed:
                self._assume(state, row, now)
            if not state.has_ended:
                self._take_result(state, row, token_id, logprobs, now)
        self.totals.prefill_tokens_total += num_prompt_tokens
        if self._chunk_size is not None:
            # a step that was planned ahead began when the one before it was over
            self._chunk_size.after_step(num_prompt_tokens, now - max(planned.planned_at, self._answered_at))
        self._answered_at = now
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
        self._new_token_ratio.after_decode_steps(num_steps)

    def take_outputs(self) -> list[RequestOutput]:
        """News that waits to be sent: of update(), and final ones of requests that were aborted or finished from outside."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def flush(self, now: float) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests wait or run."""
        self._apply_marks(now)
        if self._waiting or self._running or self._unanswered:
            return False
        self.cache.flush(now)
        return True

    def check_account(self) -> None:
        """Recount every page, promise and slot. Call between update() and the next schedule()."""
        self._running.check_account()
        self._unanswered.check(self.cache.page_size)

    def _preempted(self) -> list[RequestState]:
        return self._preemption.victims(self.new_token_ratio, self.max_step_tokens, self.max_prompt_tokens)

    # ---- admission

    def _admissions(self, now: float) -> Iterator[RequestState]:
        """Admit waiting requests one by one, in the policy's order, while the caller asks for more; the first that does not fit ends it."""
        if not self._waiting or not self._running.num_free_slots:
            return
        self._room.recount()
        self._waiting.start_pass(self._running.values())
        while self._running.num_free_slots:
            state = self._waiting.head()
            if state is None or self._room.is_blocked(state) or not self._try_admit(state, now):
                return
            yield state

    def _try_admit(self, state: RequestState, now: float) -> bool:
        """A request that does not fit, with its output in full, leaves no trace."""
        match = self.cache.match(state.request.namespace, state.token_ids, state.max_cached)
        if not self._room.take(state, match):
            return False
        if not self._running:
            self._new_token_ratio.reset()
        self._running.start(state, match, now)
        self._waiting.admitted(state)
        self._ends.admitted(state)
        if not state.was_retracted:  # what is said of a request is said of its first admission
            state.num_cached = match.num_tokens
            state.queue_time_s = now - state.arrival_s
            self.totals.prompt_tokens_total += state.num_prompt
            self.totals.cached_tokens_total += state.num_cached
        return True

    # ---- results

    def _assume(self, state: RequestState, row: ScheduledRow, now: float) -> None:
        """Whatever the next step may count on: it runs after this one."""
        if state.has_ended:
            return
        state.assume(row)
        if not row.is_decode:
            self._running.publish(state, now)

    def _take_result(self, state: RequestState, row: ScheduledRow, token_id: int, logprobs: RowLogprobs | None, now: float) -> None:
        """The news of one row: a token, log-probabilities of prompt tokens, or the end of a request that wanted no token."""
        reason: FinishReason | None = None
        token_ids: tuple[int, ...] = ()
        if row.is_sampled:
            state.learn(token_id)
            token_ids = (token_id,)
            self.totals.generation_tokens_total += 1
            reason = state.finish_reason(self._eos_token_ids)
        elif state.num_uncomputed == 0:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._running.stop(state, now)
            self._ends.ended(state)
            self.totals.finished_total += 1
        output = state.output(token_ids, reason, token_id if reason is FinishReason.STOP else None, logprobs)
        if token_ids or reason or output.prompt_logprobs:
            self._outbox.append(output)

    # ---- ends from outside

    def _apply_marks(self, now: float) -> None:
        for end in self._ends.marked():
            self._end(end, now)

    def _end(self, end: End, now: float) -> None:
        """End a request, wherever it is, for a reason that its tokens do not give."""
        state, reason, error = end
        state.forget_unknown()
        if state.path is not None:
            self._running.stop(state, now)
        else:
            self._waiting.remove(state.request.request_id)
        self._ends.ended(state)
        count_end(end, self.totals)
        output = state.output((), reason)
        self._outbox.append(output if error is None else dataclasses.replace(output, error=RequestError.of(error)))
