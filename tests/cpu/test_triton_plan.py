"""plan_step: every key that a query sees is read by exactly one item, every partial result has one place, and the merges read those."""

import itertools
import random

import numpy as np
import pytest

from radixserve.attention.triton_plan import MAX_ITEMS_PER_ROW, TritonPlan, plan_step

NARROW, WIDE = 16, 64
SHAPES = [(1, 100), (1, 5000), (1, 64), (7, 700), (300, 300), (40, 3000), (1000, 9000), (3, 3), (1, 1), (64, 64), (65, 640)]


def plan(rows: list[tuple[int, int]], group_size: int, max_partials: int = 10**6, min_split_len: int = 64) -> TritonPlan:
    """rows are (q_len, seq_len); pages of one token, so that a row's first page is where its keys begin."""
    qo = np.cumsum([0, *(q for q, _ in rows)], dtype=np.int32)
    kv = np.cumsum([0, *(n for _, n in rows)], dtype=np.int32)
    lens = np.array([n for _, n in rows], dtype=np.int32)
    sizes = {"group_size": group_size, "narrow_block_m": NARROW, "wide_block_m": WIDE, "max_partials": max_partials}
    return plan_step(qo, kv, lens, min_split_len=min_split_len, **sizes)


def check(rows: list[tuple[int, int]], made: TritonPlan, group_size: int) -> None:
    first_page = np.cumsum([0, *(n for _, n in rows)])
    position, row_of = np.array([n - q + j for q, n in rows for j in range(q)]), np.repeat(np.arange(len(rows)), [q for q, _ in rows])
    read: dict[int, list[tuple[int, int, int]]] = {}  # token -> (first_key, end_key, partial)
    for items, block_m in ((made.narrow_items, NARROW), (made.wide_items, WIDE)):
        assert items.dtype == np.int32 and items.flags.c_contiguous
        lengths = items[:, 5] - items[:, 4]
        assert (lengths > 0).all() and (np.diff(lengths) <= 0).all()
        for first, num_tokens, first_position, page, first_key, end_key, partial, _ in items.tolist():
            assert 0 < num_tokens * group_size <= block_m
            assert (position[first : first + num_tokens] == np.arange(first_position, first_position + num_tokens)).all()
            assert len(set(row_of[first : first + num_tokens])) == 1 and page == first_page[row_of[first]]
            assert end_key <= first_position + num_tokens
            for j in range(num_tokens):
                read.setdefault(first + j, []).append((first_key, end_key, partial if partial < 0 else partial + j * group_size))
    merges = {token: (first, stride, n) for token, first, stride, n in made.merges.tolist()}
    assert len(merges) == len(made.merges)
    used: set[int] = set()
    for token, parts in read.items():
        parts.sort()
        assert parts[0][0] == 0 and parts[-1][1] > position[token]
        assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
        partials = [part for _, _, part in parts]
        if token not in merges:
            assert partials == [-1]
            continue
        first, stride, n = merges[token]
        assert partials[:n] == [first + s * stride for s in range(n)]
        assert all(first_key > position[token] for first_key, _, _ in parts[n:])  # left alone: it sees none of them
        places = {part + g for part in partials for g in range(group_size)}
        assert len(places) == len(partials) * group_size and not places & used and max(places) < made.num_partials
        used |= places
    assert set(read) == set(range(len(position)))


@pytest.mark.parametrize("group_size", [1, 3, 4, 16])
def test_every_visible_key_is_read_once(group_size: int) -> None:
    made = plan(SHAPES, group_size)
    assert made.merges.size and made.num_partials
    check(SHAPES, made, group_size)


def test_random_steps() -> None:
    rng = random.Random(1)
    for _ in range(60):
        rows = [
            (q := rng.choice((1, 1, 1, rng.randint(1, 90))), q + rng.choice((0, rng.randint(0, 900)))) for _ in range(rng.randint(1, 9))
        ]
        group_size = rng.choice((1, 2, 3, 5, 8))
        check(rows, plan(rows, group_size, max_partials=rng.choice((0, 100, 3000, 10**6))), group_size)


def test_a_row_is_cut_the_same_whoever_is_beside_it() -> None:
    def cuts(rows: list[tuple[int, int]], index: int) -> list[list[int]]:
        made, first = plan(rows, 4), sum(q for q, _ in rows[:index])
        items = np.concatenate([made.narrow_items, made.wide_items]).tolist()
        return sorted([item[0] - first, *item[1:3], *item[4:6]] for item in items if first <= item[0] < first + rows[index][0])

    for row in ((1, 5000), (40, 3000), (7, 700)):
        assert cuts([row], 0) == cuts([(1, 9), (30, 4000), row, (1, 100)], 2)


def test_long_rows_get_longer_splits_and_never_too_many() -> None:
    for q_len, seq_len in ((1, 10**6), (1, 64 * MAX_ITEMS_PER_ROW + 1), (40, 10**6), (64, 10**5)):
        made = plan([(q_len, seq_len)], 4)
        assert 1 < len(made.narrow_items) + len(made.wide_items) <= MAX_ITEMS_PER_ROW
    assert len(plan([(600, 10**5)], 4).merges) == 0  # tiles enough


def test_rows_without_room_in_the_scratch_are_not_split() -> None:
    rows = [(1, 640), (1, 640), (1, 64)]
    made = plan(rows, 4, max_partials=40)
    assert made.num_partials == 40 and made.merges[:, 0].tolist() == [0]
    check(rows, made, 4)
    assert plan(rows, 4, max_partials=39).num_partials == 0


def test_a_group_larger_than_a_tile_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="expected group_size <= narrow_block_m"):
        plan([(1, 1)], NARROW + 1)
