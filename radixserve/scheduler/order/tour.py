"""Tour: the smallest key of any subtree, without a walk through it. A row with a mark where a walk round the tree enters and leaves a node:

    a (b () c (d ()))      row:  (a  (b  b)  (c  (d  d)  c)  a)        what is below c lies between its two marks, however deep

The row is kept in blocks of about fifty marks, each with its own smallest key: a change touches one block, a question the ends of two
blocks and the smallest keys of those between. So the tree's depth does not count, and its size only as the number of blocks.
"""

from math import inf

Key = tuple[float, ...]  # the smallest goes first; no two requests have equal ones
NO_KEY: Key = (inf,)
MAX_MARKS = 64  # in a block; fewer than a quarter are joined with a neighbour's


class Mark:
    __slots__ = ("block",)

    block: "_Block"


class _Block:
    __slots__ = ("index", "keys", "marks")

    def __init__(self, index: int, marks: list[Mark], keys: list[list[Key]]) -> None:
        self.index = index
        self.marks = marks
        self.keys = keys  # by ranking, then as `marks`
        for mark in marks:
            mark.block = self


class Tour:
    """Keys of several rankings at each mark; NO_KEY until put() says otherwise."""

    def __init__(self, num_rankings: int, first: Mark, last: Mark) -> None:
        self._blocks = [_Block(0, [first, last], [[NO_KEY, NO_KEY] for _ in range(num_rankings)])]
        self._smallest = [[NO_KEY] for _ in range(num_rankings)]  # by ranking, then of each block

    def insert(self, mark: Mark, beside: Mark, is_after: bool) -> None:
        block = mark.block = beside.block
        at = block.marks.index(beside) + is_after
        block.marks.insert(at, mark)
        for keys in block.keys:
            keys.insert(at, NO_KEY)
        if len(block.marks) > MAX_MARKS:
            middle = len(block.marks) // 2
            self._replace(
                block.index, 1, [(block.marks[part], [keys[part] for keys in block.keys]) for part in (slice(middle), slice(middle, None))]
            )

    def remove(self, mark: Mark) -> None:
        block = mark.block
        at = block.marks.index(mark)
        del block.marks[at]
        for ranking, keys in enumerate(block.keys):
            if keys.pop(at) == self._smallest[ranking][block.index]:
                self._smallest[ranking][block.index] = min(keys, default=NO_KEY)
        if len(block.marks) < MAX_MARKS // 4 and len(self._blocks) > 1:
            left = max(0, block.index - 1)
            one, other = self._blocks[left : left + 2]
            if len(one.marks) + len(other.marks) <= MAX_MARKS:
                self._replace(left, 2, [(one.marks + other.marks, [a + b for a, b in zip(one.keys, other.keys, strict=True)])])

    def _replace(self, index: int, count: int, parts: list[tuple[list[Mark], list[list[Key]]]]) -> None:
        self._blocks[index : index + count] = [_Block(index, marks, keys) for marks, keys in parts]
        for ranking, smallest in enumerate(self._smallest):
            smallest[index : index + count] = [min(keys[ranking]) for _, keys in parts]
        for later in range(index, len(self._blocks)):
            self._blocks[later].index = later

    def put(self, mark: Mark, ranking: int, key: Key) -> None:
        block = mark.block
        keys, smallest = block.keys[ranking], self._smallest[ranking]
        at = block.marks.index(mark)
        before, keys[at] = keys[at], key
        if key <= smallest[block.index]:
            smallest[block.index] = key
        elif before == smallest[block.index]:
            smallest[block.index] = min(keys)

    def first(self, opens: Mark, closes: Mark, ranking: int) -> Key:
        """The smallest key from one mark up to a later one."""
        one, other = opens.block, closes.block
        start, stop = one.marks.index(opens), other.marks.index(closes)
        if one is other:
            return min(one.keys[ranking][start:stop])
        between = self._smallest[ranking][one.index + 1 : other.index]
        return min(min(one.keys[ranking][start:]), min(between, default=NO_KEY), min(other.keys[ranking][:stop], default=NO_KEY))
