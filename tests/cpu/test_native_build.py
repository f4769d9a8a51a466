"""Building the kernels: once for many processes, whole or not at all, and what is served where it cannot be done."""

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixserve.attention import make_attention_backend
from radixserve.errors import ConfigError
from radixserve.kv import KVPool
from radixserve.native import build, levels, library

PROGRAM = """
import sys, torch
from radixserve.native import load_library
load_library()
assert "torch.utils.cpp_extension" not in sys.modules
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load_library.cache_clear()
    yield tmp_path / "radixserve" / "native"
    library.load_library.cache_clear()


def made(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name != ".lock"]


def small_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(1, 4, 1, 2, 4, dtype)


def test_two_processes_build_once_and_leave_one_file(empty_cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(process.communicate(timeout=250)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0], said
    assert said.count("building the CPU kernels") == 1
    assert made(empty_cache) == [build.library_name(levels.level_of_this_machine())]
    library.load_library()  # and a third one builds nothing
    assert len(made(empty_cache)) == 1


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C[+][+] compiler"), ("false", "false failed")])
def test_without_a_compiler_torch_serves_and_one_warning_says_why(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert make_attention_backend("auto", small_pool(), 2).name == "torch"
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("attention runs on plain torch")
    with pytest.raises(ConfigError, match=f"--attention-backend cpu: {reason}.*or use --attention-backend torch"):
        make_attention_backend("cpu", small_pool(), 2)
    assert made(empty_cache) == []


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "radixserve").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.KernelBuildError, match=r"cannot write to .*; set XDG_CACHE_HOME"):
        build.find_or_build(levels.level_of_this_machine())


def test_auto_is_the_kernel_for_what_it_can_and_torch_for_the_rest() -> None:
    assert make_attention_backend("auto", small_pool(), 2).name == "cpu"
    assert make_attention_backend("auto", small_pool(torch.float16), 2).name == "torch"
    with pytest.raises(ConfigError, match=r"expected float32 or bfloat16 on a CPU, got torch\.float16 on cpu"):
        make_attention_backend("cpu", small_pool(torch.float16), 2)


def test_levels_of_x86_each_need_what_the_next_one_needs_and_more() -> None:
    for better, worse in itertools.pairwise(levels.X86_LEVELS):
        assert better.needs > worse.needs
    with pytest.raises(ValueError, match=r"CPU level: expected one of .*, got 'sse9'"):
        levels.level_named("sse9")


def test_another_source_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    level = levels.level_of_this_machine()
    before = build.library_name(level)
    for path in build.SOURCE_DIR.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert build.library_name(level) == before
    (tmp_path / "vec.h").write_text("// changed")
    assert build.library_name(level) != before


# this machine's own level runs in every other test
@pytest.mark.parametrize("name", [level.name for level in levels.known_levels()])
def test_every_level_that_this_machine_can_run_is_right(name: str) -> None:
    """The kernel's own tests, some of them, on builds for lesser processors, and on torch's tile products where they run without AMX."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    needs = levels.level_named(name).needs - {"amx_tile", "amx_bf16"}  # torch finds out by itself what there is
    if not needs <= words or name == levels.level_of_this_machine().name:
        pytest.skip("another processor's, or tested already")
    chosen = "test_bits_do_not_depend_on_the_batch or page_size_that or (test_any_head and heads1)"
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("test_cpu_backend.py")),
            "-k",
            chosen,
        ],
        env={**os.environ, "RADIXSERVE_CPU_LEVEL": name},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stdout[-3000:]
