"""What the memory of a GPU is divided into, counted before the pool is made: weights, what steps and graphs need, and the pool."""

from dataclasses import dataclass, fields

import torch

from radixserve.errors import ConfigError
from radixserve.models.config import ModelConfig

DEFAULT_FRACTION = 0.92  # of all memory: what the driver, cuBLAS and the allocator's rounding take is beside it
_LIBRARY_BYTES = 256 << 20  # cuBLAS workspaces and compiled kernels, loaded at the first step
_ATTENTION_BYTES = 192 << 20  # FlashInfer's workspaces; Triton's scratch, which is there instead of them, is less
_GRAPH_BYTES = 4 << 20  # the kernels' arguments and the attention's workspace of one graph
_ALLOCATOR_SLACK = 1.25


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes that the pool must leave."""

    activations: int  # of the largest step
    logits: int  # of all rows and what sampling makes of them
    graphs: int
    attention: int
    libraries: int

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        return ", ".join(f"{part.name} {getattr(self, part.name) / 2**20:.0f}" for part in fields(self))


def estimate_reserve(
    model: ModelConfig, dtype: torch.dtype, num_tokens: int, num_rows: int, graphs: list[int], num_indices: int
) -> Reserve:
    """num_tokens: of the largest step; graphs: rows of each; num_indices: page ids that graphs can take."""
    # the widest moment of a layer: hidden and its norm, and either q, k, v and what attention makes of them, or gate, up and their product
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = 3 * model.hidden_size + max(2 * heads, 3 * model.intermediate_size)
    token_bytes = widest * dtype.itemsize + 64  # and its index tables
    # float32 logits, and beside them a copy to adjust, softmax, a sort's values and ids, running sums in float64
    logits = num_rows * model.vocab_size * (dtype.itemsize + 4 * 5 + 8 * 2)
    return Reserve(
        activations=int(num_tokens * token_bytes * _ALLOCATOR_SLACK),
        logits=int(logits * _ALLOCATOR_SLACK),
        graphs=int(max(graphs, default=0) * token_bytes * _ALLOCATOR_SLACK) + len(graphs) * _GRAPH_BYTES + 4 * num_indices,
        attention=_ATTENTION_BYTES,
        libraries=_LIBRARY_BYTES,
    )


def gpu_pool_bytes(free: int, total: int, weights: int, reserve: Reserve, fraction: float | None) -> int:
    """Bytes for the pool, weights being loaded already: weights and pool together are `fraction` of the total (SGLang's meaning), or, where
    none is given, all that is left of 0.92 of it beside the reserve; never more than is free beside the reserve.

    ConfigError, with all numbers and what to change, where nothing is left.
    """
    wanted = int(total * fraction) - weights if fraction is not None else int(total * DEFAULT_FRACTION) - weights - reserve.total
    num_bytes = min(wanted, free - reserve.total)
    if num_bytes <= 0:
        raise ConfigError(out_of_memory_sentence(free, total, weights, reserve, fraction))
    return num_bytes


def out_of_memory_sentence(free: int, total: int, weights: int, reserve: Reserve, fraction: float | None) -> str:
    def mib(size: int) -> str:
        return f"{size / 2**20:.0f} MiB"

    limit = f"--mem-fraction-static {fraction:g}" if fraction is not None else f"a limit of {DEFAULT_FRACTION:g}"
    return (
        f"no memory is left for the KV pool: the GPU has {mib(total)}, of which {mib(free)} are free beside {mib(weights)} of weights; "
        f"steps need {mib(reserve.total)} ({reserve}; in MiB), and {limit} of the GPU is taken. Lower --chunked-prefill-size, "
        "--max-running-requests or --cuda-graph-max-bs, end what else uses the GPU, raise --mem-fraction-static, or take a smaller model"
    )
