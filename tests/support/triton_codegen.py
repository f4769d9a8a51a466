"""Compile the Triton kernels for GPUs that are not here, and tell what the machine code is made of. Run with TRITON_INTERPRET unset or 0.

python -m tests.support.triton_codegen [SHAPE ...]     one JSON line per kernel and architecture; all shapes without arguments
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixserve.attention import triton_kernels
from radixserve.attention.triton_variants import Tile, Variant

ARCHITECTURES = (80, 90)
ELEMENT = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
PARTIAL = {"partial_out": "*fp32", "partial_lse": "*fp32"}
ATTEND_STRIDES = ("q_token_stride", "q_head_stride")
WRITE_STRIDES = ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")

# (name, variant); SmolLM2-135M, Llama-3.1-8B, Qwen3-0.6B, Gemma-like, and head_dims that are no power of 2
SHAPES = {
    "d64": Variant(3, 3, 64, 16, torch.bfloat16),
    "d80-fp16": Variant(32, 1, 80, 16, torch.float16),
    "d96": Variant(32, 1, 96, 16, torch.bfloat16),
    "d128": Variant(8, 4, 128, 16, torch.bfloat16),
    "d128-page1": Variant(4, 7, 128, 1, torch.bfloat16),
    "d256": Variant(4, 2, 256, 16, torch.bfloat16),
    "d64-fp32": Variant(3, 3, 64, 16, torch.float32),
    "d128-fp32": Variant(8, 4, 128, 16, torch.float32),
    "d256-fp32": Variant(4, 2, 256, 16, torch.float32),
}


@dataclass(frozen=True, slots=True)
class Code:
    shape: str
    kernel: str
    arch: int
    matrix_instructions: list[str]  # kinds in the PTX
    async_copies: int  # cp.async in the PTX
    registers: int
    spilled_bytes: int
    shared_bytes: int


def kernels_of(variant: Variant) -> Iterator[tuple[str, Any, dict[str, str], dict[str, int], dict[str, int]]]:
    """(name, kernel, types of the arguments, constants, launch options), as TritonBackend launches them."""
    element = ELEMENT[variant.dtype]
    pool = {"k_pool": element, "v_pool": element}
    attend = {"q": element, **pool, "out": element, **PARTIAL, "items": "*i32", "kv_indices": "*i32", "scale_log2": "fp32"}
    attend |= dict.fromkeys(ATTEND_STRIDES, "i32")

    def options(tile: Tile) -> dict[str, int]:
        return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}

    for name, tile in (("narrow", variant.narrow), ("wide", variant.wide)):
        yield name, triton_kernels.attend_kernel, attend, variant.attend_constants(tile), options(tile)
    merge = {"out": element, **PARTIAL, "merges": "*i32"}
    yield "merge", triton_kernels.merge_kernel, merge, variant.merge_constants, {}
    write = {"k": element, "v": element, **pool, "out_slots": "*i64", **dict.fromkeys(WRITE_STRIDES, "i32")}
    yield "write", triton_kernels.write_kernel, write, variant.write_constants, {}


def compile_kernel(kernel: Any, types: dict[str, str], constants: dict[str, int], options: dict[str, int], arch: int) -> Any:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # what the launcher finds at run time: tensors from torch's allocator, and strides, are multiples of 16
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name.endswith("_stride")]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def inspect(shape: str, name: str, compiled: Any, arch: int) -> Code:
    ptx = compiled.asm["ptx"]
    usage = resource_usage(compiled.asm["cubin"])
    return Code(
        shape,
        name,
        arch,
        sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S*", ptx))),
        len(re.findall(r"cp\.async\.c[ag]", ptx)),
        usage["REG"],
        usage["LOCAL"] + usage["STACK"],
        compiled.metadata.shared,
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, ... of a cubin's only function, by the cuobjdump that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main(shapes: list[str]) -> None:
    for shape in shapes or SHAPES:
        for name, kernel, types, constants, options in kernels_of(SHAPES[shape]):
            for arch in ARCHITECTURES:
                compiled = compile_kernel(kernel, types, constants, options, arch)
                print(json.dumps(asdict(inspect(shape, name, compiled, arch))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
