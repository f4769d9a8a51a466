"""Steps over shuffled pages in a poisoned pool, and dense attention in float64, query by query: what backends are held against."""

import math
import random
from array import array
from dataclasses import dataclass

import torch

from radixserve.attention import ForwardBatch
from radixserve.core import PageWrite, ScheduledBatch, ScheduledRow
from radixserve.kv import KVPool, PageTable
from radixserve.runner.batch_builder import build_forward_batch


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
    rows: list[tuple[int, int, bool]],
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
    device: str = "cpu",
) -> Case:
    """rows are (seq_len, q_len, is_decode). Every place of the pool that no row owns is NaN, page 0 included."""
    generator = torch.Generator().manual_seed(7)
    needed = [-(-seq_len // page_size) for seq_len, _, _ in rows]
    page_ids = random.Random(3).sample(range(1, 2 * sum(needed) + 1), sum(needed))
    pool = KVPool(1, 2 * sum(needed), page_size, num_kv_heads, head_dim, dtype, device)
    pool.k(0).fill_(math.nan)
    pool.v(0).fill_(math.nan)
    table = PageTable(len(rows), max(needed), page_size, device)
    case = Case(pool, None, [], [], [], None, None)  # type: ignore[arg-type]
    scheduled = []
    for slot, (seq_len, q_len, is_decode) in enumerate(rows):
        pages = [page_ids.pop() for _ in range(needed[slot])]
        table.write(slot, PageWrite(0, array("i", pages)))
        k, v = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(seq_len - q_len):
            pool.k(0)[pages[position // page_size], position % page_size] = k[position]
            pool.v(0)[pages[position // page_size], position % page_size] = v[position]
        case.keys.append(k)
        case.values.append(v)
        case.queries.append(torch.randn(q_len, num_heads, head_dim, generator=generator).to(dtype))
        token_ids = array("i") if is_decode else array("i", [0] * q_len)
        scheduled.append(ScheduledRow(slot, seq_len - q_len, q_len, token_ids))
    case.batch = build_forward_batch(
        ScheduledBatch(0, tuple(scheduled)), table, torch.zeros(len(rows), dtype=torch.int64, device=device), pool.device
    )
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
                weights = torch.softmax(k @ queries[j, head].double() / math.sqrt(keys.shape[2]), dim=0)
                outputs.append(weights @ values[:num_visible, head // group_size].double())
    return torch.stack(outputs).view(-1, case.queries[0].shape[1], case.queries[0].shape[2])


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
