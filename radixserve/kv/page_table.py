"""PageTable: which pages hold the sequence of each slot, and the CSR description of a step that attention kernels read.

    table[slot]  | page of tokens 0 .. P-1 | page of tokens P .. 2P-1 | ...      page 0: not written
A row (slot, start, count) reads tokens 0 .. start + count and writes tokens start .. start + count of that slot.
The host copy is the truth; it does not know which page is free, only that page 0 belongs to nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

import numpy as np
import numpy.typing as npt
import torch

from radixserve.core import PageWrite

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageCsr:
    """Index tables of one step, on the host. attention/batch.py draws what they mean."""

    qo_indptr: Int32  # [num_rows + 1]
    kv_indptr: Int32  # [num_rows + 1], counts pages
    kv_indices: Int32  # [num_pages_of_all_rows]
    kv_last_page_len: Int32  # [num_rows]
    seq_lens: Int32  # [num_rows]
    positions: Int64  # [num_tokens]
    out_slots: Int64  # [num_tokens]


def ragged_arange(starts: Int64, counts: Int64) -> Int64:
    """starts[0] .. starts[0] + counts[0], starts[1] .. starts[1] + counts[1], ... in one array."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    result: Int64 = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return result


class PageTable:
    """int32 page ids [num_slots, max_pages_per_slot], on the host and, where the device is no CPU, mirrored there on demand."""

    def __init__(self, num_slots: int, max_pages_per_slot: int, page_size: int, device: torch.device | str = "cpu") -> None:
        sizes = {"num_slots": num_slots, "max_pages_per_slot": max_pages_per_slot, "page_size": page_size}
        for name, size in sizes.items():
            assert size >= 1, f"PageTable: expected {name} >= 1, got {size}"
        self.num_slots = num_slots
        self.max_pages_per_slot = max_pages_per_slot
        self.page_size = page_size
        self.device = torch.device(device)
        self.host: Int32 = np.zeros((num_slots, max_pages_per_slot), dtype=np.int32)
        self._host_view = torch.from_numpy(self.host)
        self._mirror: torch.Tensor | None = self._host_view if self.device.type == "cpu" else None  # made when asked for: it is large
        self._dirty_slots: set[int] = set()

    def write(self, slot: int, page_write: PageWrite) -> None:
        """Overwrite part of a slot's pages. Ids start at 1."""
        self._check_slot(slot)
        first, num_pages = page_write.first_page, len(page_write.page_ids)
        assert 0 <= first <= self.max_pages_per_slot - num_pages, (
            f"PageTable.write: expected pages within 0..{self.max_pages_per_slot} of slot {slot}, got {first}..{first + num_pages}"
        )
        if num_pages == 1:  # a decode row's next page: most writes by far, and numpy's reduction alone would cost more than this
            page_id = page_write.page_ids[0]
            assert page_id >= 1, f"PageTable.write: expected page ids >= 1 for slot {slot}, got {page_id}"
            self.host[slot, first] = page_id
            self._dirty_slots.add(slot)
            return
        page_ids = np.frombuffer(page_write.page_ids, dtype=np.int32)
        assert num_pages == 0 or page_ids.min() >= 1, f"PageTable.write: expected page ids >= 1 for slot {slot}, got {page_ids.min()}"
        self.host[slot, first : first + num_pages] = page_ids
        self._dirty_slots.add(slot)

    def clear(self, slot: int) -> None:
        """Forget a slot's pages, so that a read through a stale entry is caught instead of served."""
        self._check_slot(slot)
        self.host[slot] = 0
        self._dirty_slots.add(slot)

    def device_table(self) -> torch.Tensor:
        """[num_slots, max_pages_per_slot] int32 on the device, up to date with the host; on a CPU the same memory."""
        if self._mirror is None:
            self._mirror = self._host_view.to(self.device)
        elif self._mirror is not self._host_view and self._dirty_slots:
            slots = torch.tensor(sorted(self._dirty_slots))
            self._mirror.index_copy_(0, slots.to(self.device), self._host_view[slots].to(self.device))
        self._dirty_slots.clear()
        return self._mirror

    def build_csr(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> PageCsr:
        """Describe a step of rows (slot, start, count).

        AssertionError where a row leaves the table or reads a page that was not written.
        """
        self._check_rows(slots, starts, counts)
        if slots and max(counts) == 1:
            return self._build_decode_csr(slots, starts)
        first = np.asarray(starts, dtype=np.int64)
        count = np.asarray(counts, dtype=np.int64)
        seq_lens = first + count
        num_pages = -(-seq_lens // self.page_size)
        # one memcpy per row is several times faster than one fancy index over all pages
        parts = [self.host[slot, :n] for slot, n in zip(slots, num_pages.tolist(), strict=True)]
        kv_indices = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        kv_indptr = _indptr(num_pages)
        _check_written(kv_indices, kv_indptr, seq_lens, slots)
        positions = ragged_arange(first, count)
        slot_ids = np.asarray(slots, dtype=np.int64)
        pages = self.host[np.repeat(slot_ids, count), positions // self.page_size].astype(np.int64)
        return PageCsr(
            qo_indptr=_indptr(count),
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_last_page_len=(seq_lens - (num_pages - 1) * self.page_size).astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            positions=positions,
            out_slots=pages * self.page_size + positions % self.page_size,
        )

    def _build_decode_csr(self, slots: Sequence[int], starts: Sequence[int]) -> PageCsr:
        """build_csr() of rows of one token each, every row's token being in its last page.

        Between two steps the weights have passed through the caches, and each of numpy's functions begins cold: some 30 µs where a loop
        over a few rows takes 1 or 2. So the tables are counted in ints, and made at once.
        """
        n, page_size = len(slots), self.page_size
        last_pages = [start // page_size for start in starts]
        kv_indices = np.concatenate([self.host[slot, : last + 1] for slot, last in zip(slots, last_pages, strict=True)])
        kv_ends = list(accumulate(last + 1 for last in last_pages))
        offsets = [start - last * page_size for start, last in zip(starts, last_pages, strict=True)]
        lists = [*range(n + 1), 0, *kv_ends, *(offset + 1 for offset in offsets), *(start + 1 for start in starts)]
        tables = np.array(lists, dtype=np.int32)
        kv_indptr, seq_lens = tables[n + 1 : 2 * n + 2], tables[3 * n + 2 :]
        _check_written(kv_indices, kv_indptr, seq_lens, slots)
        out_slots = [kv_indices.item(end - 1) * page_size + offset for end, offset in zip(kv_ends, offsets, strict=True)]
        places = np.array([*starts, *out_slots], dtype=np.int64)
        return PageCsr(tables[: n + 1], kv_indptr, kv_indices, tables[2 * n + 2 : 3 * n + 2], seq_lens, places[:n], places[n:])

    def _check_slot(self, slot: int) -> None:
        assert 0 <= slot < self.num_slots, f"PageTable: expected a slot in 0..{self.num_slots - 1}, got {slot}"

    def _check_rows(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        assert len(slots) == len(starts) == len(counts), (
            f"PageTable: expected as many slots as starts and counts, got {len(slots)}, {len(starts)}, {len(counts)}"
        )
        if not len(slots):
            return
        # rows are few: builtins over the ints are done before numpy has begun
        assert 0 <= min(slots) <= max(slots) < self.num_slots, f"PageTable: expected slots in 0..{self.num_slots - 1}, got {list(slots)}"
        assert min(starts) >= 0, f"PageTable: expected starts >= 0, got {list(starts)}"
        assert min(counts) >= 1, f"PageTable: expected counts >= 1, got {list(counts)}"
        capacity = self.max_pages_per_slot * self.page_size
        longest = max(map(add, starts, counts))
        assert longest <= capacity, f"PageTable: expected at most {capacity} tokens in a slot, got {longest}"


def _check_written(kv_indices: Int32, kv_indptr: Int32, seq_lens: npt.NDArray[np.signedinteger], slots: Sequence[int]) -> None:
    if len(kv_indices) and not kv_indices.min():
        place = int(np.argmin(kv_indices))
        row = int(np.searchsorted(kv_indptr, place, side="right")) - 1
        raise AssertionError(
            f"PageTable: row {row} reads tokens 0..{seq_lens[row]} of slot {slots[row]}, "
            f"but its page {place - kv_indptr[row]} was never written"
        )


def _indptr(counts: Int64) -> Int32:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
