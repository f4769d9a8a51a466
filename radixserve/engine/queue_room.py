"""Whether a whole call fits the engine's queue, known on the server's side before anything is sent: no call is half refused.

The scheduler refuses a request when waiting >= max_queued_requests + free slots, which is: unfinished >= max_queued_requests + slots.
A request counts here until its final output has come, also when nobody listens any more: so never less than in the engine.
"""

from radixserve.errors import QueueFullError


class QueueRoom:
    def __init__(self, max_queued_requests: int | None) -> None:
        self._max_queued_requests = max_queued_requests
        self._unfinished: set[str] = set()
        self.num_slots = 0  # of the engine, known once it is ready
        self.num_refusals = 0  # calls

    @property
    def max_requests(self) -> int | None:
        """What waits and runs together, at most; None: no limit."""
        return None if self._max_queued_requests is None else self._max_queued_requests + self.num_slots

    def require(self, num_requests: int) -> None:
        """Raises QueueFullError when so many more do not fit now."""
        limit = self.max_requests
        if limit is not None and len(self._unfinished) + num_requests > limit:
            self.num_refusals += 1
            raise QueueFullError(
                f"the server is busy: at most {self._max_queued_requests} requests may wait, and {num_requests} more do not fit; "
                "try again later"
            )

    def enter(self, request_id: str) -> None:
        self._unfinished.add(request_id)

    def leave(self, request_id: str) -> None:
        self._unfinished.discard(request_id)

    def clear(self) -> None:
        """The engine is gone, and all of them with it."""
        self._unfinished.clear()
