"""The how-fast half of bench.gpu_check: attention and steps beside what their bytes and products cost at this GPU's measured limits."""

import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu_correctness import ALWAYS, answers_of, make_case, make_prompts
from bench.gpu_report import Report
from bench.gpu_shapes import Shape, engine_of
from radixserve.attention.flashinfer_backend import FlashInferBackend
from radixserve.attention.triton_backend import TritonBackend
from radixserve.core import Request, SamplingParams
from radixserve.engine.engine import Engine
from radixserve.runner.decode_graphs import Capture, CudaCapture


@dataclass(frozen=True, slots=True)
class Limits:
    bytes_per_s: float  # of a copy, read and written
    flops: float  # of a large bf16 product


def seconds_of(function: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median of several, by the device's own clock where it has one."""
    function()
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            function()
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            function()
            times.append(time.perf_counter() - before)
    return statistics.median(times)


def measure_limits(report: Report, device: torch.device) -> Limits:
    size, n = (1 << 22, 256) if device.type == "cpu" else (1 << 32, 8192)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    copy_s = seconds_of(lambda: target.copy_(source), device)
    one, other = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    product_s = seconds_of(lambda: one @ other, device)
    limits = Limits(2 * size / copy_s, 2 * n**3 / product_s)
    report.say("limits", GBs=limits.bytes_per_s / 1e9, TFs=limits.flops / 1e12)
    return limits


def time_attention(
    report: Report, heads: tuple[int, int, int], page_size: int, device: torch.device, limits: Limits, capture: Capture | None
) -> None:
    """Decode of one layer by graph replay against its bytes; prefill against its products; shared beginnings against none."""
    is_small = device.type == "cpu"
    num_heads, num_kv_heads, head_dim = heads
    for rows, length in [(2, 64)] if is_small else [(8, 1024), (64, 1024), (64, 4096)]:
        case = make_case([(length, 1)] * rows, 0, page_size, heads, device, seed=2)
        backend = FlashInferBackend(case.pool, num_heads, cost=None)
        graph = backend.decode_graph(rows, torch.zeros(rows * (length + 1), dtype=torch.int32, device=device))
        plan_s = _host_seconds(partial(graph.plan, case.batch), device)
        replay = (capture or CudaCapture(device))(partial(graph.run, 0, case.q, case.k, case.v)).replay
        run_s, num_bytes = seconds_of(replay, device), rows * length * num_kv_heads * head_dim * 4
        report.say(
            "time/decode attention", heads=heads, page_size=page_size, rows=rows, length=length, us=run_s * 1e6, plan_us=plan_s * 1e6,
            of_bandwidth=num_bytes / run_s / limits.bytes_per_s,
        )  # fmt: skip
    for rows, new, length in [(1, 64, 64)] if is_small else [(1, 4096, 4096), (8, 64, 1088)]:
        case = make_case([(length, new)] * rows, 0, page_size, heads, device, seed=2)
        backend = FlashInferBackend(case.pool, num_heads, cost=None)
        backend.plan(case.batch)
        run_s = seconds_of(partial(backend.run, 0, case.q, case.k, case.v), device)
        report.say(
            "time/extend attention", heads=heads, page_size=page_size, rows=rows, new=new, length=length, us=run_s * 1e6,
            of_matrix_rate=_flops(heads, rows, new, length) / run_s / limits.flops,
        )  # fmt: skip
    for rows, shared, own in [(3, 48, 16)] if is_small else [(8, 2048, 256), (32, 2048, 256), (32, 8192, 256), (64, 8192, 256)]:
        case = make_case([(shared + own, 1)] * rows, shared // page_size, page_size, heads, device, seed=2)
        times = []
        for cost in (None, ALWAYS):
            backend = FlashInferBackend(case.pool, num_heads, cost=cost)
            backend.plan(case.batch)
            times.append(seconds_of(partial(backend.run, 0, case.q, case.k, case.v), device))
        flat_s, shared_s = times
        report.say(
            "time/shared against flat", heads=heads, page_size=page_size, rows=rows, shared=shared, flat_us=flat_s * 1e6,
            shared_us=shared_s * 1e6, times_faster=flat_s / shared_s,
        )  # fmt: skip


def time_triton(report: Report, heads: tuple[int, int, int], page_size: int, device: torch.device, limits: Limits) -> None:
    """One layer by TritonBackend, launches included: decode against its bytes, prefill against its products."""
    num_heads, num_kv_heads, head_dim = heads
    steps = [(2, 1, 64), (1, 32, 64)] if device.type == "cpu" else [(64, 1, 1024), (64, 1, 4096), (1, 4096, 4096), (8, 64, 1088)]
    for rows, new, length in steps:
        case = make_case([(length, new)] * rows, 0, page_size, heads, device, seed=2)
        backend = TritonBackend(case.pool, num_heads)
        backend.plan(case.batch)
        run_s = seconds_of(partial(backend.run, 0, case.q, case.k, case.v), device)
        num_bytes = rows * length * num_kv_heads * head_dim * 4
        report.say(
            "time/triton attention", heads=heads, page_size=page_size, rows=rows, new=new, length=length, us=run_s * 1e6,
            of_bandwidth=num_bytes / run_s / limits.bytes_per_s, of_matrix_rate=_flops(heads, rows, new, length) / run_s / limits.flops,
        )  # fmt: skip


def _flops(heads: tuple[int, int, int], rows: int, new: int, length: int) -> float:
    """Of causal attention of one layer: `new` queries a row, the last of `length` tokens."""
    num_heads, _, head_dim = heads
    return 4 * head_dim * num_heads * rows * (new * (length - new) + new * (new + 1) / 2)


def _host_seconds(function: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(10):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_engine(report: Report, shape: Shape, device: torch.device, limits: Limits) -> None:
    """Decode steps as graphs, planned ahead and not, and eager, prefill, and a load with a shared beginning with the tree on and off."""
    is_small = device.type == "cpu"
    rows, length, chunk = (4, 48, 64) if is_small else (64, 1024, 8192)
    common: dict[str, Any] = {"max_running_requests": rows, "chunked_prefill_size": chunk, "attention_backend": "flashinfer"}
    common |= {"max_total_tokens": rows * (length + 64) * 2, "context_length": 2048 if is_small else 8192, "page_size": 16}
    for name, options in (
        ("graphs", {"overlap_schedule": "on"}),
        ("graphs, one by one", {"overlap_schedule": "off"}),
        ("eager", {"disable_cuda_graph": True}),
    ):
        with engine_of(shape, device, **(common | options)) as engine:
            _time_decode(report, name, engine, shape, rows, length, limits)
            if name == "graphs":
                _time_prefill(report, engine, shape, chunk, limits)
    prompts = make_prompts(shape, rows, length, 32)
    for name, options in (("on", {}), ("off", {"disable_radix_cache": True})):
        with engine_of(shape, device, **(common | options)) as engine:
            answers_of(engine, prompts[:1], 4)  # warms up, and with the tree computes the beginning once
            start = time.perf_counter()
            answers_of(engine, prompts, 16)
            seconds = time.perf_counter() - start
            cached = engine.stats().cached_tokens_total
        report.say(f"time/shared beginning, tree {name}", model=shape.name, requests=rows, seconds=seconds, cached_tokens=cached)


def _time_decode(report: Report, name: str, engine: Engine, shape: Shape, rows: int, length: int, limits: Limits) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True).validate()
    for i, prompt in enumerate(make_prompts(shape, rows, 0, length)):
        engine.add(Request(f"d{i}", array("i", (prompt * length)[:length]), params, 0))
    steps, walls = [], []
    while engine.has_work:
        before, start = engine.stats(), time.perf_counter()
        engine.step()
        wall, after = time.perf_counter() - start, engine.stats()
        if after.decode_steps_total > before.decode_steps_total and before.num_running == rows:
            walls.append(wall)
            steps.append(after.step_seconds.forward - before.step_seconds.forward)
    wall_s, forward_s = statistics.median(walls), statistics.median(steps)
    ideal_s = (2 * shape.matrix_weights + rows * length * shape.kv_bytes) / limits.bytes_per_s
    report.say(
        f"time/decode step, {name}", model=shape.name, rows=rows, length=length, step_ms=wall_s * 1e3, forward_ms=forward_s * 1e3,
        bytes_ms=ideal_s * 1e3, forward_over_bytes=forward_s / ideal_s, goal=1.25, tokens_per_s=rows / wall_s,
    )  # fmt: skip


def _time_prefill(report: Report, engine: Engine, shape: Shape, chunk: int, limits: Limits) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0).validate()
    length = min(chunk, 4096)
    seconds = []
    for i in range(3):
        (prompt,) = make_prompts(shape, 1, length - 1, 1, seed=100 + i)
        engine.add(Request(f"p{i}", array("i", prompt), params, 0))
        before = engine.stats().step_seconds.forward
        while engine.has_work:
            engine.step()
        seconds.append(engine.stats().step_seconds.forward - before)
    forward_s = statistics.median(seconds)
    attention = 4 * shape.head_dim * shape.num_heads * shape.num_layers * length * (length + 1) / 2
    # the head computes one position
    flops = 2 * (shape.matrix_weights - shape.hidden * shape.vocab) * length + attention
    report.say(
        "time/prefill", model=shape.name, tokens=length, ms=forward_s * 1e3, tokens_per_s=length / forward_s,
        of_matrix_rate=flops / forward_s / limits.flops, goal=0.6,
    )  # fmt: skip
