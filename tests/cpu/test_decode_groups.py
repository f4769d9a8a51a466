"""Groups of rows that share leading pages, against every pair of rows compared page by page."""

import random

import numpy as np
import pytest

from radixserve.attention.decode_groups import GroupFinder, RowGroup, SharingCost, find_groups


def csr(tables: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.cumsum([0, *map(len, tables)]).astype(np.int32), np.array([page for table in tables for page in table], dtype=np.int32)


def groups(tables: list[list[int]], min_saved_pages: int = 1) -> list[RowGroup]:
    return find_groups(*csr(tables), len(tables), min_saved_pages)


def test_the_picture() -> None:
    """a-b share 4 pages, a-b-c share 2: both save 4, and the first found is taken whole."""
    tables = [[7, 3, 9, 4, 1], [7, 3, 9, 4, 8], [7, 3, 5, 2], [6, 1, 4]]
    (group,) = groups(tables)
    assert group in (RowGroup((0, 1), 4), RowGroup((0, 1, 2), 2))
    tables.append([7, 3, 5, 1])  # now c and d share 3, too
    assert groups(tables) == [RowGroup((0, 1, 2, 4), 2)]


def test_a_rows_last_page_is_its_own() -> None:
    assert groups([[5, 6], [5, 6], [5, 6, 7]]) == [RowGroup((0, 1, 2), 1)]
    assert groups([[5], [5]]) == []
    assert groups([]) == []


def test_far_apart_rows_and_several_groups() -> None:
    tables = [[1, 2, 3, 90], [8, 91], [1, 2, 3, 92], [4, 5, 93], [1, 2, 3, 94], [4, 5, 95]]
    assert groups(tables) == [RowGroup((0, 2, 4), 3), RowGroup((3, 5), 2)]
    assert groups(tables, min_saved_pages=3) == [RowGroup((0, 2, 4), 3)]


@pytest.mark.parametrize("seed", range(40))
def test_random_tables(seed: int) -> None:
    """Groups are disjoint, true, and the best of them saves as much as the best that there is."""
    rng = random.Random(seed)
    tables = []
    for row in range(rng.randint(2, 12)):
        if tables and rng.random() < 0.7:
            other = rng.choice(tables)
            beginning = other[: rng.randint(0, len(other))]
        else:
            beginning = []
        own = [1000 * (row + 1) + i for i in range(rng.randint(0 if beginning else 1, 6))]
        tables.append(beginning + own)
    found = groups(tables)
    rows = [row for group in found for row in group.rows]
    assert len(rows) == len(set(rows))
    for group in found:
        beginnings = {tuple(tables[row][: group.num_pages]) for row in group.rows}
        assert len(beginnings) == 1
        assert all(len(tables[row]) > group.num_pages >= 1 for row in group.rows)
    best = 0
    for table in tables:
        for depth in range(1, len(table)):
            num_rows = sum(len(other) > depth and other[:depth] == table[:depth] for other in tables)
            best = max(best, (num_rows - 1) * depth)
    assert max((group.num_saved_pages for group in found), default=0) == best


def test_the_crossover_is_bytes_against_launches() -> None:
    """Llama-3.1-8B's layer on an H200: 12,000 shared tokens too many pay for the launches, beside a graph five times as many."""
    token_bytes = 8 * 128 * 2 * 2
    assert SharingCost().min_saved_bytes(has_graph=False) // token_bytes == 11718
    assert SharingCost().min_saved_bytes(has_graph=True) // token_bytes == 60546


def test_step_after_step() -> None:
    """Rows grow, leave, come, and have a page replaced: what is kept is true, what is new is seen within max_age steps."""
    rng, finder = random.Random(2), GroupFinder(max_age=8)
    tables = [[1, 2, 3, 4, 10 * row] for row in range(1, 5)]
    new_page, num_kept = 1000, 0
    for step in range(300):
        change = rng.random()
        if change < 0.03:
            tables[rng.randrange(len(tables))] = [7, 8, 9, new_page] if step % 2 else [1, 2, 3, 4, 5, new_page]
        elif change < 0.06 and len(tables) > 2:
            tables.pop(rng.randrange(len(tables)))
        elif change < 0.09 and len(tables) < 8:
            tables.append([1, 2, 3, 4, new_page])
        for row, table in enumerate(tables):
            table.append(new_page + 1 + row)
        new_page += 100
        found = finder.find(*csr(tables), len(tables), 1)
        for group in found:
            assert len({tuple(tables[row][: group.num_pages]) for row in group.rows}) == 1
            assert all(len(tables[row]) > group.num_pages for row in group.rows)
        num_kept += found == groups(tables)
    assert num_kept > 250
    finder = GroupFinder(max_age=3)
    tables = [[1, 2, 3], [1, 5, 6]]
    assert finder.find(*csr(tables), 2, 1) == [RowGroup((0, 1), 1)]
    tables = [[1, 2, 3, 4], [1, 2, 3, 5]]
    seen = [finder.find(*csr(tables), 2, 1)[0].num_pages for _ in range(4)]
    assert seen == [1, 1, 3, 3]
