"""Stands in for pinned memory where there is no driver: plain memory, of which it is known which that is."""

import pytest
import torch

from radixserve.kv import pinned


class PinnedMemory:
    """Once installed, copies to `device` count as a GPU's: kv/pinned.py gives them memory that holds() knows."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}  # kept, so that no address is given out twice

    def install(self, patch: pytest.MonkeyPatch, device: torch.device) -> None:
        plain_empty = torch.empty

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            made = plain_empty(tuple(shape), dtype=dtype)
            self._made[made.untyped_storage().data_ptr()] = made
            return made

        patch.setattr(pinned, "is_needed", lambda where: where.type == device.type)
        patch.setattr(pinned, "empty", empty)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Empty tensors lie nowhere and count as pinned: nothing is copied."""
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._made
