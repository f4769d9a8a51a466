"""FlashInfer's compiled planner plans real steps of the backend, without a GPU: make gpu-plan, or python -m bench.gpu_plan [--head-dim 64]

Compiles the FA2 module as bench.gpu_compile does (minutes of one core for each head_dim; kept), then runs FlashInferBackend on CPU tensors
over stand-ins for the CUDA calls that planners and launchers make (cuda_shim.c). Kernels are launched into nothing; their grids are printed
with --verbose. So the tables, dtypes and workspaces that the backend hands over are proved to be taken; the numbers are not
(tests/support/flashinfer_reference.py is for those).
"""

import argparse
import os
import random
import subprocess
import sys
import types
from array import array
from pathlib import Path
from typing import Any

import torch

from bench.gpu_compile import OUT, build_environment, compile_for
from radixserve.attention import ForwardBatch
from radixserve.attention.decode_groups import SharingCost
from radixserve.attention.flashinfer_backend import FlashInferBackend
from radixserve.attention.flashinfer_workspace import size_workspace
from radixserve.core import PageWrite, ScheduledBatch, ScheduledRow
from radixserve.kv import KVPool, PageTable
from radixserve.runner.batch_builder import build_forward_batch

ARCHITECTURE = "9.0a"  # of the GPU whose limits cuda_shim.c tells


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64], help="dimensions of a head (default: 64)")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (default: 2)")
    parser.add_argument("--verbose", action="store_true", help="print each launch")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        return plan_steps(args.head_dim)
    if compile_for(ARCHITECTURE, args.head_dim, OUT, args.jobs):
        return 1
    shim = OUT / "cuda_shim.so"
    source = Path(__file__).with_name("cuda_shim.c")
    subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-O1", str(source), "-o", str(shim)], check=True)
    environment = build_environment(ARCHITECTURE, OUT, args.jobs) | {"LD_PRELOAD": str(shim)}
    if args.verbose:
        environment["CUDA_SHIM_VERBOSE"] = "1"
    words = [sys.executable, "-m", "bench.gpu_plan", "--inner", "--head-dim", *map(str, args.head_dim)]
    return subprocess.run(words, env=environment, check=False).returncode


def plan_steps(head_dims: list[int]) -> int:
    plain_empty = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return plain_empty(*size, **options)  # there is no pinned memory without a driver

    torch.empty = empty  # type: ignore[assignment]
    import flashinfer.cascade

    # alone of all it insists on CUDA's tensors
    flashinfer.cascade.get_cascade_module = lambda: types.SimpleNamespace(merge_state_in_place=lambda *states: None)
    for head_dim in head_dims:
        for num_heads, num_kv_heads in ((9, 3), (32, 8), (28, 4), (64, 64)):
            for page_size in (1, 16):
                _plan(num_heads, num_kv_heads, head_dim, page_size)
                print(f"planned {num_heads}/{num_kv_heads} heads of {head_dim}, pages of {page_size}", flush=True)
    return 0


def _plan(num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> None:
    pool = KVPool(1, 120_000 // page_size, page_size, num_kv_heads, head_dim, torch.bfloat16)
    for options in ({}, {"cost": SharingCost(bytes_per_s=0.0)}, {"fixed_split_pages": 2048 // page_size}):
        backend = FlashInferBackend(pool, num_heads, **options)
        backend.warm_up()
        for rows in ([(700, 1)] * 64, [(4000, 1)] * 8 + [(1088, 64), (8000, 8000)], [(130, 130), (5, 5)]):
            batch = _batch(rows, pool)
            backend.plan(batch)
            backend.run(0, *_queries(batch.num_tokens, num_heads, pool))
        if backend._fixed_split_pages:  # what the largest step takes, of which a tile less is refused (tests hold the sum against that)
            _plan_largest(pool, num_heads)
        graph = backend.decode_graph(64, torch.zeros(1 << 19, dtype=torch.int32))
        for rows in ([(1, 1)], [(3000, 1)] * 17, [(1, 1), (20_000, 1)] * 20, [(700, 1)] * 64):
            graph.plan(_batch(rows, pool))
            graph.run(0, *_queries(64, num_heads, pool))


def _plan_largest(pool: KVPool, num_heads: int) -> None:
    """255 rows of 16384 tokens with fixed cuts, and graphs of 512 rows, in the workspaces that are sized for them."""
    num_rows, num_tokens = 255, 16384
    shape = {"num_rows": num_rows, "pages_per_row": -(-num_tokens // pool.page_size), "num_graph_rows": 512}
    batch = _batch([(num_tokens, 1)] * num_rows, pool)
    for split in (2048 // pool.page_size, None):
        size, pages = size_workspace(num_heads, pool.num_kv_heads, pool.head_dim, **shape, fixed_split_pages=split)
        backend = FlashInferBackend(pool, num_heads, cost=None, fixed_split_pages=pages, workspace_bytes=size)
        backend.plan(batch)
        backend.decode_graph(512, torch.zeros(1 << 23, dtype=torch.int32)).plan(batch)


def _queries(num_tokens: int, num_heads: int, pool: KVPool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.zeros(num_tokens, n, pool.head_dim, dtype=pool.dtype) for n in (num_heads, pool.num_kv_heads, pool.num_kv_heads))
    return q, k, v


def _batch(rows: list[tuple[int, int]], pool: KVPool) -> ForwardBatch:
    """(tokens, new ones) of each row, on random pages, all rows beginning with the same one."""
    rng, size = random.Random(0), pool.page_size
    table = PageTable(len(rows), -(-max(length for length, _ in rows) // size), size)
    scheduled = []
    for slot, (length, num_new) in enumerate(rows):
        table.write(slot, PageWrite(0, array("i", [1, *rng.choices(range(2, pool.num_pages + 1), k=-(-length // size) - 1)])))
        scheduled.append(ScheduledRow(slot, length - num_new, num_new, array("i") if num_new == 1 else array("i", [0] * num_new)))
    return build_forward_batch(ScheduledBatch(0, tuple(scheduled)), table, torch.zeros(len(rows), dtype=torch.int64), pool.device)


if __name__ == "__main__":
    sys.exit(main())
