"""bench.gpu_check's own manners: it goes on after a failure, tells right from wrong, and its checks can fail."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (make install does it)")

import bench.gpu_check
from bench.gpu_correctness import check_backend, check_engine, check_graph, check_triton
from bench.gpu_report import Report
from bench.gpu_shapes import SMALL, shrunk
from radixserve.attention import registry
from radixserve.attention.flashinfer_backend import FlashInferBackend
from radixserve.attention.triton_backend import TritonBackend
from radixserve.engine import build
from radixserve.kv.pool import FP8
from tests.support.flashinfer_reference import Reference
from tests.support.recorded_graph import GraphRecorder

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphRecorder]:
    reference, made = Reference(), GraphRecorder()
    reference.install(monkeypatch)
    reference.on_kernel = made.kernel
    monkeypatch.setattr(registry, "why_not_flashinfer", lambda pool: None)
    monkeypatch.setattr(build, "graph_capture", lambda device: made)
    monkeypatch.setattr(build, "refuse_gpu_flags", lambda config, device: None)
    with torch.inference_mode():
        yield made


BARE = """
import sys

blocked = {"pytest", *WORDS}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not on such a machine")

sys.meta_path.insert(0, Blocker())
import torch
import bench.gpu_check
from bench.gpu_correctness import answers_of, make_prompts
from bench.gpu_shapes import SMALL, engine_of, shrunk

shape = shrunk(SMALL)
options = {"attention_backend": "torch", "max_total_tokens": 512, "context_length": 256, "chunked_prefill_size": 64}
with torch.inference_mode(), engine_of(shape, torch.device("cpu"), **options) as engine:
    assert len(answers_of(engine, make_prompts(shape, 1, 8, 4), 2)[0].token_ids) == 2
"""


def test_it_runs_where_there_is_torch_and_little_else() -> None:
    """A machine with a GPU may have no package index: bench/gpu_wheels.sh brings what FlashInfer imports, and nothing of the server's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in project["dependencies"]}  # type: ignore[index]
    blocked = sorted(names - {"torch", "numpy"} | {"zmq", "prometheus_client"})
    assert "msgspec" in blocked and "transformers" in blocked
    done = subprocess.run([sys.executable, "-c", BARE.replace("WORDS", repr(blocked))], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_budget_of_nothing_and_a_check_of_nothing_are_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.gpu_check.torch.cuda, "is_available", lambda: True)
    for budget in ("0", "-1", "nan"):
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--budget-s", budget])
        with pytest.raises(SystemExit) as caught:
            bench.gpu_check.main()
        assert caught.value.code == 2 and "--budget-s: expected more than 0 seconds" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--budget-s", "1e-9"])
    assert bench.gpu_check.main() == 2
    assert "0 right, 0 wrong" in capsys.readouterr().out


PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
    *"-m pip"*bad.whl*) exit 1 ;;
    *"import bench"*) [ -z "$LACKS" ] || { echo "Traceback
ModuleNotFoundError: $LACKS" >&2; exit 1; } ;;
esac
"""


@pytest.mark.parametrize("lacks", ["", "No module named 'torch'"])
def test_the_script_leaves_out_wheels_that_fail_and_says_what_is_missing(tmp_path: Path, lacks: str) -> None:
    for folder in ("bench", ".whl"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bench/gpu_check.sh").write_text((ROOT / "bench/gpu_check.sh").read_text())
    for name in ("bad.whl", "good.whl"):
        (tmp_path / ".whl" / name).touch()
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "LOG": str(log), "LACKS": lacks}
    command = ["bash", str(tmp_path / "bench/gpu_check.sh"), "--only", "time"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    calls = log.read_text().splitlines()
    assert "left out .whl/bad.whl" in done.stderr and calls[2].endswith(" .whl/good.whl")
    assert done.returncode == (2 if lacks else 0)
    assert (calls[-1] == "-m bench.gpu_check --only time") is not bool(lacks)
    assert f"cannot run the check: ModuleNotFoundError: {lacks}" in done.stderr or not lacks


def test_a_report_goes_on_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(report: Report) -> None:
        raise ValueError("no such kernel\nand more")

    report = Report(budget_s=60.0)
    report.attempt("timing", fail, decides=False)
    assert report.num_wrong == 0
    report.attempt("kernel", fail, decides=True)
    report.attempt("other", lambda one: one.say("other", True, us=1.23456), decides=True)
    assert report.num_wrong == 1
    report.budget_s = 0.0
    report.attempt("late", fail, decides=True)
    assert report.num_wrong == 1 and report.skipped == ["late"]
    assert report.table().splitlines()[-1] == "1 right, 1 wrong, 1 skipped"
    assert '"error": "ValueError: no such kernel"' in capsys.readouterr().out


def test_the_backend_and_its_graph_are_right(recorder: GraphRecorder) -> None:
    report = Report(60.0)
    check_backend(report, (9, 3, 64), 16, CPU)
    check_graph(report, (9, 3, 64), 16, CPU, recorder)
    assert [result.is_right for result in report.results] == [True] * 9


def test_numbers_of_8_bits_are_right(recorder: GraphRecorder) -> None:
    report = Report(60.0)
    check_backend(report, (4, 2, 128), 16, CPU, FP8)
    assert [(result.name, result.is_right) for result in report.results][::2] == [
        ("attention/mixed, fp8", True),
        ("attention/cut, fp8", True),
        ("attention/shared, fp8", True),
    ]


def test_a_wrong_backend_is_found(recorder: GraphRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FlashInferBackend.run
    monkeypatch.setattr(FlashInferBackend, "run", lambda self, layer, q, k, v: plain(self, layer, q * 1.05, k, v))
    report = Report(60.0)
    check_backend(report, (9, 3, 64), 16, CPU)
    assert report.num_wrong == 3


def test_a_wrong_triton_backend_is_found(recorder: GraphRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
    report = Report(60.0)
    check_triton(report, (9, 3, 64), 16, CPU)
    assert [result.is_right for result in report.results] == [True] * 2
    plain = TritonBackend.run
    monkeypatch.setattr(TritonBackend, "run", lambda self, layer, q, k, v: plain(self, layer, q * 1.05, k, v))
    check_triton(report, (9, 3, 64), 16, CPU)
    assert report.num_wrong == 1


def test_engines_are_right(recorder: GraphRecorder) -> None:
    report = Report(60.0)
    check_engine(report, replace(shrunk(SMALL), num_layers=1), CPU)
    assert [result.is_right for result in report.results] == [True] * 24
