"""Ends that a request's own tokens do not give: aborts, stop strings that a client's text completed, time limits, no room."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from radixserve.config import SchedulerConfig
from radixserve.core import FinishReason
from radixserve.errors import PoolExhaustedError, QueueTimeoutError, RadixServeError, RequestTimeoutError
from radixserve.metrics import EngineStats
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.running import RunningRequests
from radixserve.scheduler.state import RequestState


class End(NamedTuple):
    state: RequestState
    reason: FinishReason
    error: RadixServeError | None = None


class OutsideEnds:
    """Marks that wait for the next step, and time limits. Who takes an End takes the request out before asking for the next one.

    Marks are on states, not on ids: an id may be used again as soon as its request has ended.
    """

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, running: RunningRequests) -> None:
        self._config = config
        self._waiting = waiting
        self._running = running
        self._to_abort: list[RequestState] = []
        self._to_finish: dict[RequestState, int] = {}
        # by arrival, the earliest first: a look for late ones stops at the first that is in time
        self._present: OrderedDict[int, RequestState] = OrderedDict()
        self._never_ran: OrderedDict[int, RequestState] = OrderedDict()

    # ---- requests come and go

    def added(self, state: RequestState) -> None:
        self._present[state.arrival] = self._never_ran[state.arrival] = state

    def admitted(self, state: RequestState) -> None:
        self._never_ran.pop(state.arrival, None)

    def ended(self, state: RequestState) -> None:
        del self._present[state.arrival]
        self._never_ran.pop(state.arrival, None)

    # ---- marks

    @property
    def has_marks(self) -> bool:
        return bool(self._to_abort or self._to_finish)

    def abort(self, request_id: str) -> None:
        state = self._find(request_id)
        if state is not None:
            self._to_abort.append(state)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        state = self._find(request_id)  # it may have been retracted meanwhile
        if state is not None and state.num_output:
            self._to_finish[state] = num_output_tokens

    def marked(self) -> Iterator[End]:
        for state, num_output_tokens in self._to_finish.items():
            if state.arrival in self._present:
                del state.token_ids[state.num_prompt + num_output_tokens :]
                yield End(state, FinishReason.STOP)
        for state in self._to_abort:
            if state.arrival in self._present:
                yield End(state, FinishReason.ABORT)
        self._to_finish.clear()
        self._to_abort.clear()

    # ---- time limits

    def late(self, now: float) -> Iterator[End]:
        """Those that waited or took longer than the config allows. Who ran once is past the queue's limit."""
        yield from self._over(self._never_ran, self._config.queue_timeout_s, now)
        yield from self._over(self._present, self._config.request_timeout_s, now)

    def _over(self, states: OrderedDict[int, RequestState], limit_s: float | None, now: float) -> Iterator[End]:
        while limit_s is not None and states:
            state = next(iter(states.values()))
            if now - state.arrival_s <= limit_s:
                return
            yield End(state, FinishReason.ERROR, _timeout_error(state, limit_s))

    def _find(self, request_id: str) -> RequestState | None:
        return self._running.get(request_id) or self._waiting.get(request_id)


def _timeout_error(state: RequestState, limit_s: float) -> RadixServeError:
    if state.path is not None or state.was_retracted:
        return RequestTimeoutError(f"the request took longer than the {limit_s:g} s that this server allows")
    return QueueTimeoutError(f"the request waited longer than the {limit_s:g} s that this server allows, and never ran; try again later")


def end_short(state: RequestState) -> End:
    """Nobody is left to give way, and still it cannot go on."""
    if state.num_output:
        return End(state, FinishReason.LENGTH)
    message = f"the KV pool has no room for this prompt of {state.num_prompt} tokens now; try again later"
    return End(state, FinishReason.ERROR, PoolExhaustedError(message))


def count_end(end: End, totals: EngineStats) -> None:
    if isinstance(end.error, RequestTimeoutError):
        totals.timed_out_total += 1
    elif end.reason is FinishReason.ABORT:
        totals.aborted_total += 1
    elif end.reason is FinishReason.STOP:
        totals.finished_total += 1
    else:
        totals.pool_exhausted_total += 1
