"""What the Triton kernels of one step work on, as integer tables made on the host. Knows numpy alone, neither Triton nor a device.

    heads that share a KV head go together: a row of q tokens is q * group_size packed rows, token by token, head by head
    tile   | up to block_m packed rows |      one load of K and V serves them all
    split  | keys 0 .. n | n .. 2n | ...      the keys of a row of few tiles, cut at multiples of n: many programs share the reading
    item   one tile over one split: what one program does for each KV head
A row with several splits leaves, per packed row and split, a normalised output and a base-2 log-sum-exp in the scratch; the merge folds
them in the order of the splits. How a row is cut follows from its own lengths; only where the scratch is full, a row is not split.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.signedinteger]

# first_token, num_tokens, first_position, first_page (an index into kv_indices), first_key, end_key, first_partial (-1: straight to out), 0
ITEM_FIELDS = 8
# token, first_partial, partial_stride (from one split's to the next one's), num_splits
MERGE_FIELDS = 4

MIN_SPLIT_LEN = 256
# programs of one row and KV head; with 8 KV heads, a few times what a large GPU runs at once
MAX_ITEMS_PER_ROW = 64
# more tiles than this keep a GPU busy without splits
MAX_SPLIT_TILES = 8


@dataclass(frozen=True, slots=True)
class TritonPlan:
    narrow_items: Ints  # [n, ITEM_FIELDS], for tiles of narrow_block_m: decode rows and rows of a few tokens
    wide_items: Ints  # [n, ITEM_FIELDS], for tiles of wide_block_m
    merges: Ints  # [n, MERGE_FIELDS], one per token of a split row
    num_partials: int  # packed rows of scratch in use


@dataclass(frozen=True, slots=True)
class _Rows:
    """One number per row."""

    first_token: Ints
    q_len: Ints
    seq_len: Ints
    first_page: Ints
    tile_len: Ints  # tokens
    split_len: Ints  # keys; seq_len where the row is not split
    num_partials: Ints  # 0 where the row is not split
    first_partial: Ints


def plan_step(
    qo_indptr: Ints,
    kv_indptr: Ints,
    seq_lens: Ints,
    *,
    group_size: int,
    narrow_block_m: int,
    wide_block_m: int,
    max_partials: int,
    min_split_len: int = MIN_SPLIT_LEN,
) -> TritonPlan:
    """Cut a step into items. The arrays are those of ForwardBatch, on the host; group_size is num_heads / num_kv_heads."""
    assert 1 <= group_size <= narrow_block_m <= wide_block_m, (
        f"plan_step: expected group_size <= narrow_block_m <= wide_block_m, got {group_size}, {narrow_block_m}, {wide_block_m}"
    )
    q_len = np.diff(qo_indptr)
    is_wide = q_len * group_size > narrow_block_m
    tile_len = np.where(is_wide, wide_block_m, narrow_block_m) // group_size
    split_len = _split_lens(-(-q_len // tile_len), seq_lens, min_split_len)
    num_splits = -(-seq_lens // split_len)
    num_partials = np.where(num_splits > 1, num_splits * q_len * group_size, 0)
    has_room = np.cumsum(num_partials) <= max_partials
    num_partials = np.where(has_room, num_partials, 0)
    split_len = np.where(num_partials > 0, split_len, seq_lens)
    first_partial = np.cumsum(num_partials) - num_partials
    rows = _Rows(qo_indptr[:-1], q_len, seq_lens, kv_indptr[:-1], tile_len, split_len, num_partials, first_partial)
    return TritonPlan(
        _items(rows, np.flatnonzero(~is_wide), group_size),
        _items(rows, np.flatnonzero(is_wide), group_size),
        _merges(rows, np.flatnonzero(num_partials), group_size),
        int(num_partials.sum()),
    )


def _split_lens(num_tiles: Ints, seq_lens: Ints, min_split_len: int) -> Ints:
    """Keys per split, multiples of min_split_len."""
    max_splits = np.where(num_tiles <= MAX_SPLIT_TILES, MAX_ITEMS_PER_ROW // num_tiles, 1)
    num_units = -(-seq_lens // min_split_len)
    lens: Ints = -(-num_units // max_splits) * min_split_len
    return lens


def _expand(counts: Ints) -> tuple[Ints, Ints]:
    """(owner, index): 0 for each of the counts[0], and which of them; then 1 for each of the counts[1]; ..."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _items(rows: _Rows, chosen: Ints, group_size: int) -> Ints:
    """Every tile of the chosen rows over every split that holds a key which the tile sees."""
    owner, tile = _expand(-(-rows.q_len[chosen] // rows.tile_len[chosen]))
    row = chosen[owner]
    start = tile * rows.tile_len[row]
    num_tokens = np.minimum(rows.tile_len[row], rows.q_len[row] - start)
    first_position = rows.seq_len[row] - rows.q_len[row] + start
    end = first_position + num_tokens
    owner, split = _expand(-(-end // rows.split_len[row]))
    row, start, num_tokens, first_position, end = (x[owner] for x in (row, start, num_tokens, first_position, end))
    first_key = split * rows.split_len[row]
    end_key = np.minimum(first_key + rows.split_len[row], end)
    partial = np.where(rows.num_partials[row] > 0, rows.first_partial[row] + (split * rows.q_len[row] + start) * group_size, -1)
    first_token, unused = rows.first_token[row] + start, np.zeros_like(row)
    table = np.stack([first_token, num_tokens, first_position, rows.first_page[row], first_key, end_key, partial, unused], axis=1)
    # programs start in order: a long one that starts last would run alone
    return np.ascontiguousarray(table[np.argsort(first_key - end_key, kind="stable")], dtype=np.int32)


def _merges(rows: _Rows, chosen: Ints, group_size: int) -> Ints:
    """Every token of the chosen rows over the splits that hold a key which it sees."""
    owner, token = _expand(rows.q_len[chosen])
    row = chosen[owner]
    num_splits = -(-(rows.seq_len[row] - rows.q_len[row] + token + 1) // rows.split_len[row])
    first_partial, stride = rows.first_partial[row] + token * group_size, rows.q_len[row] * group_size
    return np.stack([rows.first_token[row] + token, first_partial, stride, num_splits], axis=1).astype(np.int32)
