"""The functions of the built library and their types."""

import ctypes

_INT, _INT64, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
# name: (result, arguments); what they mean stands beside the functions in csrc/
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
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
