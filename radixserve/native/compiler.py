"""The compiler: which one, what it is told, and that it ends with this process, in whatever way that ends."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from radixserve.native.levels import Level
from radixserve.processors import num_usable

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wno-psabi")
_TIMEOUT_S = 600


class KernelBuildError(Exception):
    """No library: the message says why, and what to install or set."""


def compile_library(level: Level, source_dir: Path, staging: Path) -> Path:
    """source_dir/*.cpp to a shared library in `staging`, where all that is left over stays too. KernelBuildError."""
    compiler = find_compiler()
    started = time.monotonic()
    print(f"building the CPU kernels ({level.name}) with {shlex.join(compiler)}, once", file=sys.stderr, flush=True)
    include, link = _torch_flags() if level.needs_torch_headers else ((), ())
    command = (*compiler, *FLAGS, *level.compiler_flags, *include)
    # the group ends first: what the pool waits for when something fails
    with ThreadPoolExecutor(num_usable()) as pool, _group_that_ends_with_us() as group:
        run = partial(_run, group=group, staging=staging)

        def compile_one(source: Path) -> Path:
            return run([*command, "-c", str(source)], staging / f"{source.stem}.o")

        objects = list(pool.map(compile_one, sorted(source_dir.glob("*.cpp"))))
        library = run([*compiler, "-shared", "-fopenmp", *map(str, objects), *link], staging / "library.so")
    print(f"built in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return library


def find_compiler() -> tuple[str, ...]:
    """The words of $CXX, or the first of the usual names. Nothing else of the environment reaches the command line."""
    wanted = os.environ.get("CXX", "")
    try:
        words = tuple(shlex.split(wanted))
    except ValueError as error:
        raise KernelBuildError(f"CXX: expected a command, got {wanted!r} ({error})") from error
    for command in (words,) if words else (("g++",), ("c++",), ("clang++",)):
        if shutil.which(command[0]):
            return command
    tried = words[0] if words else "g++, c++ or clang++"
    raise KernelBuildError(f"no C++ compiler ({tried}) was found; install one (Debian: apt-get install g++)")


def torch_dir() -> Path:
    """Found without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _torch_flags() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return ("-isystem", str(torch_dir() / "include")), (f"-L{torch_dir() / 'lib'}", "-ltorch_cpu", "-lc10")


@dataclass(frozen=True, slots=True)
class _Group:
    pid: int
    over: threading.Event = field(default_factory=threading.Event)  # it is killed, or about to be


@contextlib.contextmanager
def _group_that_ends_with_us() -> Iterator["_Group"]:
    """A process group for compilers and what they start, killed when the block ends, and when this process does.

    Its leader reads a pipe whose other end only this process holds: even a KILL closes that. A death signal would not do: it would reach
    the driver (g++) alone, and not what that has started.
    """
    leader = subprocess.Popen(["/bin/sh", "-c", "read -r _; kill -KILL 0"], stdin=subprocess.PIPE, process_group=0)
    assert leader.stdin is not None
    group = _Group(leader.pid)
    try:
        yield group
    finally:
        group.over.set()  # first: who is started before sees the group's end, who is started after sees this
        leader.stdin.close()
        leader.wait()


def _run(command: Sequence[str], output: Path, *, group: _Group, staging: Path) -> Path:
    """Returns `output`, which it has made."""
    environment = {**os.environ, "TMPDIR": str(staging)}  # who is killed leaves temporary files
    command = [*command, "-o", str(output)]
    try:
        status, said = _status_and_words(command, environment, group)
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} did not end within {_TIMEOUT_S} s") from error
    except OSError as error:
        raise KernelBuildError(f"{command[0]} cannot be run: {error}") from error
    if status != 0:
        lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()[-1:] or ["no message"]
        raise KernelBuildError(f"{command[0]} failed: {lines[0].strip()}")
    if not output.is_file():
        raise KernelBuildError(f"{command[0]} ended without an error and wrote nothing")
    return output


def _status_and_words(command: Sequence[str], environment: Mapping[str, str], group: _Group) -> tuple[int, str]:
    """The exit status, and what it said on standard error."""
    if group.over.is_set():
        raise KernelBuildError("the build was given up")
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        process_group=group.pid,
    ) as process:
        if group.over.is_set():  # it may have joined a group that was just killed, whose number is taken as long as it is not reaped
            os.killpg(group.pid, signal.SIGKILL)
        try:
            said = process.communicate(timeout=_TIMEOUT_S)[1]
        except BaseException:
            process.kill()
            raise
    return process.returncode, said
