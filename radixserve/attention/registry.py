"""Names of attention backends, how each is made, and which comes first where nobody chose. A new one is a function and two entries."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.cpu_backend import DTYPES, CpuBackend
from radixserve.attention.flashinfer_backend import FlashInferBackend
from radixserve.attention.flashinfer_package import broken_sentence
from radixserve.attention.flashinfer_package import why_not as why_not_flashinfer
from radixserve.attention.torch_backend import TorchBackend
from radixserve.errors import ConfigError
from radixserve.kv import KVPool
from radixserve.native import KernelBuildError

logger = logging.getLogger(__name__)
Options = Mapping[str, Any]  # keywords of a backend's own; each takes what it knows


def _torch(pool: KVPool, num_heads: int, options: Options) -> AttentionBackend:
    return TorchBackend(pool, num_heads)


def _cpu(pool: KVPool, num_heads: int, options: Options) -> AttentionBackend:
    if pool.device.type != "cpu" or pool.dtype not in DTYPES:
        raise ConfigError(f"--attention-backend cpu: expected float32 or bfloat16 on a CPU, got {pool.dtype} on {pool.device}; use torch")
    try:
        return CpuBackend(pool, num_heads)
    except KernelBuildError as error:
        raise ConfigError(f"--attention-backend cpu: {error}; or use --attention-backend torch, which is slower") from error


def _flashinfer(pool: KVPool, num_heads: int, options: Options) -> AttentionBackend:
    if reason := why_not_flashinfer(pool):
        raise ConfigError(f"--attention-backend flashinfer: {reason}; or use --attention-backend torch, which is slower")
    known = {name: value for name, value in options.items() if name in ("cost", "fixed_split_pages")}
    backend = FlashInferBackend(pool, num_heads, **known)
    try:
        backend.warm_up()
    except Exception as error:  # whatever a compiler, a loader or a driver says
        raise ConfigError(f"--attention-backend flashinfer: {broken_sentence(error)}") from error
    return backend


_MAKERS: dict[str, Callable[[KVPool, int, Options], AttentionBackend]] = {
    "flashinfer": _flashinfer,
    "torch": _torch,
    "cpu": _cpu,
}
# what "auto" tries, by the pool's device; torch does everything, so it ends each list
_ORDER = {"cuda": ("flashinfer", "torch"), "cpu": ("cpu", "torch")}
NAMES = ("auto", *_MAKERS)


def make_attention_backend(name: str, pool: KVPool, num_heads: int, options: Options | None = None) -> AttentionBackend:
    """The backend called `name` over `pool`. "auto" is the best one for the pool's device and dtype that can be had here.

    ConfigError for any other name, and for one that cannot be had: another device or dtype, no compiler, no package.
    """
    if name not in NAMES:
        raise ConfigError(f"--attention-backend: expected one of {', '.join(NAMES)}, got {name!r}")
    if name != "auto":
        return _MAKERS[name](pool, num_heads, options or {})
    reasons: list[str] = []
    for candidate in _ORDER.get(pool.device.type, ("torch",)):
        try:
            backend = _MAKERS[candidate](pool, num_heads, options or {})
        except ConfigError as error:
            reasons.append(error.message)
            continue
        if reasons:
            logger.warning("attention runs on plain %s, several times slower than the best here: %s", backend.name, "; ".join(reasons))
        return backend
    raise AssertionError("torch makes a backend of any pool")
