"""What the runner remembers of each slot between steps: the sampling settings of the request in it, as arrays that index at once."""

import numpy as np
import numpy.typing as npt

from radixserve.core import Request
from radixserve.runner.random import uniforms
from radixserve.runner.sampler import SamplingRows


class SlotSettings:
    """Settings by slot, taken at first sight of a request and forgotten when the slot is freed."""

    def __init__(self, num_slots: int) -> None:
        self._is_taken = np.zeros(num_slots, dtype=np.bool_)
        self._greedy = np.zeros(num_slots, dtype=np.bool_)
        self._temperature = np.zeros(num_slots, dtype=np.float64)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.zeros(num_slots, dtype=np.float64)
        self._min_p = np.zeros(num_slots, dtype=np.float64)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._choice_index = np.zeros(num_slots, dtype=np.uint64)
        self._drawing: set[int] = set()  # slots that are not greedy; mostly none, and then a step needs no look at its rows
        # how many of the likeliest tokens are wanted beside each token's log-probability; None: no log-probabilities
        self.num_top: list[int | None] = [None] * num_slots
        self.num_prompt_top: list[int | None] = [None] * num_slots

    def put(self, slot: int, request: Request) -> None:
        assert not self._is_taken[slot], f"slot {slot} was given to request {request.request_id!r} before it was freed"
        sampling = request.sampling
        self._is_taken[slot] = True
        self._greedy[slot] = sampling.is_greedy
        if not sampling.is_greedy:
            self._drawing.add(slot)
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = request.seed
        self._choice_index[slot] = request.choice_index
        self.num_top[slot] = sampling.logprobs
        self.num_prompt_top[slot] = sampling.prompt_logprobs

    def clear(self, slot: int) -> None:
        self._is_taken[slot] = False
        self._drawing.discard(slot)

    def is_taken(self, slot: int) -> bool:
        return bool(self._is_taken[slot])

    def sampling_rows(self, slots: npt.NDArray[np.int64], output_indices: npt.NDArray[np.int64]) -> SamplingRows | None:
        """Settings and uniforms of one draw per slot, output_indices[i] being the place of slots[i]'s token; None: all are greedy."""
        if not self._drawing:
            return None
        greedy = self._greedy[slots]
        uniform = np.zeros(len(slots))
        if not greedy.all():
            uniform = uniforms(self._seed[slots], self._choice_index[slots], output_indices.astype(np.uint64))
        return SamplingRows(greedy, self._temperature[slots], self._top_k[slots], self._top_p[slots], self._min_p[slots], uniform)
