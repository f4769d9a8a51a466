"""FlashInfer's own wrapper classes on the CPU: only the compiled modules behind them are replaced, by float64 torch that first demands what
they demand, or would read past without a word: dtypes, strides, placement, rising offsets, page ids in range and not freed.
"""

import math
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

LN2 = math.log(2.0)
HALF = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
Kernel = Callable[[Callable[[], None]], None]


@dataclass
class Plan:
    """What a plan was made of, kept to hold runs against it."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    seq_lens: torch.Tensor
    num_heads: int
    num_kv_heads: int
    page_size: int
    is_graph: bool
    is_causal: bool
    fixed_split_size: int
    disable_split_kv: bool


@dataclass
class Reference:
    """dtypes: of q, K and V that are let through. freed_pages: ids that nobody may read now. on_kernel: told of each launch."""

    dtypes: tuple[torch.dtype, ...] = HALF
    freed_pages: Callable[[], Collection[int]] = tuple
    on_kernel: Kernel = field(default=lambda launch: launch())
    plans: list[Plan] = field(default_factory=list)
    num_runs: int = 0
    num_merges: int = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Until the patch is undone."""
        import flashinfer.cascade
        import flashinfer.decode
        import flashinfer.prefill

        plain_empty = torch.empty

        def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return plain_empty(*size, **options)  # there is no pinned memory without a driver

        patch.setattr(torch, "empty", empty)
        for module in (flashinfer.prefill, flashinfer.decode):
            patch.setattr(module, "get_batch_prefill_module", self._module)
        patch.setattr(flashinfer.decode, "get_batch_decode_module", None)  # the backend has no use for it
        merge = types.SimpleNamespace(merge_state_in_place=self._merge)
        patch.setattr(flashinfer.cascade, "get_cascade_module", lambda: merge)

    def _module(self, backend: str, q: Any, kv: Any, out: Any, index: Any, d_qk: int, d_vo: int, *variant: Any) -> Any:
        assert backend == "fa2"
        assert q == out and kv in (q, FP8) and q in self.dtypes, (q, kv, out)
        assert index == torch.int32, index
        assert variant == (0, False, False, False), "a module of its own, compiled while serving"
        return types.SimpleNamespace(plan=self._plan, paged_run=partial(self._paged_run, kv))

    def _plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        seq_lens: torch.Tensor,
        total_num_rows: int,
        batch_size: int,
        num_heads: int,
        num_kv_heads: int,
        page_size: int,
        is_graph: bool,
        d_qk: int,
        d_vo: int,
        is_causal: bool,
        window_left: int,
        fixed_split_size: int,
        disable_split_kv: bool,
        num_colocated: int,
        uniform_q_len: int,
    ) -> list[int]:
        assert float_workspace.dtype == int_workspace.dtype == pinned.dtype == torch.uint8
        assert float_workspace.nbytes >= 16 << 20 and pinned.nbytes >= int_workspace.nbytes >= 1 << 18
        for name, host in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("seq_lens", seq_lens)):
            assert host.device.type == "cpu" and host.dtype == torch.int32 and host.is_contiguous(), name
        assert len(qo_indptr) == len(kv_indptr) == len(seq_lens) + 1 == batch_size + 1
        assert qo_indptr[0] == kv_indptr[0] == 0, "offsets of a part begin at 0"
        q_lens, num_pages = qo_indptr.diff(), kv_indptr.diff()
        assert (q_lens >= 1).all() and (num_pages >= 1).all(), "offsets rise"
        assert total_num_rows == qo_indptr[-1]
        assert ((seq_lens + page_size - 1) // page_size == num_pages).all(), "the last page has 1 .. page_size keys"
        assert not is_causal or (q_lens <= seq_lens).all(), "a query before the first key sees nothing"
        assert num_heads % num_kv_heads == 0 and d_qk == d_vo and window_left == -1
        assert not (is_graph and fixed_split_size > 0), "may need more blocks than were captured"
        split = 1 if disable_split_kv else -(-num_pages // fixed_split_size) if fixed_split_size > 0 else None
        reserve(float_workspace, num_heads, num_kv_heads, d_qk, q_lens, split, is_graph)
        # what the real planner does: it copies, so that the caller's memory is free again once the copy has been made
        tables = (qo_indptr.clone(), kv_indptr.clone(), seq_lens.clone())
        self.plans.append(Plan(*tables, num_heads, num_kv_heads, page_size, is_graph, is_causal, fixed_split_size, disable_split_kv))
        return [len(self.plans) - 1]

    def _paged_run(
        self,
        kv_dtype: torch.dtype,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *rest: Any,
    ) -> None:
        plan = self.plans[plan_info[0]]
        assert mask_mode == int(plan.is_causal) and layout == 0 and window_left == -1
        assert q.shape[1] == plan.num_heads and k.shape[2] == plan.num_kv_heads and k.shape[1] == plan.page_size
        assert q.dtype == out.dtype and k.dtype == v.dtype == kv_dtype and q.dtype in self.dtypes
        assert q.stride(-1) == 1 and out.is_contiguous() and out.shape == q.shape, "rows of out lie side by side"
        assert k.stride() == v.stride() and k.is_contiguous(), "unequal strides are another module"
        assert lse is None or (lse.dtype == torch.float32 and lse.shape == q.shape[:2])
        for table in (qo_indptr, kv_indptr, kv_indices, last_page_len):
            assert table.dtype == torch.int32 and table.is_contiguous() and table.device == q.device
        scale = rest[7]
        assert rest[6] == 0.0 and math.isclose(scale, q.shape[2] ** -0.5), "no soft cap; K counts as it is stored"
        assert rest[8:11] == (None, None, None), "scales of q, k and v are for a q of 8 bits"
        tables = qo_indptr, kv_indptr, kv_indices, last_page_len
        # plans of one graph come after its capture too: what is held against tables is the last one of this wrapper
        self.on_kernel(lambda: self._attend(tables, q, k, v, out, lse, mask_mode == 1, scale))

    def _attend(
        self,
        tables: tuple[torch.Tensor, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> None:
        self.num_runs += 1
        qo_indptr, kv_indptr, kv_indices, last_page_len = tables
        page_size = k.shape[1]
        used = kv_indices[: int(kv_indptr[-1])]
        assert 0 <= used.min() <= used.max() < k.shape[0], "a page id outside of the pool is an illegal access, or garbage"
        freed = set(self.freed_pages()) & set(used.tolist())
        assert not freed, f"pages {sorted(freed)} are free and are read"
        assert 1 <= last_page_len.min() <= last_page_len.max() <= page_size, "the last page has 1 .. page_size keys"
        assert int(qo_indptr[-1]) == q.shape[0], f"{q.shape[0]} queries, {int(qo_indptr[-1])} planned"
        for row in range(len(last_page_len)):
            first, end = int(qo_indptr[row]), int(qo_indptr[row + 1])
            pages = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long()
            n = (len(pages) - 1) * page_size + int(last_page_len[row])
            keys, values = (_take(pool, pages).flatten(0, 1)[:n].double() for pool in (k, v))
            rows, weights = _softmax_rows(q[first:end].double(), keys, values, is_causal, scale)
            out[first:end] = rows.to(out.dtype)
            if lse is not None:
                lse[first:end] = weights.float()

    def _merge(self, v: torch.Tensor, s: torch.Tensor, other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None) -> None:
        assert mask is None and v.shape == other.shape and s.shape == s_other.shape == v.shape[:2]
        assert v.dtype == other.dtype and s.dtype == s_other.dtype == torch.float32
        assert all(tensor.is_contiguous() for tensor in (v, s, other, s_other))
        self.num_merges += 1

        def launch() -> None:
            top = torch.maximum(s, s_other)
            one, two = torch.exp2(s - top).double(), torch.exp2(s_other - top).double()
            v.copy_((v * one[..., None] + other * two[..., None]) / (one + two)[..., None])
            s.copy_(top + torch.log2(one + two))

        self.on_kernel(launch)


MULTIPROCESSORS = 132


def reserve(
    workspace: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_lens: torch.Tensor,
    num_cuts: torch.Tensor | int | None,
    is_graph: bool,
) -> None:
    """scheduler.cuh, PrefillPlanImpl: room for a tile of float32 results per piece; one that does not fit is an error of the step.

    num_cuts: of each row's keys; None: as many as fill the GPU, at most.
    """
    if num_cuts is not None and not (isinstance(num_cuts, torch.Tensor) and bool((num_cuts > 1).any())):
        return
    group = num_heads // num_kv_heads
    packed = q_lens * group
    average = group if is_graph else int(packed.sum()) // len(packed)
    tile = 128 if average > 64 and head_dim < 256 else 64 if average > 16 else 16
    num_pieces = 2 * MULTIPROCESSORS // num_kv_heads
    if is_graph:
        num_pieces = max(num_pieces, -(-int(packed.sum()) // tile) + len(packed) - 1)
    elif num_cuts is not None:
        num_pieces = int(((packed + tile - 1) // tile * num_cuts).sum())
    num_rows = -(-num_pieces * tile // group)
    for name, size in (("tmp_v", num_heads * num_rows * head_dim * 4), ("tmp_s", num_heads * num_rows * 4)):
        if size > workspace.nbytes:
            raise RuntimeError(f"Buffer overflow when allocating memory for batch_prefill_{name} with size {size}. Increase the workspace")
        workspace = workspace[-(-size // 16) * 16 :]


def _take(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    if pool.dtype != FP8:
        return pool[pages]
    # of all 256 numbers by their bits: sign, exponent of 4 bits around 7, fraction of 3; all ones are NaN
    return fp8_numbers()[pool.view(torch.uint8)[pages].long()]


def fp8_numbers() -> torch.Tensor:
    """[256] float64: what each byte stands for, by the format's definition, not by torch's casts."""
    exponents, fractions = torch.arange(128, dtype=torch.float64) // 8, torch.arange(128, dtype=torch.float64) % 8
    numbers = torch.where(exponents == 0, fractions / 8 * 2.0**-6, (1 + fractions / 8) * 2.0 ** (exponents - 7))
    numbers[127] = math.nan
    return torch.cat([numbers, -numbers])


def nearest_fp8(values: torch.Tensor) -> torch.Tensor:
    """float64: for each the nearest that there is, an even fraction where two are; the largest for all beyond it."""
    numbers = fp8_numbers()[:127]
    size = values.double().abs().clamp(max=float(numbers[-1]))
    above = torch.searchsorted(numbers, size).clamp(min=1)
    low, high = numbers[above - 1], numbers[above]
    is_high = (high - size < size - low) | ((high - size == size - low) & (above % 2 == 0))
    return torch.where(is_high, high, low).copysign(values.double())


def _softmax_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, heads, d], k and v [m, kv_heads, d] float64 -> [n, heads, d] and base-2 logarithms of the sums [n, heads]."""
    n, m = len(q), len(k)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhgd,mhd->nhgm", q.view(n, -1, group, q.shape[2]), k) * scale
    if is_causal:
        future = torch.arange(m) > torch.arange(m - n, m)[:, None]
        scores = scores.masked_fill(future[:, None, None], -math.inf)
    log_sum = scores.logsumexp(-1)
    rows = torch.einsum("nhgm,mhd->nhgd", (scores - log_sum[..., None]).exp(), v)
    return rows.flatten(1, 2), log_sum.flatten(1, 2) / LN2
