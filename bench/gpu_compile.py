"""Compile the FlashInfer kernels that radixserve uses for GPUs that are not here, and say what each cost: make gpu-compile.

    python -m bench.gpu_compile [--arch 8.0 --arch 9.0a] [--head-dim 64 --head-dim 128] [--out bench/out/gpu-compile] [--jobs 2] [--fp8]

Needs flashinfer-python and the nvcc wheels, no GPU. FlashInfer's own build (ninja, nvcc) makes the libraries that a server would load: the
FA2 prefill module (paged, causal or not: extend rows, and decode rows on tensor cores), and the module that merges partial results.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixserve.processors import num_usable

OUT = Path(__file__).parent / "out" / "gpu-compile"
ARCHITECTURES = ("8.0", "9.0a")
HEAD_DIMS = (64, 128)


def cuda_home() -> Path:
    """Where the nvcc of the nvidia-cuda-nvcc wheel is, or CUDA_HOME."""
    if "CUDA_HOME" in os.environ:
        home = Path(os.environ["CUDA_HOME"])
        if not (home / "bin/nvcc").is_file():
            sys.exit(f"CUDA_HOME: expected a folder with bin/nvcc, got {home}")
        return home
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "cu13/bin/nvcc").is_file():
            return Path(folder) / "cu13"
    sys.exit("no nvcc: expected the nvidia-cuda-nvcc wheel (make gpu-compile installs it) or CUDA_HOME")


def link_folder(home: Path, out: Path) -> Path:
    """What the linker wants and the wheels lack: libcudart.so without a version, and a libcuda.so, which comes with a driver."""
    folder = out / "link"
    folder.mkdir(parents=True, exist_ok=True)
    runtime = next((path for name in ("lib", "lib64") for path in sorted((home / name).glob("libcudart.so*"))), None)
    if runtime is None:
        sys.exit(f"no libcudart.so in {home}/lib or lib64: expected the nvidia-cuda-runtime wheel, or a whole toolkit in CUDA_HOME")
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(runtime.resolve())
    options = ["-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(folder / "libcuda.so")]
    subprocess.run([os.environ.get("CC", "gcc"), *options], check=True)
    return folder


def attention_modules(head_dims: Sequence[int], stored_dtype: Any = None) -> list[Any]:
    """FlashInfer's JitSpecs of FA2 prefill, which decode rows on tensor cores take too: all that FlashInferBackend's wrappers load.
    stored_dtype: of K and V, where it is not that of q."""
    import torch
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module

    half = torch.bfloat16
    # q, kv and out in half, int32 indices; no rotary, window, soft cap or half-precision products
    types = half, stored_dtype or half, half
    return [_gen_batch_prefill_primary_module("fa2", *types, torch.int32, d, d, 0, False, False, False) for d in head_dims]


def build(head_dims: list[int], is_fp8: bool = False) -> None:
    """In a process whose environment names the architecture: one JSON line per module."""
    import torch
    from flashinfer.jit.cascade import gen_cascade_module

    for spec in [gen_cascade_module(), *attention_modules(head_dims, torch.float8_e4m3fn if is_fp8 else None)]:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        spec.build()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        line = {
            "arch": os.environ["FLASHINFER_CUDA_ARCH_LIST"],
            "module": spec.name,
            "files": len(spec.sources),
            "cpu_s": round(cpu_s),
            "wall_s": round(time.perf_counter() - start),
            "library_mib": round(spec.jit_library_path.stat().st_size / 2**20, 2),
            "peak_mib": round(after.ru_maxrss / 2**10),  # of the largest process so far
        }
        print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", action="append", help=f"compute capability, may be repeated (default: {', '.join(ARCHITECTURES)})")
    parser.add_argument("--head-dim", action="append", type=int, help=f"may be repeated (default: {', '.join(map(str, HEAD_DIMS))})")
    parser.add_argument("--out", type=Path, default=OUT, help="where FlashInfer's cache of libraries goes")
    parser.add_argument("--jobs", type=int, default=num_usable(), help="nvcc processes at once, half a GB each")
    parser.add_argument("--fp8", action="store_true", help="K and V stored in 8 bits (--kv-cache-dtype fp8_e4m3)")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    head_dims: list[int] = arguments.head_dim or list(HEAD_DIMS)
    if arguments.in_this_process:
        build(head_dims, arguments.fp8)
        return 0
    # libraries of an earlier call count as built: ninja compiles what is missing
    out, num_jobs = arguments.out.resolve(), arguments.jobs
    runs = [compile_for(arch, head_dims, out, num_jobs, arguments.fp8) for arch in arguments.arch or ARCHITECTURES]
    return 1 if any(runs) else 0


def compile_for(arch: str, head_dims: list[int], out: Path, num_jobs: int, is_fp8: bool = False) -> int:
    """Exit status of a process of its own: FlashInfer reads its environment when it is imported."""
    command = [sys.executable, "-m", "bench.gpu_compile", "--in-this-process", *(f"--head-dim={d}" for d in head_dims), *["--fp8"] * is_fp8]
    return subprocess.run(command, env=build_environment(arch, out, num_jobs)).returncode


def build_environment(arch: str, out: Path, num_jobs: int) -> dict[str, str]:
    """With it FlashInfer compiles for `arch` into `out`, and takes from there what is compiled."""
    home = cuda_home()
    return os.environ | {
        "CUDA_HOME": str(home),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(out),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{link_folder(home, out)}",
        "MAX_JOBS": str(num_jobs),
    }


if __name__ == "__main__":
    sys.exit(main())
