"""Names of attention backends, how each is made, and which comes first where nobody chose. A new one is a function and two entries."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.cpu_backend import DTYPES, CpuBackend
from radixserve.attention.flashinfer_backend import EAGER_INT_WORKSPACES_BYTES, FlashInferBackend
from radixserve.attention.flashinfer_package import INSTALL
from radixserve.attention.flashinfer_package import why_not as why_not_flashinfer
from radixserve.attention.flashinfer_workspace import WORKSPACE_BYTES
from radixserve.attention.torch_backend import TorchBackend
from radixserve.attention.triton_backend import SCRATCH_BYTES, TritonBackend
from radixserve.attention.triton_backend import reason_against as why_not_triton
from radixserve.errors import ConfigError, DeviceMemoryError
from radixserve.kv import KVPool, device_state
from radixserve.native import KernelBuildError

logger = logging.getLogger(__name__)
Options = Mapping[str, Any]  # keywords of a backend's own; each takes what it knows
_INSTEAD = "or use --attention-backend torch, which is slower"


def _torch(pool: KVPool, num_heads: int, options: Options) -> AttentionBackend:
    return TorchBackend(pool, num_heads)


def _cpu(pool: KVPool, num_heads: int, options: Options) -> AttentionBackend:
    if pool.device.type != "cpu" or pool.dtype not in DTYPES:
        raise ConfigError(f"--attention-backend cpu: expected float32 or bfloat16 on a CPU, got {pool.dtype} on {pool.device}; {_INSTEAD}")
    try:
        return CpuBackend(pool, num_heads)
    except KernelBuildError as error:
        raise ConfigError(f"--attention-backend cpu: {error}; {_INSTEAD}") from error


def _flashinfer(pool: KVPool, num_heads: int, options: Options) -> AttentionBackend:
    if reason := why_not_flashinfer(pool):
        raise ConfigError(f"--attention-backend flashinfer: {reason}; {_INSTEAD}")
    known = {name: value for name, value in options.items() if name in ("cost", "fixed_split_pages", "workspace_bytes")}
    needs = _Needs("nvcc, a C++ compiler and ninja", INSTALL, known.get("workspace_bytes", WORKSPACE_BYTES) + EAGER_INT_WORKSPACES_BYTES)
    return _warmed_up("flashinfer", pool, lambda: FlashInferBackend(pool, num_heads, **known), needs)


def _triton(pool: KVPool, num_heads: int, options: Options) -> AttentionBackend:
    if reason := why_not_triton(pool, num_heads):
        raise ConfigError(f"--attention-backend triton: {reason}; {_INSTEAD}")
    needs = _Needs("a C compiler, and the Triton that its torch asks for", "pip install triton", SCRATCH_BYTES)
    return _warmed_up("triton", pool, lambda: TritonBackend(pool, num_heads), needs)


class _Needs(NamedTuple):
    to_compile: str
    install: str
    num_bytes: int  # of workspaces


# what a package says of which a part is missing, or that was written for other callers
_WRONG_PACKAGE = (AttributeError, ImportError, TypeError)


def _warmed_up(name: str, pool: KVPool, make: Callable[[], FlashInferBackend | TritonBackend], needs: _Needs) -> AttentionBackend:
    """ConfigError, in one line, where its kernels do not compile or run; the error's own lines are in the traceback. DeviceMemoryError and
    DeviceError are no reason to try another backend: it would find the same."""
    try:
        backend = make()
        backend.warm_up()
        device_state.synchronize(pool.device)
    except ConfigError:
        raise
    except Exception as error:  # whatever an allocator, a compiler, a loader or a driver says
        if device_state.is_out_of_memory(error):
            raise DeviceMemoryError(_memory_sentence(name, needs.num_bytes, pool, error)) from error
        device_state.check_usable(pool.device, error, f"--attention-backend {name}", "with another one, such as torch")
        what = f"{type(error).__name__}: {device_state.first_line(error)}"
        if isinstance(error, _WRONG_PACKAGE):
            why = f"the installed package is broken, or a version that this one cannot use ({what}); {needs.install}"
        else:
            why = f"its kernels cannot be compiled or run here ({what}); they need {needs.to_compile}"
        raise ConfigError(f"--attention-backend {name}: {why}; {_INSTEAD}") from error
    return backend


def _memory_sentence(name: str, num_bytes: int, pool: KVPool, error: BaseException) -> str:
    return (
        f"--attention-backend {name}: no memory for its {num_bytes / 2**20:.0f} MiB of workspaces and its kernels: "
        f"{device_state.free_memory(pool.device)} beside a KV pool of {pool.size_bytes / 2**20:.0f} MiB "
        f"({pool.num_pages * pool.page_size} tokens); lower --max-total-tokens or --mem-fraction-static, or end what else uses the "
        f"device ({device_state.first_line(error)})"
    )


_MAKERS: dict[str, Callable[[KVPool, int, Options], AttentionBackend]] = {
    "flashinfer": _flashinfer,
    "triton": _triton,
    "torch": _torch,
    "cpu": _cpu,
}
# what "auto" tries, by the pool's device; torch does everything, so it ends each list
_ORDER = {"cuda": ("flashinfer", "triton", "torch"), "cpu": ("cpu", "torch")}
NAMES = ("auto", *_MAKERS)


def make_attention_backend(name: str, pool: KVPool, num_heads: int, options: Options | None = None) -> AttentionBackend:
    """The backend called `name` over `pool`. "auto" is the best one for the pool's device and dtype that can be had here.

    ConfigError for any other name, and for one that cannot be had: another device or dtype, no compiler, no package. DeviceMemoryError and
    DeviceError, for "auto" too, where memory does not suffice or the device fails.
    """
    if name not in NAMES:
        raise ConfigError(f"--attention-backend: expected one of {', '.join(NAMES)}, got {name!r}")
    device_state.settle(pool.device, "loading the model")
    if pool.stored_dtype != pool.dtype:
        return _of_stored_fp8(name, pool, num_heads, options or {})
    if name != "auto":
        return _MAKERS[name](pool, num_heads, options or {})
    reasons: list[str] = []  # but for a library that cannot be built: the engine says so, once for all that is native
    for candidate in _ORDER.get(pool.device.type, ("torch",)):
        try:
            backend = _MAKERS[candidate](pool, num_heads, options or {})
        except DeviceMemoryError:
            raise
        except ConfigError as error:
            if not isinstance(error.__cause__, KernelBuildError):
                reasons.append(error.message.removesuffix(f"; {_INSTEAD}"))  # it is what is being done
            continue
        if reasons:
            plain = "plain torch" if candidate == "torch" else candidate
            logger.warning("attention runs on %s, slower than the best for %s: %s", plain, pool.device.type, "; ".join(reasons))
        return backend
    raise AssertionError("torch makes a backend of any pool")


def _of_stored_fp8(name: str, pool: KVPool, num_heads: int, options: Options) -> AttentionBackend:
    """FlashInfer's kernels alone read K and V that are stored in 8 bits: nothing is tried instead."""
    if name not in ("auto", "flashinfer"):
        raise ConfigError(f"--kv-cache-dtype fp8_e4m3: expected --attention-backend flashinfer, got {name}")
    try:
        return _flashinfer(pool, num_heads, options)
    except DeviceMemoryError:
        raise
    except ConfigError as error:
        reason = error.message.removesuffix(f"; {_INSTEAD}")
        raise ConfigError(f"{reason}; --kv-cache-dtype fp8_e4m3 is for these kernels only: use auto") from error
