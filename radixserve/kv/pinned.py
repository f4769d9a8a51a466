"""Host numbers on their way to a GPU, always out of pinned memory: a copy from any other is staged by the driver, piece by piece.

torch keeps pinned memory and hands it out again only once the copies out of it are over, so that whoever sends something may forget it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def is_needed(device: torch.device) -> bool:
    """Whether copies to and from the device want pinned memory."""
    return device.type == "cuda"


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def pin(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same numbers on the host, where a copy to the device can start from; the table itself where that needs nothing."""
    if not is_needed(device):
        return table
    return empty(table.shape, table.dtype).copy_(table)


def send(values: torch.Tensor | npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The same numbers on the device, by a copy that the host does not wait for."""
    table = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return pin(table, device).to(device, non_blocking=True)
