"""PageTable: writes, CSR views against a loop over tokens, and what it refuses."""

import random
from array import array

import numpy as np
import pytest
import torch

from radixserve.core import PageWrite
from radixserve.kv import PageTable
from radixserve.kv.page_table import ragged_arange


def filled_table(page_size: int, num_slots: int, max_pages: int, seed: int) -> PageTable:
    table = PageTable(num_slots, max_pages, page_size)
    page_ids = list(range(1, num_slots * max_pages + 1))
    random.Random(seed).shuffle(page_ids)
    for slot in range(num_slots):
        table.write(slot, PageWrite(0, array("i", page_ids[slot * max_pages : (slot + 1) * max_pages])))
    return table


def test_ragged_arange() -> None:
    assert ragged_arange(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ragged_arange(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_csr_equals_a_loop_over_tokens(page_size: int, seed: int, is_decode: bool) -> None:
    rng = random.Random(seed)
    num_slots, max_pages = 9, 12
    table = filled_table(page_size, num_slots, max_pages, seed)
    slots = rng.sample(range(num_slots), rng.randint(1, num_slots))
    starts, counts = [], []
    for _ in slots:
        seq_len = rng.choice([1, page_size, max_pages * page_size, rng.randint(1, max_pages * page_size)])
        counts.append(1 if is_decode else rng.randint(1, seq_len))
        starts.append(seq_len - counts[-1])
    csr = table.build_csr(slots, starts, counts)

    pages: list[int] = []
    out_slots: list[int] = []
    positions: list[int] = []
    for row, (slot, start, count) in enumerate(zip(slots, starts, counts)):
        assert csr.qo_indptr[row] == len(out_slots)
        assert csr.kv_indptr[row] == len(pages)
        for position in range(start + count):
            page = int(table.host[slot, position // page_size])
            if position % page_size == 0:
                pages.append(page)
            if position >= start:
                out_slots.append(page * page_size + position % page_size)
                positions.append(position)
        assert csr.kv_last_page_len[row] == (start + count - 1) % page_size + 1
        assert csr.seq_lens[row] == start + count
    assert csr.kv_indices.tolist() == pages
    assert csr.out_slots.tolist() == out_slots
    assert csr.positions.tolist() == positions
    assert csr.qo_indptr[-1] == len(out_slots)
    assert csr.kv_indptr[-1] == len(pages)
    for indices in (csr.qo_indptr, csr.kv_indptr, csr.kv_indices, csr.kv_last_page_len, csr.seq_lens):
        assert indices.dtype == np.int32
    assert csr.out_slots.dtype == csr.positions.dtype == np.int64


def test_write_overwrites_in_place_and_clear_forgets() -> None:
    table = PageTable(2, 4, page_size=2)
    table.write(1, PageWrite(0, array("i", [7, 3, 9])))
    table.write(1, PageWrite(1, array("i", [5])))
    assert table.host.tolist() == [[0, 0, 0, 0], [7, 5, 9, 0]]
    assert table.device_table().tolist() == table.host.tolist()
    assert table.device_table().dtype == torch.int32
    table.clear(1)
    assert table.device_table().tolist() == [[0] * 4] * 2


def test_a_mirror_on_another_device_follows_the_host() -> None:
    # "meta" holds no values, so this says only that the mirror is other memory, of the same shape, kept on that device
    table = PageTable(2, 4, page_size=2, device="meta")
    table.write(0, PageWrite(0, array("i", [7])))
    mirror = table.device_table()
    assert mirror.device.type == "meta"
    assert mirror.shape == (2, 4)
    assert table.host[0, 0] == 7


def test_no_rows_make_an_empty_csr() -> None:
    csr = PageTable(1, 1, 1).build_csr([], [], [])
    assert csr.qo_indptr.tolist() == csr.kv_indptr.tolist() == [0]
    assert csr.kv_indices.tolist() == csr.out_slots.tolist() == []


@pytest.mark.parametrize(
    ("first_page", "page_ids", "slot", "message"),
    [
        (3, [1, 2], 0, r"within 0\.\.4 of slot 0, got 3\.\.5"),
        (-1, [1], 0, r"got -1\.\.0"),
        (0, [1, 0], 0, "page ids >= 1 for slot 0, got 0"),
        (0, [1], 2, r"slot in 0\.\.1, got 2"),
        (0, [1], -1, r"slot in 0\.\.1, got -1"),
    ],
)
def test_writes_out_of_bounds_are_refused(first_page: int, page_ids: list[int], slot: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        PageTable(2, 4, 2).write(slot, PageWrite(first_page, array("i", page_ids)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 0, 9), "at most 8 tokens in a slot, got 9"),
        ((0, -1, 2), "starts >= 0"),
        ((0, 3, 0), "counts >= 1"),
        ((2, 0, 1), r"slots in 0\.\.1"),
        ((-1, 0, 1), r"slots in 0\.\.1"),
        ((1, 4, 1), r"row 0 reads tokens 0\.\.5 of slot 1, but its page 2 was never written"),
    ],
)
def test_rows_out_of_bounds_are_refused(row: tuple[int, int, int], message: str) -> None:
    table = PageTable(2, 4, 2)
    table.write(1, PageWrite(0, array("i", [3, 4])))
    slot, start, count = row
    with pytest.raises(AssertionError, match=message):
        table.build_csr([slot], [start], [count])


def test_the_row_with_the_unwritten_page_is_named() -> None:
    table = PageTable(2, 4, 2)
    table.write(0, PageWrite(0, array("i", [1, 2])))
    table.write(1, PageWrite(0, array("i", [3])))
    with pytest.raises(AssertionError, match=r"row 1 reads .* of slot 1, but its page 1 was never written"):
        table.build_csr([0, 1], [0, 0], [4, 3])
