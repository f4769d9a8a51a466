"""PagePool: who lies beside whom, and that nothing is lost or handed out twice whatever happens."""

import random
from array import array
from itertools import pairwise

import pytest

from radixserve.tree import page_pool
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
def test_against_a_set(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order of calls: ids are fresh, in range, counted; freed ones come back. What the pool knows of where to look is true."""
    rng = random.Random(seed)
    monkeypatch.setattr(page_pool, "_MAX_SEARCHED", rng.choice([100, 150, 1 << 16]))
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
        assert min(free, default=num_pages + 1) >= pool._lowest
        runs = bytes(pool._is_free).find(pool._two_runs)
        assert runs < 0 or runs >= pool._lowest_runs


def test_a_search_that_ends_early_goes_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "_MAX_SEARCHED", 200)
    pool = PagePool(2_000)
    pages = pool.allocate(2_000)
    pool.free(pages[::2][:100])
    pool.free(pages[300:429])  # one more than two runs, over the edge of several searches
    for _ in range(6):
        got = pool.allocate(3)
        if got[0] > 300:
            break
    assert list(got) == [301 + RUN_TOKENS, 302 + RUN_TOKENS, 303 + RUN_TOKENS]
