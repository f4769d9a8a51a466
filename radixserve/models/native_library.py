"""The native part of a decoder (native/csrc/decoder.cpp) as functions of Python: the library is found or built here, and nowhere else."""

import ctypes
import functools
import logging

import torch

logger = logging.getLogger(__name__)

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "radixserve_decoder_dtypes": (ctypes.c_int, []),
    "radixserve_pack": (None, [_POINTER, _INT64, _INT64, ctypes.c_int, _POINTER]),
    "radixserve_decoder_new": (_POINTER, [ctypes.c_int, _POINTER, ctypes.c_float, _POINTER, _POINTER, _POINTER, _POINTER]),
    "radixserve_decoder_delete": (None, [_POINTER]),
    "radixserve_decoder_add_layer": (None, [_POINTER, _POINTER]),
    "radixserve_decoder_begin": (None, [_POINTER, _INT64, _POINTER, _POINTER, _POINTER]),
    "radixserve_decoder_advance": (None, [_POINTER, _INT64, _INT64, _POINTER, _POINTER, _POINTER, _POINTER]),
    "radixserve_decoder_logits": (None, [_POINTER, _INT64, _POINTER, _POINTER]),
}
_DTYPE_BITS = {torch.float32: 1, torch.bfloat16: 2}


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The library with typed functions; None where it cannot be built, which is logged once."""
    path = _build()
    if path is None:
        return None
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _SIGNATURES.items():
        if hasattr(library, name):  # on a processor without AVX-512 only the first is there
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library


def _build() -> str | None:
    import subprocess
    from pathlib import Path

    source = Path(__file__).parent.parent / "native" / "csrc" / "decoder.cpp"
    target = Path("/tmp/k5w_dec.so")
    if not target.exists() or any(target.stat().st_mtime < path.stat().st_mtime for path in source.parent.iterdir()):
        subprocess.run(
            ["g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17", "-fvisibility=hidden", source, "-o", target],
            check=True,
        )
    return str(target)


def can_compute(dtype: torch.dtype) -> bool:
    """Whether there is a native decoder for `dtype` on this processor. Builds the library when asked first."""
    if dtype not in _DTYPE_BITS:
        return False
    library = native_library()
    return library is not None and bool(library.radixserve_decoder_dtypes() & _DTYPE_BITS[dtype])
