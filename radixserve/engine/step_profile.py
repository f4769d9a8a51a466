"""StepProfile: where the time of the first N steps went, as a table (--profile-steps N). Prefill steps and decode steps apart."""

from radixserve.core import ScheduledBatch, StepTimes

# name, whether it is a kernel's or a product's work, or a wait for one
PARTS = (
    ("tree", False),
    ("schedule, update", False),
    ("build batch, plan", False),
    ("wait for the device", True),
    ("attention", True),
    ("products", True),
    ("norms, rotary", True),
    ("head", True),
    ("rest of forward", False),
    ("sample, logprobs", False),
    ("rest of step", False),
    ("between steps (send, receive)", False),
)


class StepProfile:
    def __init__(self, num_steps: int, *, is_overlapped: bool = False) -> None:
        """is_overlapped: the steps behind the profiled ones are planned ahead, which the table has to say."""
        self._num_steps = self._num_left = num_steps
        self._is_overlapped = is_overlapped
        self._last_end: float | None = None
        self._rows: dict[str, list[tuple[int, int, list[float]]]] = {"decode": [], "prefill": []}  # rows, tokens, seconds by part

    @property
    def is_on(self) -> bool:
        return self._num_left > 0

    def add(self, batch: ScheduledBatch, times: StepTimes, *, tree: float, schedule: float, start: float, end: float, goes_on: bool) -> str:
        """Take note of one step. Returns the table when this was the last of them, else nothing. Times are of one clock, in seconds."""
        if self._num_left == 0:
            return ""
        between = start - self._last_end if self._last_end is not None else 0.0
        self._last_end = end if goes_on else None
        in_kernels = times.attention_s + times.products_s + times.row_ops_s + times.head_s
        known = tree + schedule + times.plan_s + times.wait_s + times.forward_s + times.sample_s
        kernels = [times.attention_s, times.products_s, times.row_ops_s, times.head_s]
        rests = [times.forward_s - in_kernels, times.sample_s, end - start - known, between]
        seconds = [tree, schedule, times.plan_s, times.wait_s, *kernels, *rests]
        kind = "decode" if batch.num_decode_rows == len(batch.rows) else "prefill"
        self._rows[kind].append((len(batch.rows), sum(row.count for row in batch.rows), seconds))
        self._num_left -= 1
        return self.table() if self._num_left == 0 else ""

    def end(self) -> str:
        """The run is over: the table of fewer steps than were asked for, or nothing where it was complete."""
        return self.table() if self.is_on else ""

    def table(self) -> str:
        num_seen = self._num_steps - self._num_left
        title = f"where the time of the first {num_seen} steps went, per step (--profile-steps {self._num_steps})"
        if self._num_left:
            title += f"; the run ended after {num_seen} of {self._num_steps} steps"
        if self._is_overlapped:
            title += "; these were taken one by one, without the overlap of later ones (--overlap-schedule on)"
        return "\n".join([title, *(_table(kind, steps) for kind, steps in self._rows.items() if steps)])


def _table(kind: str, steps: list[tuple[int, int, list[float]]]) -> str:
    """Means over the steps. "Outside of kernels" is what is neither memory traffic nor matrix work."""
    means = [sum(column) / len(steps) * 1e3 for column in zip(*(seconds for _, _, seconds in steps), strict=True)]
    total = max(sum(means), 1e-9)
    rows, tokens = sum(step[0] for step in steps) / len(steps), sum(step[1] for step in steps) / len(steps)
    outside = sum(mean for mean, (_, is_kernel) in zip(means, PARTS, strict=True) if not is_kernel)
    lines = [f"{len(steps)} {kind} steps of {rows:.1f} rows, {tokens:.1f} tokens: {total:.3f} ms a step"]
    lines += [f"  {name:<30} {mean:9.3f} ms {mean / total:7.1%}" for mean, (name, _) in zip(means, PARTS, strict=True)]
    # a sum of some of the parts above, and no part
    return "\n".join([*lines, f"  {'-' * 50}", f"  {'of which outside of kernels':<30} {outside:9.3f} ms {outside / total:7.1%}"])
