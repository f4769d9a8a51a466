"""The built library in this process: loaded once, with the argument types of its functions, or refused once, with the reason."""

import ctypes
import logging
from functools import cache
from pathlib import Path

from radixserve.native.build import find_or_build
from radixserve.native.compiler import KernelBuildError
from radixserve.native.levels import level_named, level_of_this_machine
from radixserve.native.signatures import SIGNATURES

logger = logging.getLogger(__name__)

_NO_MEMORY = 1  # enum Status of door.h


def load_library() -> ctypes.CDLL:
    """Built if need be, on the first call; KernelBuildError says why there is none. Who goes on without it warns: reason_without_library().

    The caller has imported torch, whose OpenMP threads are then shared. ConfigError for a RADIXSERVE_CPU_LEVEL that cannot be.
    """
    outcome = _load_once()
    if isinstance(outcome, str):
        raise KernelBuildError(outcome)
    return outcome


def loaded_library() -> ctypes.CDLL | None:
    """The library if this process has loaded it; builds nothing."""
    outcome = _outcome_so_far()
    return None if isinstance(outcome, str) else outcome


def reason_without_library() -> str:
    """Why this process has asked for the library and does without; empty where it has it, or has not asked. Builds nothing."""
    outcome = _outcome_so_far()
    return outcome if isinstance(outcome, str) else ""


def forget_library() -> None:
    """The next load_library() begins anew. For tests."""
    _load_once.cache_clear()


def check(library: ctypes.CDLL, status: int, doing: str) -> None:
    """MemoryError or RuntimeError, as the status of a call says."""
    if status == _NO_MEMORY:
        raise MemoryError(f"no memory for {doing}")
    if status:
        message = library.radixserve_failure()
        raise RuntimeError(f"{doing}: {message.decode(errors='replace')}")


def _outcome_so_far() -> ctypes.CDLL | str | None:
    """None: nobody has asked for the library yet."""
    return _load_once() if _load_once.cache_info().currsize else None


@cache
def _load_once() -> ctypes.CDLL | str:
    """The library, or why there is none: a build that failed is not tried again."""
    try:
        return _load()
    except KernelBuildError as error:
        return str(error)


def _load() -> ctypes.CDLL:
    level = level_of_this_machine()
    library = _open(find_or_build(level))
    if level.needs_torch_headers and (reason := why_no_tiles(library)):
        # the processor has the matrix units, and a hypervisor, ONEDNN_MAX_CPU_ISA or torch's build keeps them
        logger.warning("torch cannot multiply on the matrix units (%s); the CPU kernels go without them", reason)
        library = _open(find_or_build(level_named("avx512_bf16")))
    return library


def why_no_tiles(library: ctypes.CDLL) -> str:
    """What one product says that fails; empty where it does not."""
    flops = ctypes.c_double()
    try:
        check(library, library.radixserve_peak(1, ctypes.byref(flops)), "one product")
    except (MemoryError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"{path} cannot be loaded: {error}") from error
    return library
