"""Ends that a request's own tokens do not give: aborts, stop strings that a client's text completed, time limits, no room."""

from collections.abc import Iterator
from typing import NamedTuple

from radixserve.config import SchedulerConfig
from radixserve.core import FinishReason
from radixserve.errors import PoolExhaustedError, QueueTimeoutError, RadixServeError, RequestTimeoutError
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.running import RunningRequests
from radixserve.scheduler.state import RequestState


class End(NamedTuple):
    state: RequestState
    reason: FinishReason
    error: RadixServeError | None = None


class OutsideEnds:
    """Marks that wait for the next step, and time limits. Who takes an End takes the request out before asking for the next one."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue, running: RunningRequests) -> None:
        self._config = config
        self._waiting = waiting
        self._running = running
        self._to_abort: list[str] = []
        self._to_finish: dict[str, int] = {}

    @property
    def has_marks(self) -> bool:
        return bool(self._to_abort or self._to_finish)

    def abort(self, request_id: str) -> None:
        if self._find(request_id) is not None:
            self._to_abort.append(request_id)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        state = self._find(request_id)  # it may have been retracted meanwhile
        if state is not None and state.num_output:
            self._to_finish[request_id] = num_output_tokens

    def marked(self) -> Iterator[End]:
        for request_id, num_output_tokens in self._to_finish.items():
            state = self._find(request_id)
            if state is not None:
                del state.token_ids[state.num_prompt + num_output_tokens :]
                yield End(state, FinishReason.STOP)
        for request_id in self._to_abort:
            state = self._find(request_id)
            if state is not None:
                yield End(state, FinishReason.ABORT)
        self._to_finish.clear()
        self._to_abort.clear()

    def late(self, now: float) -> Iterator[End]:
        """Those that waited or took longer than the config allows. Who was retracted is past the queue's limit."""
        queue_limit, limit = self._config.queue_timeout_s, self._config.request_timeout_s
        if queue_limit is not None:
            yield from _over([state for state in self._waiting if not state.was_retracted], queue_limit, now)
        if limit is not None:
            yield from _over(list(self._waiting), limit, now)
            yield from _over(list(self._running.values()), limit, now)

    def _find(self, request_id: str) -> RequestState | None:
        return self._running.get(request_id) or self._waiting.get(request_id)


def _over(states: list[RequestState], limit_s: float, now: float) -> Iterator[End]:
    for state in states:
        if now - state.arrival_s > limit_s:
            yield End(state, FinishReason.ERROR, _timeout_error(state, limit_s))


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
