"""The built library in this process: loaded once, with the argument types of its functions, or refused once, with the reason."""

import ctypes
import logging
from functools import cache
from pathlib import Path

from radixserve.native.build import KernelBuildError, find_or_build
from radixserve.native.levels import level_named, level_of_this_machine

logger = logging.getLogger(__name__)

_INT, _INT64, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
# name: (result, arguments); what they mean stands beside the functions in csrc/
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "radixserve_attention_new": (_POINTER, [_INT] * 6),
    "radixserve_attention_delete": (None, [_POINTER]),
    "radixserve_attention_plan": (_INT, [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER]),
    "radixserve_attention_num_shared_tiles": (_INT, [_POINTER]),
    "radixserve_attention_run": (_INT, [_POINTER, _POINTER, _INT64]),
    "radixserve_sample": (_INT, [_INT64, _POINTER, _POINTER, _INT64, _INT64, *[_POINTER] * 6]),
    "radixserve_decoder_dtypes": (_INT, []),
    "radixserve_decoder_pack": (None, [_POINTER, _INT64, _INT64, _INT, _POINTER]),
    "radixserve_decoder_quantize": (None, [_POINTER, _INT, _INT64, _INT64, _INT, _POINTER, _POINTER]),
    "radixserve_decoder_new": (_POINTER, [_INT, _POINTER, ctypes.c_float, *[_POINTER] * 4]),
    "radixserve_decoder_delete": (None, [_POINTER]),
    "radixserve_decoder_add_layer": (_INT, [_POINTER, _POINTER]),
    "radixserve_decoder_begin": (_INT, [_POINTER, _INT64, _INT, _POINTER, _POINTER, _POINTER]),
    "radixserve_decoder_advance": (_INT, [_POINTER, _INT64, _INT64, *[_POINTER] * 4]),
    "radixserve_decoder_forward": (_INT, [_POINTER, _INT64, *[_POINTER] * 6]),
    "radixserve_decoder_seconds": (None, [_POINTER, _POINTER]),
    "radixserve_decoder_logits": (_INT, [_POINTER, _INT64, _INT, _POINTER, _POINTER]),
    "radixserve_peak": (_INT, [_INT64, ctypes.POINTER(ctypes.c_double)]),
    "radixserve_failure": (ctypes.c_char_p, []),
}
_NO_MEMORY = 1  # enum Status of door.h


def load_library() -> ctypes.CDLL:
    """Built if need be, on the first call; KernelBuildError says why there is none, and the first time a warning does too.

    The caller has imported torch, whose OpenMP threads are then shared. ConfigError for a RADIXSERVE_CPU_LEVEL that cannot be.
    """
    outcome = _load_once()
    if isinstance(outcome, str):
        raise KernelBuildError(outcome)
    return outcome


def loaded_library() -> ctypes.CDLL | None:
    """The library if this process has loaded it; builds nothing."""
    outcome = _load_once() if _load_once.cache_info().currsize else None
    return None if isinstance(outcome, str) else outcome


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


@cache
def _load_once() -> ctypes.CDLL | str:
    """The library, or why there is none: a build that failed is not tried again."""
    try:
        return _load()
    except KernelBuildError as error:
        logger.warning("no CPU kernels, so plain torch does their work, several times slower: %s", error)
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
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"{path} cannot be loaded: {error}") from error
    return library
