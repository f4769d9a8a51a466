"""How many bytes of tensors are alive at once while something runs, by following every storage that an operation makes."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """`with PeakMemory() as memory:` then memory.peak: the most bytes at one time. What a kernel takes for itself alone is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self._size = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage(), given)
        return result

    def _follow(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in self._live or key in given:  # a view, or what was there before
            return
        self._live[key] = storage.nbytes()
        self._size += self._live[key]
        self.peak = max(self.peak, self._size)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._size -= self._live.pop(key)
