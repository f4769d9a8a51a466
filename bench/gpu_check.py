"""Are the FlashInfer and Triton paths right on this GPU, and how fast? bench/gpu_check.sh is the command; --cpu is its dry run.

Order: what is here, compile, right or wrong (kernels, then engines), timings from the most telling on. Results come as JSON lines, a table
ends it, and the exit code is 1 for a wrong result (a check that raises is one), 2 where nothing was checked, 0 for anything else, whatever
was slow, skipped or not measured.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu_compile import attention_modules
from bench.gpu_correctness import TRITON, check_backend, check_engine, check_graph, check_triton
from bench.gpu_report import Report
from bench.gpu_shapes import LARGE, SMALL, Shape, shrunk
from bench.gpu_timing import Limits, measure_limits, time_attention, time_engine, time_triton
from radixserve.attention.flashinfer_package import FP8_HEAD_DIMS, load_flashinfer
from radixserve.kv.pool import FP8
from radixserve.models.config import parse_model_config
from radixserve.models.layers import RotaryTable
from radixserve.models.ops import TORCH_OPS, choose_ops
from radixserve.runner.decode_graphs import Capture

HEADS = ((9, 3, 64), (32, 8, 128))
ODD_HEADS = (28, 4, 128)  # Qwen2.5-7B: seven queries a key
PAGE_SIZES = (1, 16)


def check_environment(report: Report, device: torch.device) -> None:
    flashinfer = load_flashinfer()
    figures: dict[str, Any] = {"torch": torch.__version__, "flashinfer": flashinfer.__version__, "python": sys.version.split()[0]}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        figures |= {"gpu": torch.cuda.get_device_name(device), "free_GiB": free / 2**30, "total_GiB": total / 2**30}
    report.say("environment", **figures)


def compile_kernels(report: Report) -> None:
    """All attention modules in one ninja run; without it each is compiled when first planned, one after the other."""
    from flashinfer.jit.core import build_jit_specs

    start = time.monotonic()
    head_dims = sorted({head_dim for _, _, head_dim in HEADS})
    specs = attention_modules(head_dims) + attention_modules([d for d in head_dims if d in FP8_HEAD_DIMS], FP8)
    build_jit_specs(specs, verbose=False)
    report.say("compile", modules=len(specs), seconds=time.monotonic() - start)


def check_layer_ops(report: Report, shape: Shape, device: torch.device) -> None:
    """choose_ops checks each against torch's and keeps torch's where it differs; which those are is said here."""
    import json

    config = parse_model_config(json.loads(shape.config_json()), {})
    table = RotaryTable(config, torch.bfloat16, device)
    ops = choose_ops(config, table, torch.bfloat16, device)
    report.say("layer ops", on_torch=[name for name in type(ops).__slots__ if getattr(ops, name) is getattr(TORCH_OPS, name)])


def checks(device: torch.device, small: Shape, large: Shape, capture: Capture | None) -> list[tuple[str, Callable[[Report], None], bool]]:
    """(name, check, whether an exception in it is a wrong result), most important first."""
    made: list[tuple[str, Callable[[Report], None], bool]] = []
    for heads in (*HEADS, ODD_HEADS):
        for page_size in PAGE_SIZES:
            made.append((f"attention {heads} {page_size}", partial(_backend, heads, page_size, device, capture), True))
    made.append(("layer ops", partial(check_layer_ops, shape=small, device=device), True))
    made.append((f"engine {small.name}", partial(check_engine, shape=small, device=device), True))
    made.append((f"engine {large.name}", partial(check_engine, shape=large, device=device), True))
    for heads in (heads for heads in HEADS if heads[2] in FP8_HEAD_DIMS):
        for page_size in PAGE_SIZES:
            check = partial(check_backend, heads=heads, page_size=page_size, device=device, stored_dtype=FP8)
            made.append((f"attention {heads} {page_size}, fp8", check, True))
    for heads, page_size in zip(HEADS, PAGE_SIZES, strict=True):
        made.append((f"triton {heads} {page_size}", partial(check_triton, heads=heads, page_size=page_size, device=device), True))
    made.append((f"engine {small.name}, triton", partial(check_engine, shape=small, device=device, dresses=TRITON), True))
    return made


def _backend(heads: tuple[int, int, int], page_size: int, device: torch.device, capture: Capture | None, report: Report) -> None:
    check_backend(report, heads, page_size, device)
    check_graph(report, heads, page_size, device, capture)


def timings(
    device: torch.device, small: Shape, large: Shape, limits: Limits, capture: Capture | None
) -> list[tuple[str, Callable[[Report], None]]]:
    made: list[tuple[str, Callable[[Report], None]]] = []
    for shape in (large, small):
        made.append((f"time {shape.name}", partial(time_engine, shape=shape, device=device, limits=limits)))
    for heads in reversed(HEADS):
        for page_size in PAGE_SIZES:
            made.append((f"time {heads} {page_size}", partial(_attention_times, heads, page_size, device, limits, capture)))
    for heads in reversed(HEADS):
        made.append((f"time triton {heads}", partial(time_triton, heads=heads, page_size=16, device=device, limits=limits)))
    return made


def _attention_times(
    heads: tuple[int, int, int], page_size: int, device: torch.device, limits: Limits, capture: Capture | None, report: Report
) -> None:
    time_attention(report, heads, page_size, device, limits, capture)


def stand_in_for_a_gpu() -> Capture:
    """FlashInfer's wrappers over tests/support's checking reference, for the whole process; recorded graphs; Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which nobody has done yet
    assert "triton" not in sys.modules, "Triton was imported before it was told to interpret"
    import pytest

    from radixserve.attention import registry
    from radixserve.engine import build
    from tests.support.flashinfer_reference import Reference
    from tests.support.recorded_graph import GraphRecorder

    reference, recorder, patch = Reference(), GraphRecorder(), pytest.MonkeyPatch()
    reference.on_kernel = recorder.kernel
    patch.setattr(registry, "why_not_flashinfer", lambda pool: None)
    patch.setattr(build, "graph_capture", lambda device: recorder)
    patch.setattr(build, "refuse_gpu_flags", lambda config, device: None)
    try:
        reference.install(patch)
    except Exception:  # the checks that need FlashInfer will each say so; Triton's do not
        traceback.print_exc()
    return recorder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="dry run: small shapes on the CPU, FlashInfer's kernels replaced by a reference, Triton's interpreted",
    )
    parser.add_argument("--budget-s", type=float, default=420.0, help="begin no check after so many seconds (default: 420)")
    parser.add_argument("--only", choices=("right", "time"), help="one half of it")
    args = parser.parse_args()
    if not args.budget_s > 0:  # NaN too
        parser.error(f"--budget-s: expected more than 0 seconds, got {args.budget_s:g}")
    if not args.cpu and not torch.cuda.is_available():
        parser.exit(2, "bench.gpu_check: found no CUDA device; --cpu is the dry run\n")
    device = torch.device("cpu" if args.cpu else "cuda")
    capture = stand_in_for_a_gpu() if args.cpu else None
    small, large = (shrunk(SMALL), shrunk(LARGE)) if args.cpu else (SMALL, LARGE)
    report = Report(args.budget_s)
    with torch.inference_mode():
        report.attempt("environment", partial(check_environment, device=device), decides=True)
        if not args.cpu:
            report.attempt("compile", compile_kernels, decides=False)
        if args.only != "time":
            for name, check, decides in checks(device, small, large, capture):
                report.attempt(name, check, decides=decides)
        if args.only != "right":
            limits: list[Limits] = []
            report.attempt("limits", lambda one: limits.append(measure_limits(one, device)), decides=False)
            for name, timing in timings(device, small, large, limits[0], capture) if limits else ():
                report.attempt(name, timing, decides=False)
    print(report.table(), flush=True)
    if report.num_wrong:
        return 1
    return 2 if args.only != "time" and not report.num_right else 0


if __name__ == "__main__":
    sys.exit(main())
