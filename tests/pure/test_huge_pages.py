"""HugePages: pieces are zeros, apart from each other, aligned, and live as long as what was made of them."""

import ctypes
import gc

import pytest

from radixserve.huge_pages import HUGE_BYTES, HugePages


def address_of(piece: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


def test_pieces_are_aligned_zeros_that_do_not_overlap() -> None:
    pages = HugePages()
    pieces = [pages.take(size) for size in (1, 63, 65, 1 << 20, 20 << 20, 5, 31 << 20, 64 << 20)]
    assert [len(piece) for piece in pieces] == [1, 63, 65, 1 << 20, 20 << 20, 5, 31 << 20, 64 << 20]
    assert all(address_of(piece) % 64 == 0 for piece in pieces)
    for number, piece in enumerate(pieces, start=1):
        assert piece[0] == piece[-1] == 0
        piece[0] = piece[-1] = number
    assert [(piece[0], piece[-1]) for piece in pieces] == [(number, number) for number in range(1, len(pieces) + 1)]


def test_a_large_piece_begins_at_a_huge_page_and_takes_no_memory_of_others() -> None:
    pages = HugePages()
    small, large, next_small = pages.take(100), pages.take(40 << 20), pages.take(100)
    assert address_of(large) % HUGE_BYTES == 0
    assert address_of(next_small) == address_of(small) + 128


def test_a_piece_outlives_its_owner() -> None:
    pages = HugePages()
    pieces = [pages.take(1000), pages.take(40 << 20)]
    for piece in pieces:
        piece[:] = b"\x07" * len(piece)
    del pages
    gc.collect()
    assert all(piece[0] == piece[-1] == 7 for piece in pieces)


def test_no_address_space_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="no address space for 4611686018427387904 bytes"):
        HugePages().take(1 << 62)
