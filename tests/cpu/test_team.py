"""native/csrc/team.h alone: every piece once, phases in order, whatever the number of threads, with the compiler's race detector too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixserve.models.packed_decoder import can_compute
from radixserve.native.build import SOURCE_DIR

FORK = """
import os, signal, sys, torch
from tests.support.tiny_decoder import tiny_decoder
torch.set_num_threads(2)
dropped, kept = tiny_decoder(), tiny_decoder()
rows = torch.ones(64, 32)
expected = [one.compute_logits(rows) for one in (dropped, kept)][0]
child = os.fork()
if child == 0:
    signal.alarm(60)
    del dropped
    assert torch.equal(kept.compute_logits(rows), expected)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(dropped.compute_logits(rows), expected)
"""
DRIVER = Path(__file__).parents[1] / "support" / "team_stress.cpp"


@pytest.fixture(scope="module", params=["-O2", "-fsanitize=thread"])
def stress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("team") / "stress"
    command = [compiler, "-std=c++17", "-g", "-O1", request.param, "-pthread", f"-I{SOURCE_DIR}", str(DRIVER), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if made.returncode and "tsan" in made.stderr:
        pytest.skip("the compiler has no race detector")
    assert made.returncode == 0, made.stderr
    return program


# 4 and 9 threads are more than this project's machines have cores: a thread is then taken off in the middle of whatever it does
@pytest.mark.parametrize("num_threads", [1, 2, 4, 9])
def test_every_piece_runs_once_and_sees_the_phase_before(stress: Path, num_threads: int) -> None:
    ran = subprocess.run([stress, str(num_threads), "100", "60", str(num_threads)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_a_fork_of_a_process_that_computed_computes_and_ends() -> None:
    if not can_compute(torch.float32):
        pytest.skip("no native products here")
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", FORK], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
