"""Compiles the FlashInfer modules of the backend, with nvcc and without a GPU: python -m bench.gpu_compile [--arch 8.0 9.0a] [--plan]

--plan loads what was compiled and has the real C++ planner plan real steps on the CPU, over stand-ins for the CUDA calls that it makes;
kernels are launched into nothing, and what would be launched is printed. So the tables, dtypes and workspaces that the backend hands over
are proved to be taken; the numbers are not (tests/support/flashinfer_reference.py is for those). Minutes of one core for each head_dim and
architecture.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(__file__).parent / "out" / "gpu_compile"
SHIM = Path(__file__).parent / "cuda_shim.c"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_compile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["9.0a"], help="compute capabilities (default: 9.0a)")
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64], help="dimensions of a head (default: 64)")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time (default: 2)")
    parser.add_argument("--plan", action="store_true", help="afterwards plan on the CPU with the last of --arch")
    parser.add_argument("--inner", choices=("compile", "plan"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner == "compile":
        return _compile(args.head_dim)
    if args.inner == "plan":
        from bench.gpu_plan import plan_steps

        return plan_steps(args.head_dim)
    words = [sys.executable, "-m", "bench.gpu_compile", "--head-dim", *map(str, args.head_dim)]
    OUT.mkdir(parents=True, exist_ok=True)
    # the driver's library is not linked against in the end, but the linker wants to see one
    _link("-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", str(OUT / "libcuda.so"))
    for arch in args.arch:
        status = subprocess.run([*words, "--inner", "compile"], env=_environment(arch, args.jobs), check=False).returncode
        if status:
            return status
    if args.plan:
        shim = OUT / "cuda_shim.so"
        _link("-O1", str(SHIM), "-o", str(shim))
        environment = _environment(args.arch[-1], args.jobs) | {"LD_PRELOAD": str(shim)}
        return subprocess.run([*words, "--inner", "plan"], env=environment, check=False).returncode
    return 0


def _link(*words: str) -> None:
    subprocess.run(["gcc", "-shared", "-fPIC", *words], check=True)


def _environment(arch: str, jobs: int) -> dict[str, str]:
    """What flashinfer reads when it is imported."""
    return os.environ | {
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(OUT / arch),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{OUT}",
        "MAX_JOBS": str(jobs),
    }


def _compile(head_dims: list[int]) -> int:
    import torch
    from flashinfer.jit import gen_cascade_module
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module

    half = torch.bfloat16
    for head_dim in head_dims:
        start = time.monotonic()
        spec = _gen_batch_prefill_primary_module("fa2", half, half, half, torch.int32, head_dim, head_dim, 0, False, False, False)
        spec.build(verbose=False)
        print(f"compiled for {os.environ['FLASHINFER_CUDA_ARCH_LIST']}: {spec.name} in {time.monotonic() - start:.0f} s", flush=True)
    start = time.monotonic()
    spec = gen_cascade_module()
    spec.build(verbose=False)
    print(f"compiled for {os.environ['FLASHINFER_CUDA_ARCH_LIST']}: {spec.name} in {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
