"""CpuBackend: the C++ kernel of native/csrc over a KVPool in main memory. K and V are read in place, a shared prefix once for all its rows.

A query's bits depend on its own tokens alone: not on other rows, threads, groups, chunks, or where a cached part ended.
Groups are found in the step's own page ids (native/csrc/attention_plan.cpp): comparing them costs microseconds, and they are the truth
about what is shared, whoever put it there.

A key or a value that is NaN or infinite reaches the queries that see it, and no bit of any other.
"""

import ctypes
import weakref

import torch

from radixserve.attention.batch import ForwardBatch
from radixserve.kv import KVPool
from radixserve.native import check, load_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_GROUP_SIZE = 1024  # query heads of one KV head (native/csrc/attention_plan.h)


class _Layer(ctypes.Structure):
    """struct AttentionLayer of attention.h"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "pool_k", "pool_v", "out", "out_slots")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "q_token_stride",
                "q_head_stride",
                "k_token_stride",
                "k_head_stride",
                "v_token_stride",
                "v_head_stride",
            )
        ),
    )


class CpuBackend:
    """AttentionBackend over a pool of float32 or bfloat16 on the CPU. KernelBuildError where the library cannot be had.

    reads_shared_once=False reads every row's pages for itself; the results are the same bits.
    """

    name = "cpu"
    waited_s = 0.0

    def __init__(self, pool: KVPool, num_heads: int, *, reads_shared_once: bool = True) -> None:
        assert num_heads in range(pool.num_kv_heads, num_heads + 1, pool.num_kv_heads), (
            f"CpuBackend: expected num_heads to be a multiple of num_kv_heads = {pool.num_kv_heads}, got {num_heads}"
        )
        assert num_heads // pool.num_kv_heads <= MAX_GROUP_SIZE, (
            f"CpuBackend: expected at most {MAX_GROUP_SIZE} heads to a KV head, got {num_heads // pool.num_kv_heads}"
        )
        assert pool.device.type == "cpu" and pool.dtype in DTYPES, (
            f"CpuBackend: expected a pool of {list(DTYPES)} on the CPU, got {pool.dtype} on {pool.device}"
        )
        self._pool = pool
        self._num_heads = num_heads
        self._batch: ForwardBatch | None = None
        self._library = library = load_library()
        handle = library.radixserve_attention_new(
            num_heads, pool.num_kv_heads, pool.head_dim, pool.page_size, DTYPES[pool.dtype], int(reads_shared_once)
        )
        if not handle:
            raise MemoryError("CpuBackend: no memory for the kernel's state")
        self.handle: int = handle  # for the native decoder, which attends without coming back to Python
        # k of every layer, then v: the same place for as long as the pool lives
        pools = [at(layer).data_ptr() for at in (pool.k, pool.v) for layer in range(pool.num_layers)]
        self.pool_addresses = (ctypes.c_void_p * len(pools))(*pools)
        weakref.finalize(self, library.radixserve_attention_delete, handle)

    def plan(self, batch: ForwardBatch) -> None:
        """Cut the step into tiles and units, once for all layers."""
        assert batch.page_size == self._pool.page_size, f"CpuBackend: expected page size {self._pool.page_size}, got {batch.page_size}"
        self._batch = batch  # the kernel reads its arrays until the next plan
        tables = (batch.qo_indptr_host, batch.kv_indptr_host, batch.kv_indices, batch.seq_lens_host)
        for table in tables:
            assert table.dtype == torch.int32 and table.is_contiguous(), "CpuBackend: expected contiguous int32 index tables"
        status = self._library.radixserve_attention_plan(
            self.handle, batch.num_rows, torch.get_num_threads(), *(table.data_ptr() for table in tables)
        )
        check(self._library, status, "the plan of a step's attention")

    def serves(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> bool:
        """Whether it was made for a model of (num_layers, num_heads, num_kv_heads, head_dim)."""
        pool = self._pool
        return (pool.num_layers, self._num_heads, pool.num_kv_heads, pool.head_dim) == shape and pool.dtype == dtype

    def has_planned(self, batch: ForwardBatch) -> bool:
        return self._batch is batch

    @property
    def num_shared_tiles(self) -> int:
        """Runs of blocks that the planned step reads once for several rows."""
        return int(self._library.radixserve_attention_num_shared_tiles(self.handle))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend.run. Any strides will do as long as a head's numbers lie side by side."""
        batch, pool = self._batch, self._pool
        assert batch is not None, "CpuBackend: run() before plan()"
        num_tokens = batch.num_tokens
        q_shape, k_shape = (num_tokens, self._num_heads, pool.head_dim), (num_tokens, pool.num_kv_heads, pool.head_dim)
        assert q.shape == q_shape, f"CpuBackend: expected q of shape {q_shape}, got {tuple(q.shape)}"
        assert k.shape == v.shape == k_shape, f"CpuBackend: expected k and v of shape {k_shape}, got {tuple(k.shape)} and {tuple(v.shape)}"
        assert q.dtype == k.dtype == v.dtype == pool.dtype, f"CpuBackend: expected {pool.dtype}, got {q.dtype}, {k.dtype} and {v.dtype}"
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty(q_shape, dtype=q.dtype)
        arguments = _Layer(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            pool.k(layer).data_ptr(),
            pool.v(layer).data_ptr(),
            out.data_ptr(),
            batch.out_slots.data_ptr(),
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
        )
        status = self._library.radixserve_attention_run(self.handle, ctypes.addressof(arguments), num_tokens)
        check(self._library, status, f"the attention of {num_tokens} tokens")
        return out
