"""Overtakings: who was passed by too many later arrivals. The hard half of the bound on waiting.

An admission counts against all who wait with an earlier key. So of two who wait the earlier one was overtaken at least as often as the
other, and it is enough to know the `limit` latest keys that were admitted: whoever is before all of them was overtaken that often.
"""

import heapq

from radixserve.scheduler.order.ranking import Key


class Overtakings:
    """Keys are those of the order of arrival (order/policies.py). One that begins to wait with a key before admissions already made (it
    was retracted, or is more urgent) finds them counted against it: it is overdue rather sooner than later."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest: list[Key] = []  # a heap of the `limit` latest keys admitted

    def admitted(self, key: Key) -> None:
        if len(self._latest) < self._limit:
            heapq.heappush(self._latest, key)
        elif key > self._latest[0]:
            heapq.heapreplace(self._latest, key)

    def is_overdue(self, key: Key) -> bool:
        return len(self._latest) == self._limit and self._latest[0] > key
