"""Which decode rows begin with the same pages, and whether reading those once for all of them pays. Host arrays in, host arrays out.

    rows, sorted by their page ids     shared with the next row (pages)
      a  7 3 9 4 1                       4 |####
      b  7 3 9 4 8                       2 |##        a rectangle of this histogram is a group: width + 1 rows that share `height` pages,
      c  7 3 5 2                         0 |          and its area is the number of pages that need not be read again
      d  6 1 4
Groups do not nest: of two that overlap the larger saving wins, and what is left of it and right of it is searched again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Decode rows whose page tables begin with the same num_pages page ids."""

    rows: tuple[int, ...]
    num_pages: int

    @property
    def num_saved_pages(self) -> int:
        return (len(self.rows) - 1) * self.num_pages


@dataclass(frozen=True, slots=True)
class SharingCost:
    """When a group pays. The defaults model an H200 and are estimates: about 4 TB/s, 12 microseconds for two more launches a layer (the
    shared part and the merge), and 50 more where the alternative is a replayed graph, which a step with groups cannot be."""

    bytes_per_s: float = 4e12
    launch_s: float = 12e-6
    without_graph_s: float = 50e-6

    def min_saved_bytes(self, has_graph: bool) -> int:
        """Of one layer: all groups of a step together must save more."""
        return int(self.bytes_per_s * (self.launch_s + (self.without_graph_s if has_graph else 0.0)))


class _Rectangle(NamedTuple):
    first: int  # of the histogram's columns; rows first .. last + 1
    last: int
    height: int

    @property
    def area(self) -> int:
        return (self.last - self.first + 1) * self.height


def find_groups(kv_indptr: Int32, kv_indices: Int32, num_rows: int, min_saved_pages: int = 1) -> list[RowGroup]:
    """Groups among rows 0 .. num_rows, each saving at least min_saved_pages.

    A group leaves every row at least its last page: what a step writes is never read as shared.
    """
    # most steps share nothing: a look at the first pages shows it
    _, which, counts = np.unique(kv_indices[kv_indptr[:num_rows]], return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(counts[which] > 1).tolist()
    tables = {row: kv_indices[kv_indptr[row] : kv_indptr[row + 1] - 1] for row in candidates}
    # bytes order as ids do where it matters: equal beginnings lie side by side
    order = sorted(candidates, key={row: table.tobytes() for row, table in tables.items()}.__getitem__)
    shared = [_common_len(tables[one], tables[other]) for one, other in pairwise(order)]
    groups = []
    for first, last, height in _rectangles(shared, 0, len(shared), max(1, min_saved_pages)):
        groups.append(RowGroup(tuple(sorted(order[first : last + 2])), height))
    return sorted(groups, key=lambda group: group.rows)


class GroupFinder:
    """find_groups for step after step: looked for again when the rows change, when a group does not hold any more, and now and then.

    Two rows with the same page at the same place have the same tokens up to there (K and V depend on all tokens before), so a look at a
    group's last page tells whether it holds.
    """

    def __init__(self, max_age: int = 32) -> None:
        self._max_age = max_age
        self._age = 0
        self._key: tuple[int, bytes] | None = None
        self._groups: list[RowGroup] = []

    def find(self, kv_indptr: Int32, kv_indices: Int32, num_rows: int, min_saved_pages: int) -> list[RowGroup]:
        key = min_saved_pages, kv_indices[kv_indptr[:num_rows]].tobytes()
        self._age += 1
        if key != self._key or self._age >= self._max_age or not all(_holds(group, kv_indptr, kv_indices) for group in self._groups):
            self._groups = find_groups(kv_indptr, kv_indices, num_rows, min_saved_pages)
            self._key, self._age = key, 0
        return self._groups


def _holds(group: RowGroup, kv_indptr: Int32, kv_indices: Int32) -> bool:
    rows = np.array(group.rows)
    places = kv_indptr[rows] + group.num_pages
    # the last page of a row is its own
    if not (places < kv_indptr[rows + 1]).all():
        return False
    last = kv_indices[places - 1]
    return bool((last == last[0]).all())


def _common_len(one: Int32, other: Int32) -> int:
    n = min(len(one), len(other))
    is_different = one[:n] != other[:n]
    place = int(is_different.argmax()) if n else 0
    return place if n and is_different[place] else n


def _rectangles(heights: list[int], start: int, end: int, min_area: int) -> Iterator[_Rectangle]:
    """The largest rectangle within heights[start:end], then those beside it. A column beside it joins two of its rows to others, so
    the parts left and right begin one column further away."""
    spans = [(start, end)]
    while spans:
        start, end = spans.pop()
        largest = _largest_rectangle(heights, start, end)
        if largest is not None and largest.area >= min_area:
            yield largest
            spans += [(start, largest.first - 1), (largest.last + 2, end)]


def _largest_rectangle(heights: list[int], start: int, end: int) -> _Rectangle | None:
    best: _Rectangle | None = None
    open_since: list[tuple[int, int]] = []  # (first column, height), heights rising
    for column in range(start, end + 1):
        height = heights[column] if column < end else 0
        first = column
        while open_since and open_since[-1][1] >= height:
            first, tall = open_since.pop()
            rectangle = _Rectangle(first, column - 1, tall)
            if best is None or rectangle.area > best.area:
                best = rectangle
        if height:
            open_since.append((first, height))
    return best
