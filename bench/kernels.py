"""Attention kernels alone: milliseconds of one layer beside what its bytes and its arithmetic cost at this machine's measured limits.

python -m bench.kernels [--repeats 7] [--only decode] [--cpu-time]: the C++ kernel, the same without shared reads, and plain torch, in turn.
The arithmetic limit is what multiply-adds take whose operands are in registers (native/csrc/peak.cpp); F.linear's rate stands beside it.
--cpu-time counts the processor time of one thread, for machines that are busy with other work.
Every repeat goes through many layers' K and V, so that they come from memory, as they do in a real step.
"""

import argparse
import ctypes
import statistics
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.hardware import describe_hardware
from radixserve.attention import AttentionBackend, ForwardBatch
from radixserve.attention.cpu_backend import CpuBackend
from radixserve.attention.torch_backend import TorchBackend
from radixserve.core import PageWrite, ScheduledBatch, ScheduledRow
from radixserve.kv import KVPool, PageTable
from radixserve.native import check, load_library
from radixserve.runner.batch_builder import build_forward_batch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE = 9, 3, 64, torch.bfloat16  # SmolLM2-135M
Clock = Callable[[], float]
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
WANTED_BYTES = 192 << 20  # of K and V over all layers, several times the last cache
MAX_LAYERS = 64
PEAK_ROUNDS = 2_000_000


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    num_rows: int
    num_new: int  # queries of each row
    num_before: int  # tokens of each row that are there already
    num_shared: int = 0  # leading tokens whose pages all rows share

    @property
    def num_bytes(self) -> float:
        """K and V read, a shared prefix once."""
        own = self.num_before - self.num_shared + self.num_new
        return TOKEN_BYTES * (self.num_shared + self.num_rows * own)

    @property
    def flops(self) -> float:
        """Both products over the keys that each query sees."""
        seen = self.num_new * self.num_before + self.num_new * (self.num_new + 1) / 2
        return 4.0 * HEAD_DIM * NUM_HEADS * self.num_rows * seen


LOADS = (
    *(Load(f"decode {b} x {n}", b, 1, n - 1) for b in (1, 8, 16) for n in (512, 1024, 2048, 8192)),
    *(Load(f"decode {b} x {n}, {s} shared", b, 1, n - 1, s) for b, n, s in ((8, 1088, 1024), (16, 1088, 1024), (16, 7168, 7000))),
    Load("decode 2 x 512, 256 shared", 2, 1, 511, 256),
    Load("extend 128 on 1024", 1, 128, 1024),
    Load("extend 128 on 2048", 1, 128, 2048),
    Load("extend 8 x 64 on 1024, shared", 8, 64, 1024, 1024),
    Load("extend 512 on 0", 1, 512, 0),
    Load("extend 512 on 2048", 1, 512, 2048),
    Load("extend 1024 on 0", 1, 1024, 0),
)


def make_step(load: Load) -> tuple[KVPool, ForwardBatch]:
    """A pool of random numbers and the step over it; pages of one token, each row's in ascending order as the pool hands them out."""
    row_len = load.num_before + load.num_new
    num_pages = load.num_shared + load.num_rows * (row_len - load.num_shared)
    num_layers = max(1, min(MAX_LAYERS, WANTED_BYTES // (num_pages * TOKEN_BYTES)))
    pool = KVPool(num_layers, num_pages, 1, NUM_KV_HEADS, HEAD_DIM, DTYPE)
    for layer in range(num_layers):
        pool.k(layer).normal_()
        pool.v(layer).normal_()
    table = PageTable(load.num_rows, row_len, 1)
    rows, next_page = [], load.num_shared + 1
    for slot in range(load.num_rows):
        own = range(next_page, next_page + row_len - load.num_shared)
        next_page = own.stop
        table.write(slot, PageWrite(0, array("i", [*range(1, load.num_shared + 1), *own])))
        token_ids = array("i", [0] * load.num_new) if load.num_new > 1 else array("i")
        rows.append(ScheduledRow(slot, load.num_before, load.num_new, token_ids))
    last_ids = torch.zeros(load.num_rows, dtype=torch.int64)
    return pool, build_forward_batch(ScheduledBatch(0, tuple(rows)), table, last_ids, pool.device)


def seconds_per_layer(
    backend: AttentionBackend, batch: ForwardBatch, num_layers: int, q: torch.Tensor, k: torch.Tensor, clock: Clock
) -> float:
    """The plan is part of it, as it is of a step, spread over the layers."""
    started = clock()
    backend.plan(batch)
    for layer in range(num_layers):
        backend.run(layer, q, k, k)
    return (clock() - started) / num_layers


def read_rate(clock: Clock) -> float:
    """Bytes a second of a sum over more memory than any cache holds."""
    numbers = torch.ones(64 << 20)
    return numbers.nbytes / best_of(numbers.sum, clock)


def product_rate(clock: Clock, num_threads: int) -> float:
    """Multiply-adds a second, two each, in DTYPE and all threads together, with nothing to wait for."""
    library, flops = load_library(), ctypes.c_double()

    def multiply(_: int = 0) -> None:
        check(library, library.radixserve_peak(PEAK_ROUNDS, ctypes.byref(flops)), "the products of a limit")

    if num_threads == 1:
        seconds = best_of(multiply, clock)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            seconds = best_of(lambda: list(pool.map(multiply, range(num_threads))), clock)
    return num_threads * flops.value / seconds


def linear_rate(clock: Clock) -> float:
    """The same of a large F.linear: what another library reaches."""
    a, b = torch.randn(2048, 2048).to(DTYPE), torch.randn(2048, 2048).to(DTYPE)
    return 2 * 2048.0**3 / best_of(lambda: F.linear(a, b), clock)


def best_of(call: Callable[[], object], clock: Clock, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        started = clock()
        call()
        times.append(clock() - started)
    return min(times)


def measure(load: Load, repeats: int, clock: Clock) -> str:
    pool, batch = make_step(load)
    q, k = torch.randn(batch.num_tokens, NUM_HEADS, HEAD_DIM).to(DTYPE), torch.randn(batch.num_tokens, NUM_KV_HEADS, HEAD_DIM).to(DTYPE)
    backends: list[AttentionBackend] = [CpuBackend(pool, NUM_HEADS), TorchBackend(pool, NUM_HEADS)]
    if load.num_shared:
        backends.append(CpuBackend(pool, NUM_HEADS, reads_shared_once=False))
    times: list[list[float]] = [[] for _ in backends]
    limits = []
    for repeat in range(repeats + 1):
        limits.append((load.num_bytes / read_rate(clock), load.flops / product_rate(clock, torch.get_num_threads())))
        for place, backend in enumerate(backends):
            # plain torch is slow: a few layers will do
            num_layers = pool.num_layers if backend.name == "cpu" else min(pool.num_layers, 8)
            seconds = seconds_per_layer(backend, batch, num_layers, q, k, clock)
            if repeat:
                times[place].append(seconds)
    floor = statistics.median(max(pair) for pair in limits)
    ours, theirs, *flat = (statistics.median(of_one) for of_one in times)
    by_bytes, by_flops = (statistics.median(values) * 1e3 for values in zip(*limits, strict=True))
    against_flat = statistics.median(a / b for a, b in zip(times[0], times[2], strict=True)) if flat else None
    line = f"| {load.name} | {by_bytes:.3f} | {by_flops:.3f} | {ours * 1e3:.3f} | {ours / floor:.2f} "
    line += f"| {theirs * 1e3:.3f} | {theirs / ours:.1f} |"
    return line + (f" {flat[0] * 1e3:.3f}, {against_flat:.2f} |" if flat else " |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="loads whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and its processor time instead of the clock's")
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
    clock = time.thread_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    print(describe_hardware())
    products, linear = product_rate(clock, options.threads) / 1e9, linear_rate(clock) / 1e9
    rates = f"{read_rate(clock) / 1e9:.1f} GB/s, {products:.0f} GFLOP/s in {DTYPE} (F.linear: {linear:.0f})"
    print(f"{options.threads} threads, {rates}; {'processor' if options.cpu_time else 'wall'} ms of one layer")
    print("| load | bytes | arithmetic | kernel | over the larger | torch | torch / kernel | not shared, shared / not |")
    print("|---|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for load in LOADS:
            if options.only in load.name:
                print(measure(load, options.repeats, clock), flush=True)


if __name__ == "__main__":
    main()
