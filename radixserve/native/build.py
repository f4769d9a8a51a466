"""From csrc/*.cpp to one shared library: which compiler, which flags, where it is kept. It does not load what it builds.

A library is named by a hash of the sources, the flags and torch's version: another source is another file, and nothing is ever stale. Where
the compiler takes its flags from the processor, that is part of the name too.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from radixserve.native.levels import Level, processor_identity

SOURCE_DIR = Path(__file__).parent / "csrc"
PREBUILT_DIR = Path(__file__).parent / "prebuilt"  # filled by `python -m radixserve.native --into-package`, e.g. in a container image
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wno-psabi")
_TIMEOUT_S = 600
_STAGING = ".build-"
_UNUSED_S = 30 * 86_400  # a library that no process has loaded for so long is removed by the next build


class KernelBuildError(Exception):
    """No library: the message says why, and what to install or set."""


def library_name(level: Level) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_FLAGS, level.compiler_flags)).encode())
    if level.is_for_one_processor:
        digest.update(processor_identity().encode())
    return f"radixserve-{level.name}-torch{importlib.metadata.version('torch')}-{digest.hexdigest()[:16]}.so"


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says to ignore a relative path
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "radixserve" / "native"


def find_or_build(level: Level) -> Path:
    """The library of a level: the prebuilt one, the one in the user's cache, or a new one. KernelBuildError."""
    name = library_name(level)
    for directory in (PREBUILT_DIR, cache_dir()):
        if (directory / name).is_file():
            _mark_used(directory / name)
            return directory / name
    return build(level, cache_dir())


def build(level: Level, directory: Path) -> Path:
    """Compile into `directory` unless it is there: once, however many processes want it, and whole or not at all."""
    if directory == PREBUILT_DIR and level.is_for_one_processor:
        raise KernelBuildError(
            "--into-package: expected x86-64, where a build is for a level; here it is for one processor and belongs in the user's cache"
        )
    target = directory / library_name(level)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _exclusive(directory / ".lock"):
            if not target.is_file():
                _tidy(directory)
                with tempfile.TemporaryDirectory(prefix=_STAGING, dir=directory) as staging:
                    made = _compile(level, Path(staging))
                    made.replace(target)
    except OSError as error:
        raise KernelBuildError(f"cannot write to {directory}: {error}; set XDG_CACHE_HOME to a directory that can be written") from error
    return target


def _compile(level: Level, staging: Path) -> Path:
    compiler = _compiler()
    started = time.monotonic()
    print(f"building the CPU kernels ({level.name}) with {shlex.join(compiler)}, once", file=sys.stderr, flush=True)
    include, link = _torch_flags() if level.needs_torch_headers else ((), ())
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    flags = (*_FLAGS, *level.compiler_flags, *include)

    def compile_one(source: Path) -> Path:
        made = staging / f"{source.stem}.o"
        _run([*compiler, *flags, "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    library = staging / "library.so"
    _run([*compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(library), *link])
    print(f"built in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return library


def _mark_used(library: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, or a read-only image
        os.utime(library)


def _tidy(directory: Path) -> None:
    """Remove what builds that were killed have left, and libraries that nobody loads any more. The caller holds the lock."""
    for path in directory.glob(f"{_STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)
    if directory == PREBUILT_DIR:
        return
    for path in directory.glob("radixserve-*.so"):
        if time.time() - path.stat().st_mtime > _UNUSED_S:
            path.unlink(missing_ok=True)


def _compiler() -> tuple[str, ...]:
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


def _torch_flags() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Found without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    return ("-isystem", str(root / "include")), (f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()[-1:] or ["no message"]
        raise KernelBuildError(f"{command[0]} failed: {lines[0].strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} did not end within {_TIMEOUT_S} s") from error


@contextlib.contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    """The kernel drops the lock of a process that dies. The file itself stays: removing it would race."""
    with open(lock_path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that builds the CPU kernels", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
