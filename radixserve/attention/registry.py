"""Names of attention backends, and how each is made."""

from collections.abc import Callable

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.torch_backend import TorchBackend
from radixserve.errors import ConfigError
from radixserve.kv import KVPool

_BACKENDS: dict[str, Callable[[KVPool, int], AttentionBackend]] = {"auto": TorchBackend, "torch": TorchBackend}


def make_attention_backend(name: str, pool: KVPool, num_heads: int) -> AttentionBackend:
    """The backend called `name` over `pool`. "auto" is the best one for the pool's device. ConfigError for any other name."""
    if name not in _BACKENDS:
        raise ConfigError(f"--attention-backend: expected one of {', '.join(_BACKENDS)}, got {name!r}")
    return _BACKENDS[name](pool, num_heads)
