"""The Triton kernels: write K and V, attend over paged K and V, merge the splits. triton_plan.py says what items and merges are.

Importing this needs Triton; with TRITON_INTERPRET=1, set before Triton is imported, the kernels run on the CPU. Only places that a row owns
and has written are read: a masked lane loads 0, so that NaN in a freed page never meets a weight of 0.
"""

import triton
import triton.language as tl
from triton import knobs

IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def write_kernel(
    k,  # [num_tokens, num_kv_heads, head_dim], the last dimension contiguous
    v,
    k_pool,  # [num_places, num_kv_heads, head_dim]
    v_pool,
    out_slots,  # [num_tokens] int64, places
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token copies all its heads."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(out_slots + token)
    i = tl.arange(0, BLOCK)
    head, d = i // HEAD_DIM, i % HEAD_DIM
    mask = i < NUM_KV_HEADS * HEAD_DIM
    to = place * (NUM_KV_HEADS * HEAD_DIM) + i
    tl.store(k_pool + to, tl.load(k + token * k_token_stride + head * k_head_stride + d, mask=mask), mask=mask)
    tl.store(v_pool + to, tl.load(v + token * v_token_stride + head * v_head_stride + d, mask=mask), mask=mask)


@triton.jit
def _dot(a, b, acc):
    """acc + a @ b, products and sums in float32."""
    if IS_INTERPRETED:
        # Triton 3.7's interpreter would multiply the bit patterns of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _attend_block(
    acc,  # [BLOCK_M, BLOCK_D] float32, not yet divided by total
    total,  # [BLOCK_M] float32
    highest,  # [BLOCK_M] float32, base-2
    q,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M]
    k_pool,
    v_pool,
    pages,  # the row's page ids
    start,
    end_key,
    kv_head,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Keys start .. start + BLOCK_N. IS_MASKED: some of them lie behind end_key, or behind some query of the tile."""
    n = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_range = n < end_key
    page = tl.load(pages + n // PAGE_SIZE, mask=in_range, other=0).to(tl.int64)
    place = page * PAGE_SIZE + n % PAGE_SIZE
    offsets = place[:, None] * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + d[None, :]
    mask = d[None, :] < HEAD_DIM
    if IS_MASKED:
        mask = mask & in_range[:, None]
    keys = tl.load(k_pool + offsets, mask=mask, other=0.0)
    scores = _dot(q, tl.trans(keys), tl.zeros([q.shape[0], BLOCK_N], tl.float32)) * scale_log2
    if IS_MASKED:
        scores = tl.where(in_range[None, :] & (n[None, :] <= position[:, None]), scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # a query that sees no key yet: -inf less -inf would be NaN
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(highest - shift)
    total = total * fade + tl.sum(weights, 1)
    values = tl.load(v_pool + offsets, mask=mask, other=0.0)
    acc = _dot(weights.to(values.dtype), values, acc * fade[:, None])
    return acc, total, new_highest


@triton.jit
def attend_kernel(
    q,  # [num_tokens, num_heads, head_dim], the last dimension contiguous
    k_pool,  # [num_places, num_kv_heads, head_dim]
    v_pool,
    out,  # [num_tokens, num_heads, head_dim]
    partial_out,  # [max_partials, num_kv_heads, head_dim] float32
    partial_lse,  # [max_partials, num_kv_heads] float32, base-2
    items,  # [num_items, ITEM_FIELDS] int32
    kv_indices,  # int32
    scale_log2,  # softmax scale times log2(e)
    q_token_stride,
    q_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per item and KV head; heads of one item lie side by side, as in memory."""
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    item = items + (tl.program_id(0) // NUM_KV_HEADS) * 8
    first_token, num_tokens, first_position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    pages = kv_indices + tl.load(item + 3)
    first_key, end_key, first_partial = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token, head = m // GROUP_SIZE, kv_head * GROUP_SIZE + m % GROUP_SIZE
    is_row = token < num_tokens
    mask = is_row[:, None] & (d[None, :] < HEAD_DIM)
    row = (first_token + token).to(tl.int64)
    tile = tl.load(q + row[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=mask, other=0.0)
    position = first_position + token
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    num_plain = tl.maximum(tl.minimum(first_position + 1, end_key) - first_key, 0) // BLOCK_N * BLOCK_N
    # fmt: off
    for start in range(first_key, first_key + num_plain, BLOCK_N):
        acc, total, highest = _attend_block(
            acc, total, highest, tile, position, k_pool, v_pool, pages, start, end_key, kv_head, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, False,
        )
    for start in range(first_key + num_plain, end_key, BLOCK_N):
        acc, total, highest = _attend_block(
            acc, total, highest, tile, position, k_pool, v_pool, pages, start, end_key, kv_head, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, BLOCK_D, True,
        )
    # fmt: on
    # a query may see no key of a later split: nobody reads what it leaves there
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if first_partial < 0:
        to = row[:, None] * (NUM_KV_HEADS * GROUP_SIZE * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
        tl.store(out + to, acc.to(out.dtype.element_ty), mask=mask)
    else:
        partial = (first_partial + m).to(tl.int64) * NUM_KV_HEADS + kv_head
        tl.store(partial_out + partial[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
        tl.store(partial_lse + partial, highest + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=is_row)


@triton.jit
def merge_kernel(
    out,  # [num_tokens, num_heads, head_dim]
    partial_out,
    partial_lse,
    merges,  # [num_merges, MERGE_FIELDS] int32
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per token and KV head folds the splits, first to last."""
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    merge = merges + (tl.program_id(0) // NUM_KV_HEADS) * 4
    token, first_partial = tl.load(merge).to(tl.int64), tl.load(merge + 1)
    partial_stride, num_splits = tl.load(merge + 2), tl.load(merge + 3)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    is_row = g < GROUP_SIZE
    mask = is_row[:, None] & (d[None, :] < HEAD_DIM)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for split in range(num_splits):
        partial = (first_partial + split * partial_stride + g).to(tl.int64) * NUM_KV_HEADS + kv_head
        lse = tl.load(partial_lse + partial, mask=is_row, other=0.0)
        new_highest = tl.maximum(highest, lse)
        fade, weight = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
        acc = acc * fade[:, None] + weight[:, None] * tl.load(partial_out + partial[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        total = total * fade + weight
        highest = new_highest
    head = kv_head * GROUP_SIZE + g
    to = token * (NUM_KV_HEADS * GROUP_SIZE * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
