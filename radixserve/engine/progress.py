"""Whether an engine that has work gets anywhere: the time since it last moved something. Knows nothing of sockets or requests."""

from radixserve.metrics import EngineStats


class Progress:
    """Times are those of one monotonic clock, in seconds, given by the caller."""

    def __init__(self) -> None:
        self._moved_at = 0.0
        self._num_steps = 0

    def note_move(self, now: float) -> None:
        """Outputs came, an engine started, or work arrived at an idle one."""
        self._moved_at = max(self._moved_at, now)

    def note_stats(self, stats: EngineStats, now: float) -> None:
        """A step without outputs (a chunk of a long prompt) is a move too; an answer that shows no new step is none."""
        num_steps = stats.prefill_steps_total + stats.decode_steps_total
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self.note_move(now)

    def silent_s(self, now: float) -> float:
        return now - self._moved_at

    def has_moved_since(self, then: float) -> bool:
        return self._moved_at > then
