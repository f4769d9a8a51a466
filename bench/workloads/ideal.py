"""What can be re-used at best, token by token, without a tree: the twin against which the real one is held."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def ideal_cached_lens(prompts: Sequence[Sequence[int]], num_computed_after: Sequence[int]) -> list[int]:
    """For each prompt, in order, how many leading tokens it shares with anything computed before; at most all but one.

    After prompt i come num_computed_after[i] tokens that are computed too and are like no other, written as -1 - i in later prompts.
    """
    # The sequence with the longest common beginning is a neighbour in the sorted order; big-endian bytes sort as their numbers do.
    known: list[bytes] = []
    lens = []
    for index, prompt in enumerate(prompts):
        key = _bytes(prompt)
        at = bisect_left(known, key)
        common = max((_common_len(key, other) for other in known[max(0, at - 1) : at + 1]), default=0)
        lens.append(min(common, len(prompt) - 1))
        insort(known, key + _bytes([-1 - index] * num_computed_after[index]))
    return lens


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=">i4").tobytes()


def _common_len(one: bytes, two: bytes) -> int:
    """Equal leading tokens, of 4 bytes each."""
    num_bytes = min(len(one), len(two))
    a, b = np.frombuffer(one[:num_bytes], dtype=">i4"), np.frombuffer(two[:num_bytes], dtype=">i4")
    differs = a != b
    return int(differs.argmax()) if differs.any() else len(a)
