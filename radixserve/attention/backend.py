"""The contract of attention kernels: plan once a step, run once a layer."""

from typing import Protocol

import torch

from radixserve.attention.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Made with the KVPool whose pages it reads and writes."""

    name: str

    @property
    def waited_s(self) -> float:
        """Seconds of all plans so far in which the host waited for the device; 0.0 where plans do not wait."""

    def plan(self, batch: ForwardBatch) -> None:
        """Take note of the step's index tables. Called once before the layers of a step."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v of this step's tokens at batch.out_slots of `layer`, then attend.

        q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim], rotary already applied, all in the pool's dtype.
        Returns [num_tokens, num_heads, head_dim]. The memory of q, k and v is the caller's and is overwritten later: keep no view of it.
        """
