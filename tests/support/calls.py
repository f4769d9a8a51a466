"""How much work an admission is, counted in calls: the same on any machine, however busy."""

import cProfile
import statistics
from collections.abc import Callable, Iterable

from radixserve.scheduler.policy import WaitingQueue


def calls_per_admission(queue: WaitingQueue, add: Callable[[int], None], numbers: Iterable[int]) -> float:
    """The median over passes that each admit the first and then add() one more; `numbers` are those of who is added."""
    counts = []
    for number in numbers:
        profile = cProfile.Profile()
        profile.enable()
        queue.start_pass(())
        head = queue.head()
        assert head is not None
        queue.admitted(head)
        add(number)
        profile.disable()
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    return statistics.median(counts)
