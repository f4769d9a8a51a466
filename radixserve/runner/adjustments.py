"""What changes logits before they are sampled, by slot. Every part touches the rows that ask for it alone, in this order:

  1. repetition_penalty r   logits of tokens in prompt or output so far: divided by r where positive, else multiplied by r
  2. frequency_penalty f    minus f * (how often the token is in the output so far)
  3. presence_penalty p     minus p if the token is in the output so far
  4. logit_bias             added
  5. min_tokens             -inf for EOS (unless ignore_eos) and stop_token_ids while the output is shorter than that
Temperature, filters and the draw follow in the sampler; greedy rows take the argmax of what comes out here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixserve.core import IntArray, Request
from radixserve.kv import pinned


class LogitAdjustments:
    """Settings and token counts by slot. The counts, num_slots * vocab_size * 5 bytes on the device, exist from the first penalty on."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = eos_token_ids
        self._has_penalty = np.zeros(num_slots, dtype=np.bool_)
        self._has_bias = np.zeros(num_slots, dtype=np.bool_)
        self._repetition = np.ones(num_slots, dtype=np.float32)
        self._frequency = np.zeros(num_slots, dtype=np.float32)
        self._presence = np.zeros(num_slots, dtype=np.float32)
        self._min_tokens = np.zeros(num_slots, dtype=np.int64)
        self._bias_ids = [np.zeros(0, dtype=np.int64)] * num_slots
        self._biases = [np.zeros(0, dtype=np.float32)] * num_slots
        self._stop_ids = [np.zeros(0, dtype=np.int64)] * num_slots
        self._asking: set[int] = set()  # slots with any of these; mostly none, and then a step needs no look at its rows
        self._num_in_output: torch.Tensor | None = None  # [num_slots, vocab_size] int32
        self._is_known: torch.Tensor | None = None  # [num_slots, vocab_size] bool: in prompt or output

    def put(self, slot: int, request: Request, output_ids: IntArray) -> None:
        """Take over a request; output_ids are what it has generated before, if it resumes."""
        sampling = request.sampling
        self._has_penalty[slot] = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1.0, 0.0, 0.0)
        if self._has_penalty[slot]:
            self._repetition[slot] = sampling.repetition_penalty
            self._frequency[slot] = sampling.frequency_penalty
            self._presence[slot] = sampling.presence_penalty
            self._count(slot, request.prompt_ids, output_ids)
        self._has_bias[slot] = bool(sampling.logit_bias)
        if sampling.logit_bias:
            self._bias_ids[slot] = np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int64)
            self._biases[slot] = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
            self._check_ids("logit_bias", slot, self._bias_ids[slot])
        stop_ids = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self._eos_token_ids)
        # an id beyond the vocabulary is never drawn anyway
        self._stop_ids[slot] = np.array([token_id for token_id in stop_ids if token_id < self._vocab_size], dtype=np.int64)
        self._min_tokens[slot] = sampling.min_tokens if len(self._stop_ids[slot]) else 0
        if self._has_penalty[slot] or self._has_bias[slot] or self._min_tokens[slot]:
            self._asking.add(slot)
        else:
            self._asking.discard(slot)

    def clear(self, slot: int) -> None:
        self._asking.discard(slot)
        self._has_penalty[slot] = self._has_bias[slot] = False
        self._min_tokens[slot] = 0

    def apply(self, logits: torch.Tensor, slots: npt.NDArray[np.int64], output_indices: npt.NDArray[np.int64]) -> torch.Tensor:
        """logits [n, vocab_size] float32 of the rows in `slots` -> those to sample from: the same tensor where nobody asks, else a copy."""
        if not self._asking:
            return logits
        penalised = np.flatnonzero(self._has_penalty[slots])
        biased = np.flatnonzero(self._has_bias[slots])
        too_short = np.flatnonzero(output_indices < self._min_tokens[slots])
        if not (len(penalised) or len(biased) or len(too_short)):
            return logits
        logits = logits.clone()
        if len(penalised):
            self._penalise(logits, penalised, slots[penalised])
        if len(biased):
            row_slots = slots[biased]
            biases = self._to_device(np.concatenate([self._biases[slot] for slot in row_slots]))
            logits.index_put_(self._places(biased, [self._bias_ids[slot] for slot in row_slots]), biases, accumulate=True)
        if len(too_short):
            places = self._places(too_short, [self._stop_ids[slot] for slot in slots[too_short]])
            logits.index_put_(places, torch.full((), -torch.inf, device=self._device))  # made there: torch.tensor would copy, and wait
        return logits

    def record(self, slots: npt.NDArray[np.int64], token_ids: torch.Tensor) -> None:
        """Count tokens [n] just drawn in `slots` (each at most once)."""
        if not self._asking:
            return
        penalised = np.flatnonzero(self._has_penalty[slots])
        if len(penalised):
            assert self._num_in_output is not None and self._is_known is not None
            places = self._to_device(slots[penalised]), token_ids.index_select(0, self._to_device(penalised))
            self._num_in_output[places] += 1
            self._is_known[places] = True

    def _count(self, slot: int, prompt_ids: IntArray, output_ids: IntArray) -> None:
        if self._num_in_output is None or self._is_known is None:
            shape = len(self._has_penalty), self._vocab_size
            self._num_in_output = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._is_known = torch.zeros(shape, dtype=torch.bool, device=self._device)
        prompt, output = np.asarray(prompt_ids, dtype=np.int64), np.asarray(output_ids, dtype=np.int64)
        self._check_ids("prompt", slot, prompt)
        self._check_ids("output", slot, output)
        # also what wipes the counts of the slot's last request
        self._num_in_output[slot] = self._to_device(np.bincount(output, minlength=self._vocab_size).astype(np.int32))
        self._is_known[slot] = self._to_device(np.bincount(np.concatenate([prompt, output]), minlength=self._vocab_size) > 0)

    def _penalise(self, logits: torch.Tensor, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Change `rows` of logits [n, vocab_size] in place; only the tokens known there, which are few beside a vocabulary, are touched."""
        assert self._num_in_output is not None and self._is_known is not None
        slot_index = self._to_device(slots)
        which, token_ids = self._is_known.index_select(0, slot_index).nonzero(as_tuple=True)
        places = self._to_device(rows)[which], token_ids
        repetition, frequency, presence = (
            self._to_device(by_slot[slots])[which] for by_slot in (self._repetition, self._frequency, self._presence)
        )
        num_in_output = self._num_in_output[slot_index[which], token_ids]
        known = logits[places]
        known = torch.where(known > 0, known / repetition, known * repetition)
        logits[places] = known - frequency * num_in_output - presence * (num_in_output > 0)

    def _places(self, rows: npt.NDArray[np.int64], ids: Sequence[npt.NDArray[np.int64]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, token id) of every id, flat."""
        return self._to_device(np.repeat(rows, [len(row_ids) for row_ids in ids])), self._to_device(np.concatenate(ids))

    def _check_ids(self, what: str, slot: int, ids: npt.NDArray[np.int64]) -> None:
        if len(ids):
            low, high = ids.min(), ids.max()
            assert 0 <= low <= high < self._vocab_size, f"slot {slot}: expected {what} ids in 0..{self._vocab_size - 1}, got {low}..{high}"

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return pinned.send(values, self._device)
