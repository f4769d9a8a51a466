"""A stand-in for a CUDA graph on the CPU: it records every operation of a capture with its very tensors, and replays just those.

So whatever Python decides per step, reads on the host or allocates anew after the capture is missing from a replay, as it is on a GPU.
What a capture may not do (read a value on the host, bring one from there, depend on a count of elements) fails at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from radixserve.runner.decode_graphs import Captured

_FORBIDDEN_OPS = {
    "aten::_local_scalar_dense": "reads a value on the host",
    "aten::item": "reads a value on the host",
    "aten::nonzero": "its shape depends on values",
    "aten::masked_select": "its shape depends on values",
    "aten::unique_dim": "its shape depends on values",
    "aten::_unique2": "its shape depends on values",
    "aten::lift_fresh": "brings values from the host",
    "aten::is_pinned": "is about host memory",
}
_FORBIDDEN_METHODS = ("cpu", "numpy", "tolist", "item", "pin_memory", "__bool__", "__int__", "__float__", "__index__", "nonzero")


class HostAccessError(AssertionError):
    """A capture did what no CUDA graph can hold."""


class _NoHostAccess(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _FORBIDDEN_METHODS and not self.recorder.is_paused:
            raise HostAccessError(f"Tensor.{name} inside of a graph")
        return func(*args, **(kwargs or {}))

    def __init__(self, recorder: "RecordedGraph") -> None:
        super().__init__()
        self.recorder = recorder


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_paused = False
        self.num_replays = 0
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.is_paused:
            name = func._schema.name
            if name in _FORBIDDEN_OPS:
                raise HostAccessError(f"{name} inside of a graph: {_FORBIDDEN_OPS[name]}")
            if name in ("aten::index", "aten::index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1]):
                raise HostAccessError(f"{name} by a mask inside of a graph: its shape depends on values")
            self.calls.append((func, args, kwargs, result))
        return result

    def kernel(self, launch: Callable[[], None]) -> None:
        """A kernel that torch does not know: one node of the graph, whatever it does inside."""
        self.is_paused = True
        try:
            launch()
        finally:
            self.is_paused = False
        self.calls.append((launch, (), {}, None))

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, recorded in self.calls:
            result = func(*args, **kwargs)
            for tensor, new in zip(tree_leaves(recorded), tree_leaves(result)):
                # views and in-place operations have written where they should already
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != new.data_ptr():
                    tensor.copy_(new)


class GraphRecorder:
    """A Capture (runner/decode_graphs.py). Give `kernel` to whoever launches kernels of his own."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self._open: RecordedGraph | None = None

    def __call__(self, function: Callable[[], torch.Tensor]) -> Captured:
        function()
        self._open = graph = RecordedGraph()
        with _NoHostAccess(graph), graph:
            output = function()
        self._open = None
        self.graphs.append(graph)
        return Captured(output, graph.replay)

    def kernel(self, launch: Callable[[], None]) -> None:
        if self._open is None:
            launch()
        else:
            self._open.kernel(launch)
