"""RankGroup: one process's place among those that compute a model together (--tp-size), and the two collectives of a forward.

Rank 0 has the scheduler and samples. gloo on a CPU, NCCL on GPUs, over loopback or this machine's own links only. No object is ever
sent: tensors of known shape and type. The process groups are plain objects here, not torch's global one: two engines share nothing.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

# between two collectives lies at most a layer of a step; a rank that is gone is noticed at once, this is for one that hangs
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
CONNECT_TIMEOUT = timedelta(seconds=60)


class RankLostError(RuntimeError):
    """A collective failed: another rank has ended, or hangs. Which one and why is for the engine to find out."""


class _Collectives(Protocol):
    """What torch's process groups have in common. The stubs leave these methods out of the backends, where they are."""

    def allreduce(self, tensors: list[torch.Tensor]) -> "dist.Work": ...
    def gather(self, outputs: list[torch.Tensor], part: torch.Tensor, root: int) -> "dist.Work": ...
    def abort(self) -> None: ...


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Where ranks meet before they use the links between GPUs, unless the user has said. Rank 0 is in his process: it is taken back."""
    if "NCCL_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["NCCL_SOCKET_IFNAME"]


class RankGroup:
    """Every rank makes the same calls with tensors of the same shapes, in the same order. connect() comes before all of them."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        assert 0 <= rank < size, f"RankGroup: expected a rank in 0..{size - 1}, got {rank}"
        self.rank = rank
        self.size = size
        self.device = device
        self._group: _Collectives | None = None

    def connect(self, directory: Path) -> None:
        """Meet the other ranks through a file in `directory`, private to them. RankLostError if one does not come."""
        with _loopback() if self.device.type == "cuda" else contextlib.nullcontext():
            try:
                store = dist.FileStore(str(directory / "ranks"), self.size)  # type: ignore[attr-defined]  # documented, and not in the stubs' __all__
                store.set_timeout(CONNECT_TIMEOUT)
                self._group = self._nccl(store) if self.device.type == "cuda" else self._gloo(store)
            except RuntimeError as error:
                raise RankLostError(str(error)) from error
            self.sum(torch.zeros(1, device=self.device))  # at which NCCL reads its environment, meets, and takes its buffers

    def _gloo(self, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # without options it listens on other addresses too
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = COLLECTIVE_TIMEOUT
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _nccl(self, store: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place and returned; contiguous, any shape, the model's type."""
        assert self._group is not None, "RankGroup: sum() before connect()"
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise RankLostError(str(error)) from error
        return tensor

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """part [n, m] -> on rank 0 [n, size * m], the ranks' columns side by side; elsewhere `part` itself."""
        assert self._group is not None, "RankGroup: gather() before connect()"
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        try:
            self._group.gather(parts, part, 0).wait()
        except RuntimeError as error:
            raise RankLostError(str(error)) from error
        return torch.cat(parts, dim=1) if parts else part

    def abort(self) -> None:
        """NCCL, from any thread: whoever waits in a collective of this rank waits no longer. gloo needs no such help."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.abort()
