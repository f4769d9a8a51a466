"""Whether the flashinfer package can be used here, and the one sentence for when it cannot."""

import importlib
import importlib.util
import os
import warnings
from typing import Any

import torch

from radixserve.errors import ConfigError
from radixserve.kv import KVPool

HEAD_DIMS = (64, 128, 256)
FP8_HEAD_DIMS = (128, 256)  # of its loads of K and V of 8 bits FlashInfer's source says that they are not for 64 (prefill.cuh)
DTYPES = (torch.bfloat16, torch.float16)
INSTALL = "pip install 'radixserve[gpu]'"


def why_not(pool: KVPool) -> str | None:
    """Why FlashInfer cannot attend over this pool, or None. Imports nothing."""
    if pool.device.type != "cuda":
        return f"expected a CUDA device, got {pool.device}"
    if pool.dtype not in DTYPES:
        return f"expected bfloat16 or float16, got {pool.dtype}"
    if pool.head_dim not in HEAD_DIMS:
        return f"expected heads of {', '.join(map(str, HEAD_DIMS))} dimensions, got {pool.head_dim}"
    if pool.stored_dtype != pool.dtype and pool.head_dim not in FP8_HEAD_DIMS:
        return f"expected heads of {' or '.join(map(str, FP8_HEAD_DIMS))} dimensions for --kv-cache-dtype fp8_e4m3, got {pool.head_dim}"
    if torch.cuda.get_device_capability(pool.device) < (8, 0):
        return f"expected compute capability 8.0 or higher, got {'.'.join(map(str, torch.cuda.get_device_capability(pool.device)))}"
    if importlib.util.find_spec("flashinfer") is None:
        return f"the package flashinfer-python is not installed: {INSTALL}"
    return None


def load_flashinfer() -> Any:
    """The module. ConfigError, with what to do, where it is missing or does not import."""
    # the kernels of plain CUDA do all that is asked for here; those of the CuTe DSL want packages of gigabytes
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about optional packages
            return importlib.import_module("flashinfer")
    except Exception as error:  # a broken installation raises whatever its loader does
        raise ConfigError(
            f"--attention-backend flashinfer: the package does not import ({type(error).__name__}: {error}); {INSTALL}, "
            "or use --attention-backend torch, which is slower"
        ) from error
