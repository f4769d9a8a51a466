"""Index tables of a step on their way to the device: packed into one pinned buffer, sent by one copy that the host does not wait for.

Two buffers take turns, and one is written again only when the copy out of it has been made: a host that runs a step ahead
would overwrite numbers that the device has yet to read.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from radixserve.kv import pinned

_ALIGNMENT = 16  # bytes
_MIN_BYTES = 1 << 16
Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(slots=True)
class _Buffer:
    host: torch.Tensor
    copied: torch.cuda.Event | None = None  # recorded behind the copy


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The same arrays by name: on the host, in memory that stays as it is until the next but one upload, and on the device."""

    host: dict[str, torch.Tensor] = field(default_factory=dict)
    device: dict[str, torch.Tensor] = field(default_factory=dict)


class Uploader:
    """For a CPU it hands out views of the arrays; is_packed=True makes it pack and copy there too, for tests."""

    def __init__(self, device: torch.device, *, is_packed: bool | None = None) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._is_host = device.type == "cpu"
        self._is_packed = self._is_cuda if is_packed is None else is_packed
        self.waited_s = 0.0  # for the device, of all uploads so far
        self._buffers = [_Buffer(self._empty(_MIN_BYTES)) for _ in range(2)] if self._is_packed else []

    def upload(self, arrays: Arrays) -> Uploaded:
        """Send all of them. Any dtypes, one-dimensional or not."""
        if not self._is_packed:
            views = {name: torch.from_numpy(array) for name, array in arrays.items()}
            return Uploaded(views, views if self._is_host else {name: view.to(self._device) for name, view in views.items()})
        ends, end = {}, 0
        for name, array in arrays.items():
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + array.nbytes
            ends[name] = (start, end)
        buffer = self._next_buffer(end)
        on_device = torch.empty(end, dtype=torch.uint8, device=self._device)
        sent = Uploaded()
        for name, array in arrays.items():
            view = torch.from_numpy(array)
            start, stop = ends[name]
            sent.host[name] = buffer.host[start:stop].view(view.dtype).view(view.shape)
            sent.host[name].copy_(view)
            sent.device[name] = on_device[start:stop].view(view.dtype).view(view.shape)
        on_device.copy_(buffer.host[:end], non_blocking=True)
        if self._is_cuda:
            buffer.copied = buffer.copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.copied.record()
        return sent

    def _next_buffer(self, num_bytes: int) -> _Buffer:
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer.copied is not None:
            start = time.perf_counter()
            buffer.copied.synchronize()
            self.waited_s += time.perf_counter() - start
        if buffer.host.shape[0] < num_bytes:
            buffer.host = self._empty(max(num_bytes, 2 * buffer.host.shape[0]))
        return buffer

    def _empty(self, num_bytes: int) -> torch.Tensor:
        with torch.inference_mode(False):  # else a later call outside of inference mode could not write to it
            if pinned.is_needed(self._device):
                return pinned.empty((num_bytes,), torch.uint8)
            return torch.empty(num_bytes, dtype=torch.uint8)
