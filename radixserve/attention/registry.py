"""Names of attention backends, and how each is made."""

import logging

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.cpu_backend import DTYPES, CpuBackend
from radixserve.attention.torch_backend import TorchBackend
from radixserve.attention.triton_backend import TritonBackend, reason_against
from radixserve.errors import ConfigError
from radixserve.kv import KVPool
from radixserve.native import KernelBuildError

logger = logging.getLogger(__name__)

NAMES = ("auto", "torch", "cpu", "triton")


def make_attention_backend(name: str, pool: KVPool, num_heads: int) -> AttentionBackend:
    """The backend called `name` over `pool`. "auto" is the best one for the pool's device and dtype that can be had here.

    ConfigError for any other name, for "cpu" where its kernel cannot be (another device or dtype, or no compiler), and for "triton" where
    triton_backend.reason_against() has something against it.
    """
    if name not in NAMES:
        raise ConfigError(f"--attention-backend: expected one of {', '.join(NAMES)}, got {name!r}")
    if name == "triton" or (name == "auto" and pool.device.type == "cuda"):
        reason = reason_against(pool, num_heads)
        if reason is None:
            return TritonBackend(pool, num_heads)
        if name == "triton":
            raise ConfigError(f"--attention-backend triton: {reason}; or use --attention-backend torch, which is slower")
        logger.warning("attention runs on plain torch, several times slower than Triton's kernels: %s", reason)
    is_possible = pool.device.type == "cpu" and pool.dtype in DTYPES
    if name == "torch" or (name == "auto" and not is_possible):
        return TorchBackend(pool, num_heads)
    if not is_possible:
        raise ConfigError(f"--attention-backend cpu: expected float32 or bfloat16 on a CPU, got {pool.dtype} on {pool.device}; use torch")
    try:
        return CpuBackend(pool, num_heads)
    except KernelBuildError as error:
        if name == "cpu":
            raise ConfigError(f"--attention-backend cpu: {error}; or use --attention-backend torch, which is slower") from error
        logger.warning("attention runs on plain torch, several times slower than the CPU kernel: %s", error)
        return TorchBackend(pool, num_heads)
