"""Building the kernels: once for many processes, whole or not at all, and what is served where it cannot be done."""

import fcntl
import itertools
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from radixserve.attention import make_attention_backend
from radixserve.core import SamplingParams
from radixserve.engine.llm import LLM
from radixserve.errors import ConfigError
from radixserve.kv import KVPool
from radixserve.native import KernelBuildError, build, levels, library
from radixserve.native.__main__ import main
from radixserve.native.compiler import find_compiler

Tiny = Callable[[str, bool], Path]
PROGRAM = """
import sys, torch
from radixserve.native import load_library
load_library()
assert "torch.utils.cpp_extension" not in sys.modules
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.forget_library()
    yield tmp_path / "radixserve" / "native"
    library.forget_library()


def made(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name != ".lock"]


def small_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(1, 4, 1, 2, 4, dtype)


def test_two_processes_build_once_and_leave_one_file(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = levels.known_levels()[-1]  # compiled in the least time
    monkeypatch.setenv("RADIXSERVE_CPU_LEVEL", least.name)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(process.communicate(timeout=250)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0], said
    assert said.count("building the CPU kernels") == 1
    assert made(empty_cache) == [build.library_name(least)]
    library.load_library()  # and a third one builds nothing
    assert len(made(empty_cache)) == 1


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C[+][+] compiler"), ("false", "false failed")])
def test_without_a_compiler_torch_serves_and_the_kernel_is_refused(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert make_attention_backend("auto", small_pool(), 2).name == "torch"
    assert caplog.records == []  # the engine's to say
    with pytest.raises(ConfigError, match=f"--attention-backend cpu: {reason}.*or use --attention-backend torch"):
        make_attention_backend("cpu", small_pool(), 2)
    assert made(empty_cache) == []


def test_a_whole_engine_without_a_compiler_tries_once_and_warns_once(
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tiny_model: Tiny,
) -> None:
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(tiny_model("llama", True)), device="cpu", max_total_tokens=2048)
        assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0.8))) == 1  # the sampler asks for it too
    assert [record.getMessage()[:14] for record in caplog.records] == ["no CPU kernels"]
    assert capfd.readouterr().err.count("building the CPU kernels") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"linear_backend": "native"}, "--linear-backend native: false failed"),
        ({"quantization": "int8"}, "--quantization int8: false failed"),
        ({"deterministic": True}, "--deterministic: its kernels cannot be had here: false failed"),
        ({"attention_backend": "cpu"}, "--attention-backend cpu: false failed"),
    ],
)
def test_who_asks_for_the_kernels_by_name_gets_the_refusal_alone(
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tiny_model: Tiny,
    options: dict[str, object],
    sentence: str,
) -> None:
    monkeypatch.setenv("CXX", "false")
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match=sentence):
        LLM(str(tiny_model("llama", True)), device="cpu", max_total_tokens=64, **options)
    assert caplog.records == []


def test_a_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env 'g++'")
    assert find_compiler() == ("env", "g++")
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(KernelBuildError, match=r"CXX: expected a command, got .'g[+][+]."):
        find_compiler()


def test_ahead_of_time_into_the_package_and_then_no_compiler(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    least = levels.known_levels()[-1:]  # of all levels the one that is compiled in the least time, and runs everywhere
    monkeypatch.setattr(levels, "known_levels", lambda: least)
    monkeypatch.setattr(build, "PREBUILT_DIR", tmp_path / "prebuilt")
    if least[0].is_for_one_processor:
        pytest.skip("no levels on this architecture")
    assert main(["--all-levels", "--into-package"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "prebuilt" / build.library_name(least[0]))]
    monkeypatch.setenv("CXX", "false")
    assert Path(library.load_library()._name) == tmp_path / "prebuilt" / build.library_name(least[0])
    assert not empty_cache.exists()


@pytest.fixture
def fake_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_library(level: levels.Level, source_dir: Path, staging: Path) -> Path:
        (staging / "library.so").write_bytes(b"\x7fELF")
        return staging / "library.so"

    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setattr(build, "why_not_loadable", lambda library, level: "")


def test_a_build_removes_what_killed_ones_left_and_what_nobody_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_compile: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory, level = build.cache_dir(), levels.level_of_this_machine()
    (directory / ".build-left").mkdir(parents=True)
    (directory / ".build-left" / "half.o").write_bytes(b"half")
    month_ago = time.time() - 31 * 86_400
    for name, used in (("radixserve-old.so", month_ago), ("radixserve-new.so", time.time())):
        (directory / name).write_bytes(b"")
        os.utime(directory / name, (used, used))
    target = build.find_or_build(level)
    assert sorted(made(directory)) == sorted(["radixserve-new.so", target.name])
    os.utime(target, (month_ago, month_ago))
    assert build.find_or_build(level) == target and time.time() - target.stat().st_mtime < 3600  # to load is to use


def test_who_waits_for_another_build_says_so(tmp_path: Path, fake_compile: None, capfd: pytest.CaptureFixture[str]) -> None:
    said, deadline = "", time.monotonic() + 20
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=build.build, args=(levels.level_of_this_machine(), tmp_path))
        waiting.start()
        while "waiting for another process" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capfd.readouterr().err
        assert made(tmp_path) == []
    waiting.join(20)
    assert "waiting for another process" in said and len(made(tmp_path)) == 1


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "radixserve").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KernelBuildError, match=r"cannot write to .*; set XDG_CACHE_HOME"):
        build.find_or_build(levels.level_of_this_machine())


def test_a_cache_that_may_not_be_looked_into(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As another user's home; a name that is too long is refused to root too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    with pytest.raises(OSError, match="too long"):
        build.cache_dir().is_file()
    with pytest.raises(KernelBuildError, match=r"cannot write to .*; set XDG_CACHE_HOME"):
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


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of another processor."""
    monkeypatch.setattr(levels, "CPUINFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


def test_a_level_that_the_processor_cannot_run_is_refused(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for best, runnable in (("avx2", "avx2, x86_64"), ("avx512_bf16", "amx, avx512_bf16, avx512, avx2, x86_64")):
        cpuinfo.write_text("flags : fpu " + " ".join(levels.level_named(best).needs))
        monkeypatch.delenv("RADIXSERVE_CPU_LEVEL", raising=False)
        assert levels.level_of_this_machine().name == best
        for name in runnable.split(", "):
            monkeypatch.setenv("RADIXSERVE_CPU_LEVEL", name)
            assert levels.level_of_this_machine().name == name
        for wrong in {"avx512", "amx", "sse9"} - set(runnable.split(", ")):
            monkeypatch.setenv("RADIXSERVE_CPU_LEVEL", wrong)
            with pytest.raises(ConfigError, match=f"RADIXSERVE_CPU_LEVEL: expected one of {runnable} on this processor, got '{wrong}'"):
                levels.level_of_this_machine()


def test_a_build_on_arm_is_for_one_processor(
    cpuinfo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(build, "PREBUILT_DIR", tmp_path / "prebuilt")
    names = []
    for part, features in (("0xd40", "fp asimd sve i8mm bf16"), ("0xd0c", "fp asimd"), ("0xd0c", "fp asimd")):
        bogomips = len(names)  # changes from start to start
        cpuinfo.write_text(f"processor\t: 0\nBogoMIPS\t: {bogomips}\nFeatures\t: {features}\nCPU implementer\t: 0x41\nCPU part\t: {part}\n")
        names.append(build.library_name(levels.level_of_this_machine()))
    assert names[0] != names[1] == names[2]
    assert main(["--into-package"]) == 1
    captured = capsys.readouterr()
    assert "--into-package: expected x86-64" in captured.err and captured.out == ""
    assert not (tmp_path / "prebuilt").exists()


def test_another_source_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    level = levels.level_of_this_machine()
    before = build.library_name(level)
    for path in build.SOURCE_DIR.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    assert build.library_name(level) == before
    (tmp_path / "vec.h").write_text("// changed")
    assert build.library_name(level) != before


def can_run(name: str) -> bool:
    return levels.level_named(name).compiled_for <= set(levels.CPUINFO.read_text().split())


# this machine's own level runs in every other test
@pytest.mark.parametrize("name", [level.name for level in levels.known_levels()])
def test_every_level_that_this_machine_can_run_is_right(name: str) -> None:
    """Some tests of attention and decoder, on builds for lesser processors, and on torch's tile products where they run without AMX."""
    if not can_run(name) or name == levels.level_of_this_machine().name:
        pytest.skip("another processor's, or tested already")
    here, options = Path(__file__).parent, ["-q", "-p", "no:cacheprovider", "-k"]
    chosen = (
        "test_bits_do_not_depend_on_the_batch or page_size_that or (test_any_head and heads1) or test_a_key_that_is_nan or test_no_value"
        " or test_a_row_has_the_same_bits or test_nan_stays or (test_same_bits_as_layer and Llama)"
    )
    files = [str(here / name) for name in ("test_cpu_backend.py", "test_packed_decoder.py", "test_one_native_call.py")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, chosen, *files],
        env={**os.environ, "RADIXSERVE_CPU_LEVEL": name},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stdout[-3000:]


WITHOUT_TILES = """
import logging, torch
logging.basicConfig()
from radixserve.native import load_library
from tests.support.tiny_decoder import tiny_decoder
assert load_library().radixserve_decoder_dtypes() == 3
assert "avx512_bf16" in load_library()._name
assert tiny_decoder().compute_logits(torch.ones(3, 32)).isfinite().all()
"""


def test_matrix_units_that_torch_may_not_use_cost_a_warning_and_not_the_process() -> None:
    if platform.machine() != "x86_64" or not can_run("amx"):
        pytest.skip("another processor's")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "RADIXSERVE_CPU_LEVEL": "amx", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    run = subprocess.run([sys.executable, "-c", WITHOUT_TILES], env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stderr.count("torch cannot multiply on the matrix units") == 1
