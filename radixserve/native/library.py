"""The built library in this process: loaded once, with the argument types of its functions."""

import ctypes
from functools import cache

from radixserve.native.build import KernelBuildError, find_or_build
from radixserve.native.levels import level_of_this_machine

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
    "radixserve_decoder_add_layer": (None, [_POINTER, _POINTER]),
    "radixserve_decoder_begin": (_INT, [_POINTER, _INT64, _POINTER, _POINTER, _POINTER]),
    "radixserve_decoder_advance": (None, [_POINTER, _INT64, _INT64, *[_POINTER] * 4]),
    "radixserve_decoder_forward": (_INT, [_POINTER, _INT64, *[_POINTER] * 6]),
    "radixserve_decoder_seconds": (None, [_POINTER, _POINTER]),
    "radixserve_decoder_logits": (None, [_POINTER, _INT64, _POINTER, _POINTER]),
}


@cache
def load_library() -> ctypes.CDLL:
    """Build it if need be; KernelBuildError says why there is none. The caller has imported torch, whose OpenMP threads are then shared."""
    path = find_or_build(level_of_this_machine())
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"{path} cannot be loaded: {error}") from error
    return library


def loaded_library() -> ctypes.CDLL | None:
    """The library if this process has loaded it; builds nothing."""
    return load_library() if load_library.cache_info().currsize else None
