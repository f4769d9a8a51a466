"""The Triton kernels become machine code for GPUs that are not here: matrix instructions where they belong, nothing spilled, memory enough.

In a process of its own, since this one interprets them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
ROOT = Path(__file__).resolve().parent.parent.parent
# the rest of tests/support/triton_codegen.py's shapes take as long again, and are for who changes a tile
SHAPES = ("d64", "d80-fp16", "d128-page1", "d256", "d64-fp32")
# bytes that a block may have: the smallest of the family (8.6 and 8.9, which run code for 8.0), and 9.0
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10}


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.support.triton_codegen", *SHAPES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_kernels_compile_for_both(codes: list[dict[str, Any]]) -> None:
    expected = {(shape, kernel, arch) for shape in SHAPES for kernel in ("narrow", "wide", "merge", "write") for arch in (80, 90)}
    assert {(code["shape"], code["kernel"], code["arch"]) for code in codes} == expected


def test_nothing_is_spilled_and_shared_memory_suffices(codes: list[dict[str, Any]]) -> None:
    for code in codes:
        assert code["spilled_bytes"] == 0, code
        assert code["shared_bytes"] <= SHARED_BYTES[code["arch"]], code


def test_halves_are_multiplied_by_matrix_instructions(codes: list[dict[str, Any]]) -> None:
    seen = 0
    for code in codes:
        instructions = code["matrix_instructions"]
        if code["kernel"] in ("merge", "write") or "fp32" in code["shape"]:
            assert not instructions, code  # float32 is float32: no TF32
            continue
        kind = "f32.f16.f16" if "fp16" in code["shape"] else "f32.bf16.bf16"
        # wgmma takes 64 rows: the tiles of decode rows have fewer
        family = "wgmma.mma_async" if code["arch"] == 90 and code["kernel"] == "wide" else "mma.sync"
        assert instructions and all(one.startswith(family) and kind in one for one in instructions), code
        assert code["async_copies"], code  # keys are on their way while others are worked on
        seen += 1
    assert seen == 16
