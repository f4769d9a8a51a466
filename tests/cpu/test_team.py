"""native/csrc/team.h alone: every piece once, phases in order, whatever the number of threads, with the compiler's race detector too."""

import shutil
import subprocess
from pathlib import Path

import pytest

from radixserve.native.build import SOURCE_DIR

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
