"""Where the library is kept, and that it is built once and kept whole. It does not load what it builds (library.py does).

A library is named by a hash of the sources, the flags and torch's version: another source is another file, and nothing is ever stale. Where
the compiler takes its flags from the processor, that is part of the name too.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from radixserve.native.compiler import FLAGS, KernelBuildError, compile_library
from radixserve.native.levels import Level, processor_identity
from radixserve.native.seal import fault_of, seal, why_not_loadable

SOURCE_DIR = Path(__file__).parent / "csrc"
PREBUILT_DIR = Path(__file__).parent / "prebuilt"  # filled by `python -m radixserve.native --into-package`, e.g. in a container image
_STAGING = ".build-"
_UNUSED_S = 30 * 86_400  # a library that no process has loaded for so long is removed by the next build


def library_name(level: Level) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((FLAGS, level.compiler_flags)).encode())
    if level.is_for_one_processor:
        digest.update(processor_identity().encode())
    return f"radixserve-{level.name}-torch{importlib.metadata.version('torch')}-{digest.hexdigest()[:16]}.so"


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says to ignore a relative path
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "radixserve" / "native"


def find_or_build(level: Level) -> Path:
    """The library of a level: the prebuilt one, the one in the user's cache, or a new one. KernelBuildError.

    A file that is not what was built is never loaded: it is built again, or named.
    """
    name, faults = library_name(level), []
    for path in (PREBUILT_DIR / name, cache_dir() / name):
        if not _is_there(path):
            continue
        if not (fault := fault_of(path)):
            _mark_used(path)
            return path
        faults.append(f"{path} {fault}")
        print(f"{faults[-1]}; it is not used", file=sys.stderr, flush=True)
    try:
        return build(level, cache_dir())
    except KernelBuildError as error:
        raise KernelBuildError("; ".join((*faults, str(error)))) from error


def build(level: Level, directory: Path) -> Path:
    """Compile into `directory` unless it is there: once, however many processes want it, and whole or not at all."""
    if directory == PREBUILT_DIR and level.is_for_one_processor:
        raise KernelBuildError(
            "--into-package: expected x86-64, where a build is for a level; here it is for one processor and belongs in the user's cache"
        )
    target = directory / library_name(level)
    try:
        if target.is_dir():
            raise KernelBuildError(f"{target} is a directory where a library belongs; remove it")
        directory.mkdir(parents=True, exist_ok=True)
        with _exclusive(directory / ".lock"):
            if not target.is_file() or fault_of(target):
                _tidy(directory)
                with tempfile.TemporaryDirectory(prefix=_STAGING, dir=directory) as staging:
                    _make(level, Path(staging)).replace(target)
    except OSError as error:
        raise KernelBuildError(f"cannot write to {directory}: {error}; set XDG_CACHE_HOME to a directory that can be written") from error
    return target


def _make(level: Level, staging: Path) -> Path:
    """Nobody would look at it again: what cannot be loaded is found here."""
    library = compile_library(level, SOURCE_DIR, staging)
    if reason := why_not_loadable(library, level):
        raise KernelBuildError(f"the compiler ended without an error, and what it has built cannot be loaded: {reason}")
    seal(library)
    return library


def _is_there(path: Path) -> bool:
    """A directory that may not be looked into has none to offer; what is done instead says what is wrong with it."""
    try:
        return path.is_file()
    except OSError:
        return False


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
        with contextlib.suppress(OSError):  # whatever else bears such a name
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()


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
