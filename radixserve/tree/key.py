"""TreeKey: what a path of the tree is named by. Segments of (namespace, token ids); most keys have one.

Token ids are bytes of native int32, so that slices hash, compare and prefix-test in C, whatever their length. A key looks at the caller's
array without a copy of it: the array must not change its length while the key is there.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from radixserve.core import IntArray, Namespace

TOKEN_BYTES = array("i").itemsize
Tokens = bytes | memoryview  # of bytes


class Segment(NamedTuple):
    namespace: Namespace
    tokens: Tokens  # int32 each


class TreeKey(NamedTuple):
    """One or more segments, neighbours of different namespaces. A page never crosses from one segment into the next: a match or an insert
    ends at the last whole page of a segment, and goes on to the next one only when that page ends the segment."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, namespace: Namespace, token_ids: IntArray) -> "TreeKey":
        return cls((Segment(namespace, _viewed(token_ids)),))

    @classmethod
    def layered(cls, parts: Iterable[tuple[Namespace, IntArray]]) -> "TreeKey":
        """From several runs of tokens. Neighbours in one namespace become one segment: where they meet must not matter."""
        segments: list[Segment] = []
        for namespace, token_ids in parts:
            tokens = _viewed(token_ids)
            if segments and segments[-1].namespace == namespace:
                segments[-1] = Segment(namespace, bytes(segments[-1].tokens) + tokens)
            elif tokens:
                segments.append(Segment(namespace, tokens))
        return cls(tuple(segments))

    def page_aligned(self, page_bytes: int, max_len: int | None) -> list[Segment]:
        """The segments cut to whole pages and to max_len tokens; the first one that is cut is the last."""
        room = None if max_len is None else max(0, max_len) * TOKEN_BYTES
        aligned = []
        for segment in self.segments:
            size = len(segment.tokens) if room is None else min(len(segment.tokens), room)
            size -= size % page_bytes
            if size:
                whole = size == len(segment.tokens)
                aligned.append(segment if whole else Segment(segment.namespace, segment.tokens[:size]))
            if size < len(segment.tokens):
                break
            if room is not None:
                room -= size
        return aligned


def _viewed(token_ids: IntArray) -> Tokens:
    return memoryview(token_ids).cast("B") if token_ids else b""  # a view of nothing cannot be cast


def unpacked(tokens: bytes) -> IntArray:
    ids = array("i")
    ids.frombytes(tokens)
    return ids


def common_length(edge: bytes, tokens: Tokens, start: int, stop: int, step: int) -> int:
    """How many leading bytes of `edge` equal tokens[start:stop], rounded down to a multiple of `step`.

    Whole-edge matches (the common case) are one memcmp; a difference is found by halving, so n bytes cost O(n) compared in C.
    """
    view = memoryview(tokens)[start : min(stop, start + len(edge))]
    if len(view) == len(edge) and edge.startswith(view):
        return len(edge)
    low, high = 0, len(view) // step  # invariant: the first `low` steps are equal
    while low < high:
        middle = (low + high + 1) // 2
        if edge.startswith(view[low * step : middle * step], low * step):
            low = middle
        else:
            high = middle - 1
    return low * step
