"""Tables of one part of a step, as planners take them: offsets and lengths on the host, page ids on the device.

batch       | decode rows | prompt chunks |          offsets of a part begin at 0 again
decode      | kv_indptr[: n + 1]          |          its rows are the batch's first, so its tables are the batch's own
extend                    | kv_indptr[n:] - kv_indptr[n] |
shared      one row per group: its rows' queries, side by side, against the pages that they share
own         the decode rows, those of groups first, without their shared pages: never empty (decode_groups.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixserve.attention.batch import ForwardBatch, indptr_of
from radixserve.attention.decode_groups import RowGroup
from radixserve.kv import pinned


@dataclass(frozen=True, slots=True)
class RowTables:
    """All int32; num_rows rows. kv_indices on the device, the others on the host, pinned: planners send them on (kv/pinned.py)."""

    qo_indptr: torch.Tensor  # [num_rows + 1]
    kv_indptr: torch.Tensor  # [num_rows + 1], counts pages
    kv_indices: torch.Tensor  # [num_pages_of_all_rows]
    last_page_len: torch.Tensor  # [num_rows], 1 .. page_size
    seq_lens: torch.Tensor  # [num_rows]

    def padded(self, num_rows: int, page_ids: torch.Tensor) -> "RowTables":
        """With rows of one page, taken from page_ids on the device, and one key up to num_rows of them."""
        num_padding = num_rows - self.last_page_len.shape[0]
        if not num_padding:
            return self
        ones = torch.ones(num_padding, dtype=torch.int32)
        further = torch.arange(1, num_padding + 1, dtype=torch.int32)
        return _row_tables(
            torch.cat([self.qo_indptr, self.qo_indptr[-1] + further]),
            torch.cat([self.kv_indptr, self.kv_indptr[-1] + further]),
            torch.cat([self.kv_indices, page_ids[:num_padding]]),
            torch.cat([self.last_page_len, ones]),
            torch.cat([self.seq_lens, ones]),
        )


def _row_tables(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, last_page_len: torch.Tensor, seq_lens: torch.Tensor
) -> RowTables:
    """Of host tables just made, which are not pinned yet; those of a batch are."""
    device = kv_indices.device
    on_host = (pinned.pin(table, device) for table in (qo_indptr, kv_indptr, last_page_len, seq_lens))
    qo_indptr, kv_indptr, last_page_len, seq_lens = on_host
    return RowTables(qo_indptr, kv_indptr, kv_indices, last_page_len, seq_lens)


@dataclass(frozen=True, slots=True)
class SharedTables:
    groups: RowTables  # a row per group
    own: RowTables  # a row per decode row, in `order`
    order: torch.Tensor | None  # [num_decode_rows] int64, device: which row of the batch comes at each place; None: as they are
    num_rows: int  # in groups


def decode_tables(batch: ForwardBatch) -> RowTables:
    n = batch.num_decode_rows
    num_pages = int(batch.kv_indptr_host[n])
    return RowTables(
        batch.qo_indptr_host[: n + 1],
        batch.kv_indptr_host[: n + 1],
        batch.kv_indices[:num_pages],
        batch.kv_last_page_len_host[:n],
        batch.seq_lens_host[:n],
    )


def extend_tables(batch: ForwardBatch) -> RowTables:
    n, device = batch.num_decode_rows, batch.kv_indices.device
    first_page = int(batch.kv_indptr_host[n])
    return RowTables(
        pinned.pin(batch.qo_indptr_host[n:] - batch.qo_indptr_host[n], device),
        pinned.pin(batch.kv_indptr_host[n:] - batch.kv_indptr_host[n], device),
        batch.kv_indices[first_page:],
        batch.kv_last_page_len_host[n:],
        batch.seq_lens_host[n:],
    )


def shared_tables(batch: ForwardBatch, groups: Sequence[RowGroup]) -> SharedTables:
    """groups: of decode rows, disjoint, each leaving every row at least its last page."""
    n, page_size = batch.num_decode_rows, batch.page_size
    starts: list[int] = batch.kv_indptr_host[: n + 1].tolist()
    num_shared = {row: group.num_pages for group in groups for row in group.rows}
    order = list(num_shared) + [row for row in range(n) if row not in num_shared]
    own_pages = [(starts[row] + num_shared.get(row, 0), starts[row + 1]) for row in order]
    assert all(first < end for first, end in own_pages), "shared_tables: expected a page of its own in every row"
    rows = torch.tensor(order)
    num_skipped = torch.tensor([num_shared.get(row, 0) for row in order], dtype=torch.int32) * page_size
    own = _row_tables(
        torch.arange(n + 1, dtype=torch.int32),
        indptr_of([end - first for first, end in own_pages]),
        torch.cat([batch.kv_indices[first:end] for first, end in own_pages]),
        batch.kv_last_page_len_host[rows],
        batch.seq_lens_host[rows] - num_skipped,
    )
    beginnings = [starts[group.rows[0]] for group in groups]
    shared = _row_tables(
        indptr_of([len(group.rows) for group in groups]),
        indptr_of([group.num_pages for group in groups]),
        torch.cat([batch.kv_indices[first : first + group.num_pages] for first, group in zip(beginnings, groups)]),
        torch.full((len(groups),), page_size, dtype=torch.int32),
        torch.tensor([group.num_pages * page_size for group in groups], dtype=torch.int32),
    )
    is_in_order = order == list(range(n))
    return SharedTables(shared, own, None if is_in_order else pinned.send(rows, batch.kv_indices.device), len(num_shared))
