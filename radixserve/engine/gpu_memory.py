"""What the memory of a GPU is divided into, counted before the pool is made: weights, what steps and graphs need, and the pool."""

from dataclasses import dataclass, fields

import torch

from radixserve.attention.flashinfer_backend import EAGER_INT_WORKSPACES_BYTES
from radixserve.attention.flashinfer_workspace import WORKSPACE_BYTES
from radixserve.attention.triton_backend import SCRATCH_BYTES
from radixserve.errors import DeviceMemoryError
from radixserve.models.config import ModelConfig
from radixserve.runner.logprobs import ROWS_AT_ONCE
from radixserve.runner.sampler import ROWS_SORTED_AT_ONCE

DEFAULT_FRACTION = 0.92  # of all memory: what the driver, cuBLAS and the allocator's rounding take is beside it
_LIBRARY_BYTES = 256 << 20  # cuBLAS workspaces and compiled kernels, loaded at the first step
# FlashInfer's workspaces of integers, beside what is counted for it; or Triton's scratch, which is there instead
_ATTENTION_BYTES = max(EAGER_INT_WORKSPACES_BYTES, SCRATCH_BYTES)
_GRAPH_BYTES = 4 << 20  # the kernels' arguments and the attention's workspace of one graph
_ALLOCATOR_SLACK = 1.25

# Bytes for each row and token of the vocabulary
SAMPLING_BYTES = 32  # float32: the adjusted copy, the drawn rows' part, without NaN, by temperature, softmax, filtered; its sums, float64
LOGPROB_BYTES = 20  # float32: logits, without NaN, log_softmax of both; the model's own type
SORTED_BYTES = 56  # float32: p, logits, sorted, p sorted; their ids, int64; sums, float64, twice; and the sort's own double buffers
PENALTY_BYTES = 4 + 1  # how often a token is in the output, int32, and whether it is known (runner/adjustments.py)

# NCCL makes a channel for each of a GPU's links, at most so many, and in each the buffers of a connection (512 KiB, 4.7 and 4 MiB for its
# protocols) to a neighbour in the ring and two in the tree. They are made when ranks connect, after the pool.
_NCCL_BYTES = 24 * 3 * (9 << 20)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Bytes that the pool must leave."""

    activations: int  # of the largest step
    logits: int  # of all sampled rows, in the model's type and in float32
    sampling: int  # what sampling, or log-probabilities, make of them
    penalties: int  # token counts of all slots, from the first request with a penalty on
    graphs: int
    attention: int  # workspaces of its kernels
    nccl: int  # buffers between ranks; 0 for one
    libraries: int

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        """In MiB, without parts of 0."""
        sizes = {part.name: getattr(self, part.name) / 2**20 for part in fields(self)}
        return ", ".join(f"{name} {size:.0f}" for name, size in sizes.items() if size)


def estimate_reserve(
    model: ModelConfig,
    dtype: torch.dtype,
    num_tokens: int,
    num_rows: int,
    graphs: list[int],
    num_indices: int,
    num_ranks: int = 1,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Reserve:
    """model: a rank's part; num_tokens: of the largest step; graphs: rows of each; num_indices: page ids that graphs can
    take; workspace_bytes: of attention's partial results."""
    # the widest moment of a layer: hidden and its norm, and either q, k, v and what attention makes of them, or gate, up and their product
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = 3 * model.hidden_size + max(2 * heads, 3 * model.intermediate_size)
    token_bytes = widest * dtype.itemsize + 64  # and its index tables
    # ranks' parts come together on the first one, and are put side by side in a copy
    logit_bytes = dtype.itemsize * (1 if num_ranks == 1 else 3) + 4
    sorted_rows = SORTED_BYTES * min(num_rows, ROWS_SORTED_AT_ONCE)
    by_sampling = SAMPLING_BYTES * num_rows + sorted_rows
    by_logprobs = (LOGPROB_BYTES + logit_bytes - 4) * min(ROWS_AT_ONCE, num_tokens) + SORTED_BYTES * min(num_tokens, ROWS_SORTED_AT_ONCE)
    return Reserve(
        activations=int(num_tokens * token_bytes * _ALLOCATOR_SLACK),
        logits=int(num_rows * model.vocab_size * logit_bytes * _ALLOCATOR_SLACK),
        sampling=int(max(by_sampling, by_logprobs) * model.vocab_size * _ALLOCATOR_SLACK),
        penalties=num_rows * model.vocab_size * PENALTY_BYTES,
        graphs=int(max(graphs, default=0) * token_bytes * _ALLOCATOR_SLACK) + len(graphs) * _GRAPH_BYTES + 4 * num_indices,
        attention=_ATTENTION_BYTES + workspace_bytes,
        nccl=_NCCL_BYTES if num_ranks > 1 else 0,
        libraries=_LIBRARY_BYTES,
    )


def gpu_pool_bytes(free: int, total: int, weights: int, reserve: Reserve, fraction: float | None) -> int:
    """Bytes for the pool, weights being loaded already: weights and pool together are `fraction` of the total (SGLang's meaning), or, where
    none is given, all that is left of 0.92 of it beside the reserve; never more than is free beside the reserve.

    DeviceMemoryError, with all numbers and what to change, where nothing is left.
    """
    wanted = int(total * fraction) - weights if fraction is not None else int(total * DEFAULT_FRACTION) - weights - reserve.total
    num_bytes = min(wanted, free - reserve.total)
    if num_bytes <= 0:
        raise DeviceMemoryError(out_of_memory_sentence(free, total, weights, reserve, fraction))
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


def division(pool: int, weights: int, reserve: Reserve) -> str:
    """One line at start."""
    return (
        f"GPU memory: weights {weights / 2**20:.0f} MiB, KV pool {pool / 2**20:.0f} MiB, "
        f"left for steps {reserve.total / 2**20:.0f} MiB ({reserve})"
    )
