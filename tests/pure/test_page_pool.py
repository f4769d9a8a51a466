"""PagePool: who lies beside whom, and that nothing is lost or handed out twice whatever happens."""

import random
from array import array
from itertools import pairwise

import pytest

from radixserve.tree.page_pool import RUN_TOKENS, PagePool


def runs_of(pages: array) -> list[int]:  # type: ignore[type-arg]
    """Lengths of the pieces that lie side by side."""
    lengths = [1]
    for before, page in pairwise(pages):
        if page == before + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


@pytest.mark.parametrize(("page_size", "num_rows", "num_prompt"), [(1, 16, 64), (1, 8, 300), (16, 6, 5)])
def test_rows_that_grow_together_lie_each_side_by_side(page_size: int, num_rows: int, num_prompt: int) -> None:
    pool = PagePool(20_000, page_size)
    rows = [pool.allocate(num_prompt) for _ in range(num_rows)]
    for _ in range(4 * RUN_TOKENS // page_size):
        for row in rows:
            row.extend(pool.allocate(1, row[-1]))
    for row in rows:
        lengths = runs_of(row)
        assert min(lengths[:-1], default=RUN_TOKENS) >= -(-RUN_TOKENS // page_size), lengths


def test_a_prompt_in_chunks_goes_on_behind_itself() -> None:
    pool = PagePool(10_000)
    first = pool.allocate(100)
    second = pool.allocate(50)
    first.extend(pool.allocate(40, first[-1]))
    assert runs_of(first) == [140] and runs_of(second) == [50]


def test_where_pages_are_short_every_free_one_is_handed_out() -> None:
    pool = PagePool(1_000)
    pages = pool.allocate(1_000)
    holes = pages[::3]
    pool.free(holes)
    assert sorted(pool.allocate(len(holes), pages[-1])) == sorted(holes)
    assert pool.num_free == 0 and not pool.free_ids()


@pytest.mark.parametrize("seed", range(20))
def test_against_a_set(seed: int) -> None:
    """Any order of calls: ids are fresh, in range, counted; freed ones come back."""
    rng = random.Random(seed)
    num_pages = rng.choice([1, 2, 63, 128, 130, 700])
    pool = PagePool(num_pages, rng.choice([1, 4, 64]))
    free, held = set(range(1, num_pages + 1)), []
    for _ in range(400):
        if rng.random() < 0.6:
            row = rng.choice(held) if held and rng.random() < 0.7 else array("i")
            more = pool.allocate(rng.randint(0, min(len(free), rng.choice([1, 200]))), row[-1] if row else 0)
            assert len(set(more)) == len(more) and free.issuperset(more)
            free.difference_update(more)
            row.extend(more)
            if row and row not in held:
                held.append(row)
        elif held:
            row = held.pop(rng.randrange(len(held)))
            pool.free(row)
            free.update(row)
        assert pool.num_free == len(free) and list(pool.free_ids()) == sorted(free)
