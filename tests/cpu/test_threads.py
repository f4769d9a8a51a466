"""How many threads compute where a container's quota is less than the machine: files as cgroup v1 and v2 write them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixserve import processors
from radixserve.engine import build
from radixserve.engine.threads import limit_threads
from radixserve.native import compiler
from radixserve.native.levels import level_of_this_machine
from radixserve.processors import cpu_quota, num_cores, num_usable
from tests.support.engine_runs import tiny_engine


@pytest.fixture(autouse=True)
def threads_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("text", "quota"),
    [("150000 100000\n", 2), ("100000 100000\n", 1), ("5000 100000\n", 1), ("max 100000\n", None), ("", None), ("x y", None)],
)
def test_the_quota_of_version_2(tmp_path: Path, text: str, quota: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("microseconds", "quota"), [(250_000, 3), (-1, None)])
def test_the_quota_of_version_1(tmp_path: Path, microseconds: int, quota: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{microseconds}\n")
    assert cpu_quota(tmp_path) is None  # half of it says nothing
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == quota
    assert cpu_quota(tmp_path / "no such directory") is None


def test_what_is_worth_keeping_busy(tmp_path: Path) -> None:
    assert num_usable(tmp_path) == num_cores()
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert num_usable(tmp_path) == 1
    (tmp_path / "cpu.max").write_text(f"{num_cores() + 1}00000 100000")
    assert num_usable(tmp_path) == num_cores()


def test_a_build_runs_no_more_compilers_at_once_than_the_quota_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000")
    for name in "abc":
        (tmp_path / f"{name}.cpp").touch()
    script = tmp_path / "compiler"  # fails where another one runs
    script.write_text(f"#!/bin/sh\nfor out; do :; done\nmkdir {tmp_path}/runs && sleep 0.05 && touch $out && rmdir {tmp_path}/runs\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(compiler, "num_usable", lambda: num_usable(tmp_path))
    assert compiler.compile_library(level_of_this_machine(), tmp_path, tmp_path).is_file()


def test_never_more_threads_than_torch_had_and_never_none() -> None:
    torch.set_num_threads(2)
    limit_threads(1, {}, quota=None)
    assert torch.get_num_threads() == 2
    limit_threads(1, {}, quota=num_cores() + 7)
    assert torch.get_num_threads() == 2
    limit_threads(1, {"OMP_NUM_THREADS": "2"}, quota=1)
    assert torch.get_num_threads() == 2
    limit_threads(num_cores() + 1, {}, quota=None)
    assert torch.get_num_threads() == 1


def test_an_engine_computes_on_what_the_quota_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: object) -> None:
    if num_cores() < 2:
        pytest.skip("one core")
    (tmp_path / "cpu.max").write_text("90000 100000")
    monkeypatch.setattr(build, "cpu_quota", lambda: processors.cpu_quota(tmp_path))
    torch.set_num_threads(2)
    tiny_engine(tiny_model("llama", True), max_total_tokens=64)  # type: ignore[operator]
    assert torch.get_num_threads() == 1
