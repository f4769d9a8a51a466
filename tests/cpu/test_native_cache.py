"""The kept library: never loaded unless it is what was built, never kept unless it can be loaded; and who compiles ends with the build."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from radixserve.native import KernelBuildError, build, levels, seal
from radixserve.native import compiler as compilers
from radixserve.native.compiler import find_compiler
from radixserve.native.signatures import SIGNATURES

LEVEL = levels.level_of_this_machine()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with all functions, which do nothing."""
    directory = tmp_path_factory.mktemp("stub")
    (directory / "stub.cpp").write_text("".join(f'extern "C" void {name}() {{}}\n' for name in SIGNATURES))
    subprocess.run(["g++", "-shared", "-fPIC", "stub.cpp", "-o", "stub.so"], cwd=directory, check=True)
    return directory / "stub.so"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stub: Path) -> Path:
    """An empty one; to compile is to copy the stub."""

    def copy(level: levels.Level, source_dir: Path, staging: Path) -> Path:
        find_compiler()
        (staging / "library.so").write_bytes(stub.read_bytes())
        return staging / "library.so"

    monkeypatch.setattr(build, "compile_library", copy)
    monkeypatch.setattr(build, "PREBUILT_DIR", tmp_path / "prebuilt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return build.cache_dir()


def compiler(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX is a script; $out is what it is asked for."""
    path = directory / "compiler"
    path.write_text(f"#!/bin/sh\nfor out; do :; done\necho run >>{directory}/runs\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: b"garbage" * 99, lambda data: data[:9000], lambda data: data[:-1]])
def test_a_damaged_library_is_built_again_or_named(
    cache: Path, damage: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for directory in (cache, build.PREBUILT_DIR):
        path = build.build(LEVEL, directory)
        whole = path.read_bytes()
        assert build.find_or_build(LEVEL) == path and capfd.readouterr().err == ""
        path.write_bytes(damage(whole))
        with monkeypatch.context() as without:
            without.setenv("CXX", "no-such-compiler")
            cached = cache / path.name
            kept = cached.read_bytes()
            if directory != cache:
                cached.unlink()
            with pytest.raises(KernelBuildError, match=f"{re.escape(str(path))} is damaged; no C[+][+] compiler"):
                build.find_or_build(LEVEL)
            cached.write_bytes(kept)
        capfd.readouterr()
        assert build.find_or_build(LEVEL) == cache / path.name
        assert (cache / path.name).read_bytes() == whole
        assert capfd.readouterr().err.splitlines() == [f"{path} is damaged; it is not used"]
    build.build(LEVEL, build.PREBUILT_DIR)  # --into-package
    assert build.find_or_build(LEVEL).parent == build.PREBUILT_DIR


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('yes garbage | head -c 4096 >"$out"', "ended without an error, and what it has built cannot be loaded: .*invalid ELF header"),
        (":", "compiler ended without an error and wrote nothing"),
    ],
)
def test_what_a_compiler_has_built_is_loaded_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    compiler(tmp_path, script, monkeypatch)
    with pytest.raises(KernelBuildError, match=reason):
        build.build(LEVEL, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_library_that_lacks_a_function_or_ends_the_process_is_none(tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seal.why_not_loadable(stub, LEVEL) == ""
    (tmp_path / "a.cpp").write_text('#include <signal.h>\nstatic int dead = raise(SIGILL);\nextern "C" void radixserve_sample() {}\n')
    subprocess.run(["g++", "-shared", "-fPIC", "a.cpp", "-o", "a.so"], cwd=tmp_path, check=True)
    assert seal.why_not_loadable(tmp_path / "a.so", LEVEL) == "loading it ends a process by SIGILL"
    monkeypatch.setattr(seal, "can_run", lambda level: False)  # for another processor: it is not loaded
    assert seal.why_not_loadable(tmp_path / "a.so", LEVEL) == "no function radixserve_attention_new"
    assert seal.why_not_loadable(stub, LEVEL) == ""


def test_a_directory_in_the_place_of_the_library_is_named_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, ":", monkeypatch)
    (tmp_path / build.library_name(LEVEL)).mkdir()
    with pytest.raises(KernelBuildError, match=r"radixserve-.*[.]so is a directory where a library belongs; remove it"):
        build.build(LEVEL, tmp_path)
    assert not (tmp_path / "runs").exists()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_true: Any) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("is_started", [False, True])
def test_a_compiler_that_is_started_while_the_group_ends_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_started: bool
) -> None:
    """Started by a thread of the pool, between the end and what the pool then waits for."""
    with compilers._group_that_ends_with_us() as group:

        class Popen(subprocess.Popen[str]):
            def __init__(self, *args: Any, **options: Any) -> None:
                group.over.set()
                super().__init__(*args, **options)

        monkeypatch.setattr(subprocess, "Popen", Popen)
        if not is_started:
            group.over.set()
        started = time.monotonic()
        with pytest.raises(KernelBuildError, match="failed: no message" if is_started else "the build was given up"):
            compilers._run(["sh", "-c", "sleep 60"], tmp_path / "output", group=group, staging=tmp_path)
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compilers_and_what_they_start_end_with_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    compiler(tmp_path, f'sleep 100 & echo $$ $! >"{tmp_path}/pids"\nwait', monkeypatch)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "radixserve.native"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as building:
        wait_until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(is_running, pids))
        building.send_signal(number)
        said = building.communicate(timeout=20)[1].splitlines()
    wait_until(lambda: not any(map(is_running, pids)))
    kept = [path.name for path in (tmp_path / "radixserve" / "native").iterdir()]
    if number == signal.SIGINT:
        assert building.returncode == 130 and len(said) == 2 and said[1].startswith("interrupted") and kept == [".lock"]
    else:  # what is left then is removed by the next build
        assert building.returncode == -number and {name[:7] for name in kept} == {".lock", ".build-"}
