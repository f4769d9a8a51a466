"""TorchBackend against dense attention in float64, one query and one head at a time, over shuffled pages in a poisoned pool."""

import math
import random
from array import array
from dataclasses import dataclass

import pytest
import torch

from radixserve.attention import ForwardBatch, make_attention_backend
from radixserve.core import PageWrite, ScheduledBatch, ScheduledRow
from radixserve.errors import ConfigError
from radixserve.kv import KVPool, PageTable
from radixserve.runner.batch_builder import build_forward_batch

HEAD_DIM = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass
class Case:
    pool: KVPool
    batch: ForwardBatch
    keys: list[torch.Tensor]  # per row [seq_len, num_kv_heads, head_dim]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]  # per row [q_len, num_heads, head_dim]
    new_k: torch.Tensor
    new_v: torch.Tensor


def make_case(
    rows: list[tuple[int, int, bool]], page_size: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype = torch.float32
) -> Case:
    """rows are (seq_len, q_len, is_decode). Every place of the pool that no row owns is NaN, page 0 included."""
    generator = torch.Generator().manual_seed(7)
    needed = [-(-seq_len // page_size) for seq_len, _, _ in rows]
    page_ids = random.Random(3).sample(range(1, 2 * sum(needed) + 1), sum(needed))
    pool = KVPool(1, 2 * sum(needed), page_size, num_kv_heads, HEAD_DIM, dtype)
    pool.k(0).fill_(math.nan)
    pool.v(0).fill_(math.nan)
    table = PageTable(len(rows), max(needed), page_size)
    case = Case(pool, None, [], [], [], None, None)  # type: ignore[arg-type]
    scheduled = []
    for slot, (seq_len, q_len, is_decode) in enumerate(rows):
        pages = [page_ids.pop() for _ in range(needed[slot])]
        table.write(slot, PageWrite(0, array("i", pages)))
        k, v = torch.randn(2, seq_len, num_kv_heads, HEAD_DIM, generator=generator).to(dtype)
        for position in range(seq_len - q_len):
            pool.k(0)[pages[position // page_size], position % page_size] = k[position]
            pool.v(0)[pages[position // page_size], position % page_size] = v[position]
        case.keys.append(k)
        case.values.append(v)
        case.queries.append(torch.randn(q_len, num_heads, HEAD_DIM, generator=generator).to(dtype))
        token_ids = array("i") if is_decode else array("i", [0] * q_len)
        scheduled.append(ScheduledRow(slot, seq_len - q_len, q_len, token_ids))
    case.batch = build_forward_batch(ScheduledBatch(0, tuple(scheduled)), table, torch.zeros(len(rows), dtype=torch.int64), pool.device)
    case.new_k = torch.cat([k[seq_len - q_len :] for k, (seq_len, q_len, _) in zip(case.keys, rows)])
    case.new_v = torch.cat([v[seq_len - q_len :] for v, (seq_len, q_len, _) in zip(case.values, rows)])
    return case


def dense(case: Case) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim] float64"""
    outputs = []
    for queries, keys, values in zip(case.queries, case.keys, case.values):
        group_size = queries.shape[1] // keys.shape[1]
        for j in range(len(queries)):
            num_visible = len(keys) - len(queries) + j + 1
            for head in range(queries.shape[1]):
                k = keys[:num_visible, head // group_size].double()
                weights = torch.softmax(k @ queries[j, head].double() / math.sqrt(HEAD_DIM), dim=0)
                outputs.append(weights @ values[:num_visible, head // group_size].double())
    return torch.stack(outputs).view(-1, case.queries[0].shape[1], HEAD_DIM)


def run(case: Case, num_heads: int) -> torch.Tensor:
    backend = make_attention_backend("torch", case.pool, num_heads)
    backend.plan(case.batch)
    return backend.run(0, torch.cat(case.queries), case.new_k, case.new_v)


MIXED = [
    (1, 1, True),
    (40, 1, True),
    (17, 1, True),
    (16, 1, True),
    (9, 9, False),
    (33, 5, False),
    (32, 16, False),
    (1, 1, False),
    (20, 1, False),
]
ROWS = {
    "decode only": [(n, 1, True) for n in (1, 2, 15, 16, 17, 64, 70, 5)],
    "equal lengths": [(23, 1, True)] * 5,
    "whole prompts": [(n, n, False) for n in (1, 4, 37)],
    "suffixes": [(n, q, False) for n, q in ((50, 1), (50, 49), (16, 8), (17, 16))],
    "mixed": MIXED,
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_equals_dense_attention(rows: list[tuple[int, int, bool]], page_size: int, heads: tuple[int, int]) -> None:
    case = make_case(rows, page_size, *heads)
    out = run(case, heads[0])
    torch.testing.assert_close(out.double(), dense(case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = make_case(MIXED, 4, 6, 2, dtype)
    out = run(case, 6)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), dense(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_writes_this_steps_keys_and_nothing_else() -> None:
    case = make_case(MIXED, 4, 6, 2)
    before = case.pool.k(0).clone()
    run(case, 6)
    flat = case.pool.k(0).flatten(0, 1)
    torch.testing.assert_close(flat[case.batch.out_slots], case.new_k)
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[case.batch.out_slots] = False
    torch.testing.assert_close(flat[untouched], before.flatten(0, 1)[untouched], equal_nan=True)
    assert case.pool.k(0)[0].isnan().all()


def test_views_of_a_fused_projection_are_accepted() -> None:
    case = make_case(MIXED, 4, 6, 2)
    expected = run(case, 6)
    fused = torch.cat([torch.cat(case.queries), case.new_k, case.new_v], dim=1)
    backend = make_attention_backend("torch", case.pool, 6)
    backend.plan(case.batch)
    assert torch.equal(backend.run(0, fused[:, :6], fused[:, 6:8], fused[:, 8:]), expected)


def test_long_rows_are_cut_into_several_padded_batches() -> None:
    rows = [(1500, 1, True), (3, 1, True), (700, 1, True), (2, 1, True), (1400, 1, True)]
    case = make_case(rows, 16, 2, 1)
    torch.testing.assert_close(run(case, 2).double(), dense(case), atol=1e-5, rtol=1e-5)


def test_unknown_names_are_refused() -> None:
    pool = KVPool(1, 1, 1, 2, 4, torch.float32)
    with pytest.raises(ConfigError, match=r"--attention-backend: expected one of auto, flashinfer, .*, got 'fa4'"):
        make_attention_backend("fa4", pool, 2)
    with pytest.raises(AssertionError, match="multiple of num_kv_heads = 2, got 3"):
        make_attention_backend("torch", pool, 3)
