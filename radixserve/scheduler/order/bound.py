"""Overtakings: who was passed by how many later arrivals since it began to wait. The hard half of the bound on waiting.

Requests of one priority wait in a lane. An admission counts against those of a lane whose key is earlier, that is against its first ones,
up to a mark: the admitted key, or the end of the lane where all are earlier. Whoever comes later stands behind the mark. So it is enough
to know each lane's `limit` latest marks: who stands before all of them was overtaken that often, and its elders in the lane were too.
Who comes back to wait (it was retracted) does not stand at the end, and gets a lane of its own.
"""

import heapq
from collections.abc import Hashable

from radixserve.scheduler.order.ranking import LazyMin
from radixserve.scheduler.order.tour import Key
from radixserve.scheduler.state import RequestState


class _Lane:
    __slots__ = ("end", "marks", "name", "waiting")

    def __init__(self, name: Hashable, key: Key) -> None:
        self.name = name
        self.waiting: LazyMin[RequestState] = LazyMin()
        self.end = key  # the latest key in it
        self.marks: list[Key] = []  # a heap of the latest ones

    def pass_by(self, key: Key, limit: int) -> None:
        mark = min(key, (*self.end[:-1], self.end[-1] + 0.5))  # arrivals are whole numbers: after the last one, before the next
        if len(self.marks) < limit:
            heapq.heappush(self.marks, mark)
        elif mark > self.marks[0]:
            heapq.heapreplace(self.marks, mark)

    def is_overdue(self, key: Key, limit: int) -> bool:
        return len(self.marks) == limit and self.marks[0] > key


class Overtakings:
    """Keys are those of the order of arrival (order/policies.py)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lanes: dict[Hashable, _Lane] = {}
        self._places: dict[str, _Lane] = {}  # by request id

    def add(self, state: RequestState, key: Key, comes_back: bool) -> None:
        name = state.request.request_id if comes_back else state.request.priority
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(name, key)
        lane.end = max(lane.end, key)
        lane.waiting.put(state, key)
        self._places[state.request.request_id] = lane

    def remove(self, state: RequestState) -> None:
        lane = self._places.pop(state.request.request_id)
        lane.waiting.put(state, None)
        if lane.waiting.first() is None:
            del self._lanes[lane.name]

    def admitted(self, key: Key) -> None:
        for lane in self._lanes.values():
            lane.pass_by(key, self._limit)

    def is_overdue(self, state: RequestState, key: Key) -> bool:
        return self._places[state.request.request_id].is_overdue(key, self._limit)

    @property
    def is_any_overdue(self) -> bool:
        return any((first := lane.waiting.first()) is not None and lane.is_overdue(first[0], self._limit) for lane in self._lanes.values())

    def bar(self, oldest: RequestState, key: Key) -> Key | None:
        """Nobody with a later key than this may go first, where `oldest` is the first by key of those who can; None: anybody may.

        What is overdue in other lanes bars the way even if it cannot go itself, as it waits for a leader.
        """
        own = self._places[oldest.request.request_id]
        if own.is_overdue(key, self._limit):
            return key
        firsts = [(lane, first[0]) for lane in self._lanes.values() if lane is not own and (first := lane.waiting.first()) is not None]
        return min((max(first, key) for lane, first in firsts if lane.is_overdue(first, self._limit)), default=None)
