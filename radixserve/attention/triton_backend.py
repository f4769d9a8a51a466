"""TritonBackend: attention on an NVIDIA GPU where FlashInfer is missing. The kernels are compiled on first use; triton_kernels.py has them.

It is the one GPU path that is proven without a GPU: the same kernels run on the CPU in Triton's interpreter (TRITON_INTERPRET=1, tests and
debugging only), and are compiled for sm_80 and sm_90 by the tests.
"""

import math
import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from radixserve.attention.batch import ForwardBatch, padding_batch
from radixserve.attention.triton_plan import MIN_SPLIT_LEN, TritonPlan, plan_step
from radixserve.attention.triton_variants import DTYPES, MAX_GROUP_SIZE, MAX_HEAD_DIM, Tile, Variant
from radixserve.kv import KVPool, pinned

SCRATCH_BYTES = 64 << 20


def reason_against(pool: KVPool, num_heads: int) -> str | None:
    """Why TritonBackend cannot serve this pool, or None. Triton is looked for, not imported."""
    if pool.dtype not in DTYPES:
        return f"expected bfloat16, float16 or float32, got {pool.dtype}"
    if pool.head_dim > MAX_HEAD_DIM:
        return f"expected a head_dim of at most {MAX_HEAD_DIM}, got {pool.head_dim}"
    if num_heads // pool.num_kv_heads > MAX_GROUP_SIZE:
        return f"expected at most {MAX_GROUP_SIZE} heads per KV head, got {num_heads // pool.num_kv_heads}"
    if find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    if pool.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"expected a CUDA device, got {pool.device} (for debugging, TRITON_INTERPRET=1 runs the kernels there, very slowly)"
    return None


class TritonBackend:
    """AttentionBackend over a pool that reason_against() has nothing against.

    scratch_bytes, allocated at once, holds the partial results of split rows; rows beyond it are not split.
    """

    name = "triton"
    waited_s = 0.0

    def __init__(self, pool: KVPool, num_heads: int, *, scratch_bytes: int = SCRATCH_BYTES, min_split_len: int = MIN_SPLIT_LEN) -> None:
        assert num_heads in range(pool.num_kv_heads, num_heads + 1, pool.num_kv_heads), (
            f"TritonBackend: expected num_heads to be a multiple of num_kv_heads = {pool.num_kv_heads}, got {num_heads}"
        )
        reason = reason_against(pool, num_heads)
        assert reason is None, f"TritonBackend: {reason}"
        from radixserve.attention import triton_kernels  # not before it is wanted: it brings a compiler along

        self._kernels: Any = triton_kernels
        self._pool = pool
        self._num_heads = num_heads
        self._variant = Variant(pool.num_kv_heads, num_heads // pool.num_kv_heads, pool.head_dim, pool.page_size, pool.dtype)
        self._min_split_len = min_split_len
        max_partials = scratch_bytes // (4 * pool.num_kv_heads * (pool.head_dim + 1))
        self._partial_out = torch.empty(max_partials, pool.num_kv_heads, pool.head_dim, dtype=torch.float32, device=pool.device)
        self._partial_lse = torch.empty(max_partials, pool.num_kv_heads, dtype=torch.float32, device=pool.device)
        self._batch: ForwardBatch | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # narrow items, wide items, merges

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Have every kernel compiled and loaded now, which takes seconds, not under a request, by a step on the padding page."""
        pool, variant = self._pool, self._variant
        # a narrow tile whose keys are split and merged, and a wide one
        rows = [(self._min_split_len + 1, 1), (variant.narrow.block_m + 1, variant.narrow.block_m + 1)]
        input_ids = torch.zeros(sum(new for _, new in rows), dtype=torch.int64, device=pool.device)
        batch = padding_batch(input_ids, num_decode_rows=1, page_size=pool.page_size, rows=rows)
        # as a decoder hands them over: views of one tensor, the same strides to compile for
        heads = torch.zeros(batch.num_tokens, self._num_heads + 2 * pool.num_kv_heads, pool.head_dim, dtype=pool.dtype, device=pool.device)
        self.plan(batch)
        self.run(0, *torch.split(heads, [self._num_heads, pool.num_kv_heads, pool.num_kv_heads], dim=1))
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        self._batch = self._tables = None

    def plan(self, batch: ForwardBatch) -> None:
        """Cut the step into items on the host and send their tables to the device, once for all layers; nothing waits for the device."""
        assert batch.page_size == self._pool.page_size, f"TritonBackend: expected page size {self._pool.page_size}, got {batch.page_size}"
        plan = plan_step(
            batch.qo_indptr_host.numpy(),
            batch.kv_indptr_host.numpy(),
            batch.seq_lens_host.numpy(),
            group_size=self._variant.group_size,
            narrow_block_m=self._variant.narrow.block_m,
            wide_block_m=self._variant.wide.block_m,
            max_partials=self._partial_lse.shape[0],
            min_split_len=self._min_split_len,
        )
        self._batch, self._tables = batch, self._to_device(plan)

    def _to_device(self, plan: TritonPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tables = (plan.narrow_items, plan.wide_items, plan.merges)
        flat = pinned.send(np.concatenate([table.ravel() for table in tables]), self._pool.device)
        narrow, wide, merges = torch.split(flat, [table.size for table in tables])
        return narrow.view(plan.narrow_items.shape), wide.view(plan.wide_items.shape), merges.view(plan.merges.shape)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend.run. Any strides will do as long as a head's numbers lie side by side."""
        batch, pool = self._batch, self._pool
        assert batch is not None and self._tables is not None, "TritonBackend: run() before plan()"
        q_shape, k_shape = (batch.num_tokens, self._num_heads, pool.head_dim), (batch.num_tokens, pool.num_kv_heads, pool.head_dim)
        assert q.shape == q_shape, f"TritonBackend: expected q of shape {q_shape}, got {tuple(q.shape)}"
        assert k.shape == v.shape == k_shape, (
            f"TritonBackend: expected k and v of shape {k_shape}, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
        assert q.dtype == k.dtype == v.dtype == pool.dtype, f"TritonBackend: expected {pool.dtype}, got {q.dtype}, {k.dtype} and {v.dtype}"
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty(q_shape, dtype=q.dtype, device=q.device)
        self._write(layer, batch, k, v)
        narrow, wide, merges = self._tables
        self._attend(layer, batch, q, out, narrow, self._variant.narrow)
        self._attend(layer, batch, q, out, wide, self._variant.wide)
        self._merge(out, merges)
        return out

    def _write(self, layer: int, batch: ForwardBatch, k: torch.Tensor, v: torch.Tensor) -> None:
        pool = self._pool
        self._kernels.write_kernel[(batch.num_tokens,)](
            *(k, v, pool.k(layer), pool.v(layer), batch.out_slots, *k.stride()[:2], *v.stride()[:2]),
            **self._variant.write_constants,
        )

    def _attend(self, layer: int, batch: ForwardBatch, q: torch.Tensor, out: torch.Tensor, items: torch.Tensor, tile: Tile) -> None:
        if not items.shape[0]:
            return
        pool = self._pool
        self._kernels.attend_kernel[(items.shape[0] * pool.num_kv_heads,)](
            *(q, pool.k(layer), pool.v(layer), out, self._partial_out, self._partial_lse, items, batch.kv_indices),
            *(pool.head_dim**-0.5 * math.log2(math.e), *q.stride()[:2]),
            **self._variant.attend_constants(tile),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _merge(self, out: torch.Tensor, merges: torch.Tensor) -> None:
        if not merges.shape[0]:
            return
        pool = self._pool
        self._kernels.merge_kernel[(merges.shape[0] * pool.num_kv_heads,)](
            out, self._partial_out, self._partial_lse, merges, **self._variant.merge_constants
        )
