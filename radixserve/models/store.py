"""Directories that are made once and then only read: models converted into the user's cache.

A directory appears whole or not at all, and two processes that want the same one make it once.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from radixserve.errors import ModelFetchError

STAMP_NAME = ".radixserve-source"
CONVERTER_VERSION = 1  # raise it when a change of gguf_convert.py makes what is in users' caches wrong

logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """Where this user's converted models live: $XDG_CACHE_HOME/radixserve, or ~/.cache/radixserve."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification says to ignore a relative path
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "radixserve"


def make_once(target: Path, stamp: str, make: Callable[[Path], None]) -> Path:
    """Return `target`, filled by make(directory) unless it is there already with the same stamp.

    The stamp says what the content was made from and by which version of the code; another stamp means: make it again.
    A process that is killed in the middle leaves nothing that counts as done. ModelFetchError when the place cannot be written.
    """
    if _has_stamp(target, stamp):
        return target
    try:
        return _make_under_lock(target, stamp, make)
    except OSError as error:
        raise ModelFetchError(
            f"{target.parent}: the model could not be put there ({error}); set XDG_CACHE_HOME to a directory that can be written and has "
            "room, or give --model-path a directory"
        ) from error


def _make_under_lock(target: Path, stamp: str, make: Callable[[Path], None]) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.parent / f".{target.name}.lock"):
        if _has_stamp(target, stamp):  # another process was faster
            return target
        _drop_leftovers(target)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            make(staging)
            (staging / STAMP_NAME).write_text(stamp, encoding="utf-8")
            staging.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _has_stamp(target: Path, stamp: str) -> bool:
    try:
        return (target / STAMP_NAME).read_text(encoding="utf-8") == stamp
    except OSError:
        return False


def _drop_leftovers(target: Path) -> None:
    """Directories of makers that were killed. Called under the lock, so none of them is alive."""
    for leftover in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    """Hold a lock file; the kernel drops the lock of a process that dies. The file itself stays: removing it would race."""
    with open(lock_path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is making %s", lock_path.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
