"""Random prompts from the whole words of a vocabulary."""

import random
from typing import Protocol

from bench.words import Vocabulary
from bench.workloads.workload import Ids, WorkloadRequest


class Draw:
    """Seeded draws. Sequences that ought to be strangers begin with different tokens, so that none is re-used by chance."""

    def __init__(self, words: Vocabulary, key: str) -> None:
        self.words = words
        self.key = key
        self.rng = random.Random(key)

    def ids(self, length: int, taken: set[int] | None = None) -> Ids:
        """`length` random ids; the first is not in `taken` and is added to it. Raises ValueError if there are too few words for that."""
        words = self.words.ids
        ids = self.rng.choices(words, k=length)
        if taken is not None and ids:
            if len(taken) >= len(words):
                raise ValueError(f"expected more distinct words than sequences that must differ, got {len(words)} words")
            while ids[0] in taken:
                # the next word, not another draw: all other ids stay as they would have been
                ids[0] = words[(words.index(ids[0]) + 1) % len(words)]
            taken.add(ids[0])
        return ids

    def strangers(self, count: int, length: int) -> list[Ids]:
        """`count` sequences of which no two begin with the same token."""
        taken: set[int] = set()
        return [self.ids(length, taken) for _ in range(count)]

    def length(self, length: int, range_ratio: float) -> int:
        """Uniform in [length * range_ratio, length], at least 1; without a draw where there is one value."""
        low = max(1, int(length * range_ratio))
        return length if low >= length else self.rng.randint(low, length)

    def between(self, low: int, high: int) -> int:
        return low if low >= high else self.rng.randint(low, high)


class Kind(Protocol):
    """A kind of workload: a frozen dataclass whose fields are its options (options.py)."""

    @property
    def about(self) -> str:
        """One sentence: what this load, with these options, is."""
        ...

    @property
    def concurrency(self) -> int: ...

    def requests(self, draw: Draw) -> list[WorkloadRequest]: ...
