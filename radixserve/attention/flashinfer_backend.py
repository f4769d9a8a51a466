"""FlashInferBackend: paged attention by FlashInfer's FA2 kernels on an NVIDIA GPU. It imports the package when it is made, not before.

A step is cut into parts, each planned once and run once a layer, one after the other on one stream:
    decode   one query a row, by the decode wrapper on tensor cores: one code path and one compiled module for every ratio of heads
    shared   where decode rows begin with the same pages and reading those once pays: their queries against these, then merged into decode
    extend   prompt chunks, causal, aligned to the last token, over everything that the row has so far
K and V are written before any part reads them, so lengths include this step's tokens.
"""

import time
from typing import Any, Protocol

import torch

from radixserve.attention.batch import ForwardBatch, padding_batch
from radixserve.attention.decode_groups import GroupFinder, RowGroup, SharingCost
from radixserve.attention.decode_tables import RowTables, decode_tables, extend_tables, shared_tables
from radixserve.attention.flashinfer_package import load_flashinfer
from radixserve.attention.flashinfer_workspace import WORKSPACE_BYTES
from radixserve.kv import KVPool

INT_WORKSPACE_BYTES = 8 << 20  # of each eager wrapper, on the device and pinned
EAGER_INT_WORKSPACES_BYTES = 3 * INT_WORKSPACE_BYTES  # extend, shared, decode
GRAPH_INT_WORKSPACE_BYTES = 1 << 20  # of each graph's wrapper: a plan for at most 512 rows takes some ten kilobytes
MAX_MERGED_NUMBERS = 1024 * 8
DEFAULT_COST = SharingCost()
Layer = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer of the pool


class _Part(Protocol):
    def run(self, q: torch.Tensor, kv: Layer, out: torch.Tensor) -> None:
        """Attend for the part's own tokens of q and out [num_tokens, num_heads, head_dim]."""


class FlashInferBackend:
    """AttentionBackend over a pool of bfloat16 or float16, stored so or in FP8, on a GPU; ConfigError where FlashInfer cannot be had.

    cost: when decode rows that share a beginning read it once; None never.
    fixed_split_pages: cut decode rows' keys at fixed places, and prompt chunks' nowhere, instead of by what else is in the batch (for a
    chunk, cuts would take a partial result of all its queries each); None lets the planner choose.
    workspace_bytes: for partial results of split rows, of one part at a time; size_workspace() tells what steps may need.
    """

    name = "flashinfer"

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        *,
        cost: SharingCost | None = DEFAULT_COST,
        fixed_split_pages: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        assert num_heads in range(pool.num_kv_heads, num_heads + 1, pool.num_kv_heads), (
            f"FlashInferBackend: expected num_heads to be a multiple of num_kv_heads = {pool.num_kv_heads}, got {num_heads}"
        )
        self._flashinfer = flashinfer = load_flashinfer()
        self._pool, self._num_heads = pool, num_heads
        # the merge of two states runs a token's heads in one block of threads, eight numbers a thread
        self._cost = cost if num_heads * pool.head_dim <= MAX_MERGED_NUMBERS else None
        self._fixed_split_pages = fixed_split_pages
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=pool.device)
        self._extend = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        self._shared = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True, backend="fa2")
        self._finder = GroupFinder()
        self._guard = PlanGuard(pool.device)
        self._batch: ForwardBatch | None = None
        self._parts: list[_Part] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Plan each part that the step has. The host waits only if the last plan has not been copied to the device yet."""
        assert batch.page_size == self._pool.page_size, (
            f"FlashInferBackend: expected page size {self._pool.page_size}, got {batch.page_size}"
        )
        self._batch = batch
        self._parts = []
        with self._guard:
            if batch.num_decode_rows:
                self._plan_decode(batch)
            if batch.num_rows > batch.num_decode_rows:
                self._plan_prefill(self._extend, extend_tables(batch), is_causal=True)
                self._parts.append(_Plain(self._extend, slice(batch.num_decode_rows, None)))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend.run. Any strides will do as long as a head's numbers lie side by side."""
        assert self._batch is not None, "FlashInferBackend: run() before plan()"
        check_queries(q, self._batch.num_tokens, self._num_heads, self._pool)
        self._pool.write(layer, self._batch.out_slots, k, v)
        kv = self._pool.k(layer), self._pool.v(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            part.run(q, kv, out)
        return out

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Have every kernel compiled and loaded now, which can take a minute, not under a request: run each once on the padding page."""
        pool = self._pool
        batch = padding_batch(torch.zeros(2, dtype=torch.int64, device=pool.device), num_decode_rows=1, page_size=pool.page_size)
        q, k = (torch.zeros(2, n, pool.head_dim, dtype=pool.dtype, device=pool.device) for n in (self._num_heads, pool.num_kv_heads))
        self.plan(batch)
        out = self.run(0, q, k, k)
        if self._cost is not None:
            weight = torch.zeros(out.shape[:2], dtype=torch.float32, device=pool.device)
            self._flashinfer.merge_state_in_place(out, weight, out.clone(), weight.clone())
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)

    def prefers_eager(self, batch: ForwardBatch) -> bool:
        """Whether reading shared beginnings once saves this decode step more than a graph would."""
        return self._find_groups(batch, has_graph=True) is not None

    def decode_graph(self, num_rows: int, indices: torch.Tensor) -> "GraphDecode":
        """Attention of decode steps of up to num_rows rows inside of one CUDA graph; `indices` [n] int32 takes the page ids."""
        return GraphDecode(self, num_rows, indices)

    @property
    def waited_s(self) -> float:
        """Seconds of all plans so far, a graph's too, in which the host waited for the one before to be copied to the device."""
        return self._guard.waited_s

    @property
    def num_shared_rows(self) -> int:
        """Decode rows of the planned step that read a beginning together with others."""
        return sum(part.num_shared_rows for part in self._parts if isinstance(part, _Merged))

    def _plan_decode(self, batch: ForwardBatch) -> None:
        groups = self._find_groups(batch, has_graph=False)
        if groups is None:
            self._plan_rows(self._decode, decode_tables(batch), fixed_split_size=self._fixed_split_pages)
            self._parts.append(_Plain(self._decode, slice(0, batch.num_decode_rows)))
            return
        shared = shared_tables(batch, groups)
        self._plan_rows(self._decode, shared.own, fixed_split_size=self._fixed_split_pages)
        self._plan_prefill(self._shared, shared.groups, is_causal=False)
        merge = self._flashinfer.merge_state_in_place
        self._parts.append(_Merged(self._decode, self._shared, merge, shared.order, batch.num_decode_rows, shared.num_rows))

    def _find_groups(self, batch: ForwardBatch, has_graph: bool) -> list[RowGroup] | None:
        if self._cost is None or batch.num_decode_rows < 2:
            return None
        pool = self._pool
        page_bytes = 2 * pool.page_size * pool.num_kv_heads * pool.head_dim * pool.stored_dtype.itemsize
        alone, needed = (self._cost.min_saved_bytes(is_graph) // page_bytes for is_graph in (False, has_graph))
        # no group can save more than all rows but one
        if int(batch.kv_indptr_host[batch.num_decode_rows]) <= needed:
            return None
        indptr, indices = batch.kv_indptr_host.numpy(), batch.kv_indices_host.numpy()
        groups = self._finder.find(indptr, indices, batch.num_decode_rows, max(1, alone // 8))
        if sum(group.num_saved_pages for group in groups) <= needed:
            return None
        return groups

    def _plan_rows(self, wrapper: Any, tables: RowTables, **split: Any) -> None:
        wrapper.plan(
            tables.kv_indptr, tables.kv_indices, tables.last_page_len, *self._shape(), **self._dtypes(), seq_lens=tables.seq_lens, **split
        )

    def _plan_prefill(self, wrapper: Any, tables: RowTables, is_causal: bool) -> None:
        wrapper.plan(
            tables.qo_indptr,
            tables.kv_indptr,
            tables.kv_indices,
            tables.last_page_len,
            *self._shape(),
            **self._dtypes(),
            causal=is_causal,
            seq_lens=tables.seq_lens,
            disable_split_kv=self._fixed_split_pages is not None,
        )

    def _shape(self) -> tuple[int, int, int, int]:
        return self._num_heads, self._pool.num_kv_heads, self._pool.head_dim, self._pool.page_size

    def _dtypes(self) -> dict[str, torch.dtype]:
        # of q, and with it of what comes out, float16 if left out. K and V of 8 bits are widened in registers; without k_scale and v_scale
        # they count as they are (docs/decisions/010)
        return {"q_data_type": self._pool.dtype, "kv_data_type": self._pool.stored_dtype}


class _Plain:
    """One wrapper over a run of the step's tokens."""

    def __init__(self, wrapper: Any, tokens: slice) -> None:
        self._wrapper, self._tokens = wrapper, tokens

    def run(self, q: torch.Tensor, kv: Layer, out: torch.Tensor) -> None:
        self._wrapper.run(q[self._tokens], kv, out=out[self._tokens])


class _Merged:
    """Decode rows in two parts of their keys: the shared beginnings, once a group, and what each row has of its own."""

    def __init__(self, own: Any, shared: Any, merge: Any, order: torch.Tensor | None, num_rows: int, num_shared_rows: int) -> None:
        self._own, self._shared, self._merge = own, shared, merge
        self._order, self._num_rows = order, num_rows  # order [num_rows] int64: rows of groups first, group by group; None: they are
        self.num_shared_rows = num_shared_rows

    def run(self, q: torch.Tensor, kv: Layer, out: torch.Tensor) -> None:
        n, k = self._num_rows, self.num_shared_rows
        queries = q[:n] if self._order is None else q.index_select(0, self._order)
        result = out[:n] if self._order is None else torch.empty(queries.shape, dtype=q.dtype, device=q.device)
        _, weight = self._own.run(queries, kv, out=result, return_lse=True)
        beginning = torch.empty((k, *queries.shape[1:]), dtype=q.dtype, device=q.device)
        _, beginning_weight = self._shared.run(queries[:k], kv, out=beginning, return_lse=True)
        self._merge(result[:k], weight[:k], beginning, beginning_weight)
        if self._order is not None:
            out[:n].index_copy_(0, self._order, result)


class GraphDecode:
    """AttentionBackend of one captured graph: num_rows rows always, those beyond the batch's on the padding page with one key each.

    plan() refills the buffers that the graph reads; run() is called at capture only. The padding rows' K and V go to page 0, place 0.
    """

    name = "flashinfer"

    def __init__(self, backend: FlashInferBackend, num_rows: int, indices: torch.Tensor) -> None:
        pool = backend._pool
        self._backend, self._num_rows, self._indices = backend, num_rows, indices
        self._indptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=pool.device)
        self._last_page_len = torch.ones(num_rows, dtype=torch.int32, device=pool.device)
        self._padding = torch.zeros(num_rows, dtype=torch.int32, device=pool.device)
        self.out_slots = torch.zeros(num_rows, dtype=torch.int64, device=pool.device)
        self._wrapper = backend._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            backend._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=self._last_page_len,
            backend="fa2",
        )
        int_workspace = torch.zeros(GRAPH_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._wrapper.reset_workspace_buffer(backend._workspace, int_workspace)

    def can_hold(self, batch: ForwardBatch) -> bool:
        num_padding = self._num_rows - batch.num_rows
        return num_padding >= 0 and batch.kv_indices.shape[0] + num_padding <= self._indices.shape[0]

    @property
    def waited_s(self) -> float:
        """The eager backend's: both stand behind one guard."""
        return self._backend.waited_s

    def plan(self, batch: ForwardBatch) -> None:
        """batch: decode rows alone, at most num_rows. Its out_slots are copied to where the graph reads them."""
        assert batch.num_rows == batch.num_decode_rows and self.can_hold(batch), "GraphDecode: expected decode rows that fit"
        backend, n = self._backend, batch.num_rows
        with backend._guard:
            self.out_slots[:n].copy_(batch.out_slots)
            self.out_slots[n:].zero_()
            tables = decode_tables(batch)
            # a graph's grid is fixed: FlashInfer's fixed_split_size may ask for more of it, disable_split_kv never does
            backend._plan_rows(
                self._wrapper, tables.padded(self._num_rows, self._padding), disable_split_kv=backend._fixed_split_pages is not None
            )

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend.run."""
        pool = self._backend._pool
        check_queries(q, self._num_rows, self._backend._num_heads, pool)
        pool.write(layer, self.out_slots, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, (pool.k(layer), pool.v(layer)), out=out)
        return out


class PlanGuard:
    """`with guard:` around plans. FlashInfer stages a plan in pinned memory and copies from there without waiting; the next plan, which
    overwrites that memory, waits here until the copy was made."""

    def __init__(self, device: torch.device) -> None:
        self._planned: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._has_planned = False
        self.waited_s = 0.0

    def __enter__(self) -> None:
        if self._planned is not None and self._has_planned:
            start = time.perf_counter()
            self._planned.synchronize()
            self.waited_s += time.perf_counter() - start

    def __exit__(self, *exc_info: object) -> None:
        if self._planned is not None:
            self._planned.record()
            self._has_planned = True


def check_queries(q: torch.Tensor, num_tokens: int, num_heads: int, pool: KVPool) -> None:
    """AssertionError for what the kernels would read past, or read as other numbers, without a word."""
    shape = (num_tokens, num_heads, pool.head_dim)
    assert q.shape == shape, f"FlashInferBackend: expected q of shape {shape}, got {tuple(q.shape)}"
    assert q.dtype == pool.dtype and q.stride(2) == 1, (
        f"FlashInferBackend: expected q in {pool.dtype}, a head's numbers side by side, got {q.dtype} with strides {q.stride()}"
    )
