"""Overtakings: who was passed by how many later arrivals since it began to wait. The hard half of the bound on waiting.

Requests of one priority wait in a lane. An admission counts against those of a lane whose key is earlier, that is against its first ones,
up to a mark: the admitted key, or the end of the lane where all are earlier. Whoever comes later stands behind the mark. So it is enough
to know each lane's `limit` latest marks: who stands before all of them was overtaken that often, and its elders in the lane were too.
Who comes back to wait (it was retracted) does not stand at the end, and gets a lane of its own.

Clients may send any priorities, so there may be as many lanes as requests: only those are looked at that an admission counts against.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Hashable

from radixserve.scheduler.order.ranking import LazyMin
from radixserve.scheduler.order.tour import Key
from radixserve.scheduler.state import RequestState


class _Lane:
    __slots__ = ("end", "first", "is_first_overdue", "marks", "name", "waiting")

    def __init__(self, name: Hashable, key: Key) -> None:
        self.name = name
        self.waiting: LazyMin[RequestState] = LazyMin()
        self.first: Key | None = None  # the earliest key that waits; None: nobody does
        self.is_first_overdue = False
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
        self._lane_of: dict[Key, _Lane] = {}  # by its first key
        self._firsts: list[Key] = []  # sorted
        self._overdue: list[Key] = []  # those of them that are, sorted

    def add(self, state: RequestState, key: Key, comes_back: bool) -> None:
        name = state.request.request_id if comes_back else state.request.priority
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(name, key)
        lane.end = max(lane.end, key)
        lane.waiting.put(state, key)
        self._places[state.request.request_id] = lane
        self._look_at_first(lane)

    def remove(self, state: RequestState) -> None:
        lane = self._places.pop(state.request.request_id)
        lane.waiting.put(state, None)
        self._look_at_first(lane)
        if lane.first is None:
            del self._lanes[lane.name]

    def _look_at_first(self, lane: _Lane) -> None:
        first = lane.waiting.first()
        key = first[0] if first is not None else None
        if key == lane.first:
            return
        if lane.first is not None:
            del self._lane_of[lane.first], self._firsts[bisect_left(self._firsts, lane.first)]
            if lane.is_first_overdue:
                del self._overdue[bisect_left(self._overdue, lane.first)]
        lane.first, lane.is_first_overdue = key, False
        if key is not None:
            self._lane_of[key] = lane
            insort(self._firsts, key)
            self._note_if_overdue(lane, key)

    def _note_if_overdue(self, lane: _Lane, first: Key) -> None:
        if not lane.is_first_overdue and lane.is_overdue(first, self._limit):
            lane.is_first_overdue = True
            insort(self._overdue, first)

    def admitted(self, key: Key) -> None:
        for first in self._firsts[: bisect_left(self._firsts, key)]:
            lane = self._lane_of[first]
            lane.pass_by(key, self._limit)
            self._note_if_overdue(lane, first)

    def is_overdue(self, state: RequestState, key: Key) -> bool:
        return self._places[state.request.request_id].is_overdue(key, self._limit)

    @property
    def is_any_overdue(self) -> bool:
        return bool(self._overdue)

    def bar(self, oldest: RequestState, key: Key) -> Key | None:
        """Nobody with a later key than this may go first, where `oldest` is the first by key of those who can; None: anybody may.

        What is overdue in other lanes bars the way even if it cannot go itself, as it waits for a leader.
        """
        own = self._places[oldest.request.request_id]
        if own.is_overdue(key, self._limit):
            return key
        num_before = bisect_left(self._overdue, key)
        if num_before > own.is_first_overdue:  # its own lane's first is before it, if that is overdue
            return key
        return self._overdue[num_before] if num_before < len(self._overdue) else None
