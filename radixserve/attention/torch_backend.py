"""TorchBackend: attention in plain torch on any device, and the oracle of the other backends.

It gathers each row's K and V through the page table, token by token, so that a place behind seq_len is never read.
Decode rows run in a few padded batches; a padded place repeats a token of its own row and is masked. Every other row is one call.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixserve.attention.batch import ForwardBatch
from radixserve.kv import KVPool

# rows of one padded batch are no more than this factor apart in length, which bounds the work on padding
_MAX_LENGTH_RATIO = 2
# padded tokens gathered at once: bounds the scratch memory of a batch of long rows
_MAX_PADDED_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    rows: torch.Tensor  # [n] int64, rows (and tokens: a decode row is one token)
    places: torch.Tensor  # [n * longest] int64, places in the flattened pool
    mask: torch.Tensor | None  # [n, 1, 1, longest] bool, True where there is a token; None: all rows are equally long


@dataclass(frozen=True, slots=True)
class _ExtendRow:
    start: int  # its tokens are start .. end of the step's
    end: int
    places: torch.Tensor  # [seq_len] int64
    mask: torch.Tensor | None  # [q_len, seq_len] bool; None: the row begins at position 0, where is_causal says the same


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where the tokens of a step are cut."""

    tokens: list[int]  # rising
    is_last: list[bool]  # of its row

    def inside(self, start: int, end: int) -> Iterator[int]:
        for index in range(bisect_left(self.tokens, start), bisect_left(self.tokens, end)):
            if self.tokens[index] > start:
                yield self.tokens[index]
            if self.is_last[index]:
                return


class _Scratch:
    """Memory for gathered K or V, kept: fresh pages from the operating system cost a CPU several times what the copy does."""

    def __init__(self, pool: KVPool) -> None:
        self._buffer = torch.empty(0, pool.num_kv_heads, pool.head_dim, dtype=pool.dtype, device=pool.device)

    def select(self, source: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """source[places], valid until the next call."""
        n = places.shape[0]
        if self._buffer.shape[0] < n:
            with torch.inference_mode(False):  # else a later call outside of inference mode could not write to it
                self._buffer = self._buffer.new_empty(n, *self._buffer.shape[1:])
        return torch.index_select(source, 0, places, out=self._buffer[:n])


class TorchBackend:
    """AttentionBackend over any KVPool. Grouped-query: num_heads is a multiple of the pool's num_kv_heads."""

    name = "torch"
    waited_s = 0.0

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        assert num_heads in range(pool.num_kv_heads, num_heads + 1, pool.num_kv_heads), (
            f"TorchBackend: expected num_heads to be a multiple of num_kv_heads = {pool.num_kv_heads}, got {num_heads}"
        )
        self._pool = pool
        self._num_heads = num_heads
        self._gathered_k = _Scratch(pool)
        self._gathered_v = _Scratch(pool)
        self._batch: ForwardBatch | None = None
        self._decode_groups: list[_DecodeGroup] = []
        self._extend_rows: list[_ExtendRow] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Turn the page tables into places in the flattened pool, and build the masks, once for all layers."""
        assert batch.page_size == self._pool.page_size, f"TorchBackend: expected page size {self._pool.page_size}, got {batch.page_size}"
        self._batch = batch
        lens: list[int] = batch.seq_lens_host.tolist()
        order = sorted(range(batch.num_decode_rows), key=lambda row: -lens[row])
        self._decode_groups = [_plan_decode_group(batch, rows, lens) for rows in _group_by_length(order, lens)]
        self._extend_rows = [_plan_extend_row(batch, row, lens[row]) for row in range(batch.num_decode_rows, batch.num_rows)]

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend.run."""
        batch, pool = self._batch, self._pool
        assert batch is not None, "TorchBackend: run() before plan()"
        shape = (batch.num_tokens, self._num_heads, pool.head_dim)
        assert q.shape == shape, f"TorchBackend: expected q of shape {shape}, got {tuple(q.shape)}"
        pool.write(layer, batch.out_slots, k, v)
        all_k, all_v = pool.k(layer).flatten(0, 1), pool.v(layer).flatten(0, 1)
        out = torch.empty_like(q)
        for group in self._decode_groups:
            out.index_copy_(0, group.rows, self._decode(group, q, all_k, all_v))
        for row in self._cut_where_not_finite(k, v):
            out[row.start : row.end] = self._extend(row, q, all_k, all_v)
        return out

    def _cut_where_not_finite(self, k: torch.Tensor, v: torch.Tensor) -> list[_ExtendRow]:
        """On a CPU, the extend rows cut before each token with a number that is none, so that no query is computed beside keys that it may
        not see and that a mask does not take away: 0 times infinity is NaN. Elsewhere a look at the numbers would wait for the device.

        Behind a token whose keys are NaN in all heads nothing is cut: whoever sees it is NaN whatever follows.
        """
        if k.device.type != "cpu" or not self._extend_rows:
            return self._extend_rows
        is_finite = k.isfinite().flatten(1).all(1) & v.isfinite().flatten(1).all(1)
        if is_finite.all():
            return self._extend_rows
        bad = is_finite.logical_not().nonzero()[:, 0]
        is_nan = k[bad].isnan().any(2).all(1)
        cuts = _Cuts(bad.tolist(), is_nan.tolist())
        parts = []
        for row in self._extend_rows:
            for start, end in itertools.pairwise([row.start, *cuts.inside(row.start, row.end), row.end]):
                parts.append(_make_extend_row(start, end, row.places[: len(row.places) - (row.end - end)]))
        return parts

    def _decode(self, group: _DecodeGroup, q: torch.Tensor, all_k: torch.Tensor, all_v: torch.Tensor) -> torch.Tensor:
        """[n, num_heads, head_dim]. Heads that share a KV head are handed over as queries of one head: K and V are not repeated."""
        n, num_kv_heads, head_dim = group.rows.shape[0], self._pool.num_kv_heads, self._pool.head_dim
        keys = self._gathered_k.select(all_k, group.places).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
        values = self._gathered_v.select(all_v, group.places).view(n, -1, num_kv_heads, head_dim).transpose(1, 2)
        queries = q.index_select(0, group.rows).view(n, num_kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask).reshape(n, self._num_heads, head_dim)

    def _extend(self, row: _ExtendRow, q: torch.Tensor, all_k: torch.Tensor, all_v: torch.Tensor) -> torch.Tensor:
        """[q_len, num_heads, head_dim]"""
        keys = self._gathered_k.select(all_k, row.places).transpose(0, 1)[None]
        values = self._gathered_v.select(all_v, row.places).transpose(0, 1)[None]
        queries = q[row.start : row.end].transpose(0, 1)[None]
        is_causal = row.mask is None
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=row.mask, is_causal=is_causal, enable_gqa=True)
        return out[0].transpose(0, 1)


def _group_by_length(order: list[int], lens: list[int]) -> list[list[int]]:
    """Cut rows, longest first, into batches that waste little on padding."""
    groups: list[list[int]] = []
    for row in order:
        if groups:
            longest = lens[groups[-1][0]]
            if lens[row] * _MAX_LENGTH_RATIO >= longest and (len(groups[-1]) + 1) * longest <= _MAX_PADDED_TOKENS:
                groups[-1].append(row)
                continue
        groups.append([row])
    return groups


def _row_places(batch: ForwardBatch, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Places in the flattened pool of `tokens` [..., n] of `rows` [..., 1] or [1], both int64 on the device."""
    pages = batch.kv_indices[batch.kv_indptr[rows] + tokens // batch.page_size]
    return pages.long() * batch.page_size + tokens % batch.page_size


def _plan_decode_group(batch: ForwardBatch, rows: list[int], lens: list[int]) -> _DecodeGroup:
    device = batch.kv_indices.device
    row_ids = torch.tensor(rows, device=device)
    row_lens = batch.seq_lens[row_ids].long()[:, None]
    longest = lens[rows[0]]
    tokens = torch.arange(longest, device=device)[None]
    # padding repeats the row's own last token: finite wherever the row is, and its weight is exactly 0
    places = _row_places(batch, row_ids[:, None], torch.minimum(tokens, row_lens - 1)).flatten()
    mask = None if lens[rows[-1]] == longest else (tokens < row_lens)[:, None, None]
    return _DecodeGroup(row_ids, places, mask)


def _plan_extend_row(batch: ForwardBatch, row: int, seq_len: int) -> _ExtendRow:
    device = batch.kv_indices.device
    start, end = batch.qo_indptr_host[row : row + 2].tolist()
    tokens = torch.arange(seq_len, device=device)
    return _make_extend_row(start, end, _row_places(batch, torch.tensor([row], device=device), tokens))


def _make_extend_row(start: int, end: int, places: torch.Tensor) -> _ExtendRow:
    seq_len, mask = len(places), None
    if end - start < seq_len:
        # is_causal aligns the first query with the first key, which is wrong for a suffix
        tokens = torch.arange(seq_len, device=places.device)
        mask = tokens[None] <= tokens[seq_len - (end - start) :, None]
    return _ExtendRow(start, end, places, mask)
