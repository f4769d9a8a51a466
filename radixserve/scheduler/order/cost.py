"""CostModel: what a request is expected to cost, in seconds of the machine. For the order of the `cost` policy, not for promises.

prefill(n)        a n + b n^2: a prompt of n tokens alone. A match of p saves prefill(p), so what is left is prefill(n) - prefill(p):
                  linears see n - p tokens, attention n^2 - p^2
decode(r)         c per token that it is expected to generate: what one more row adds to a step that runs anyway
pressure(t)       a per token that must be evicted for it and is expected to be wanted again: it will be computed again
queue             - credit per pass that it has waited (order/policies.py)
"""

from dataclasses import dataclass

from radixserve.scheduler.pressure import CLIP_MAX_NEW_TOKENS
from radixserve.scheduler.state import RequestState


@dataclass(frozen=True, slots=True)
class CostModel:
    """From figures of the default model in bench/LOG.md (2026-11-30, 2 cores, native kernels): a and b solve the cold times to first token
    of 1,024 and 2,048 tokens (0.710 and 1.639 s; they give 4.15 s for 4,096, measured 4.45), c is what a row of 512 tokens of context adds
    to a decode step (0.218 ms, and 1.56 us for each token of context). Only ratios matter to the order."""

    prefill_s_per_token: float = 5.86e-4
    prefill_s_per_token2: float = 1.05e-7
    decode_s_per_token: float = 1.02e-3

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens * (self.prefill_s_per_token + num_tokens * self.prefill_s_per_token2)

    def decode_s(self, state: RequestState) -> float:
        """Of all that it may still ask for, as admission expects it."""
        return min(state.request.sampling.max_tokens - state.num_output, CLIP_MAX_NEW_TOKENS) * self.decode_s_per_token

    def pressure_s(self, num_tokens: float) -> float:
        return num_tokens * self.prefill_s_per_token
