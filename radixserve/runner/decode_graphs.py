"""CUDA graphs of decode steps: the decoder's forward, captured once for each of a few numbers of rows and replayed for any batch that fits.

A graph reads and writes the same addresses for ever. So a batch is copied into buffers that all graphs share, rows that are not there run
as padding (token 0 at position 0, K and V to the padding page), and everything that depends on lengths is in what plan() refills.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch, padding_batch


class GraphAttention(AttentionBackend, Protocol):
    """Attention of one graph: plan() takes any decode batch that it can hold, run() reads fixed addresses."""

    def can_hold(self, batch: ForwardBatch) -> bool: ...


class GraphableAttention(Protocol):
    """An AttentionBackend whose decode rows can be part of a graph."""

    def decode_graph(self, num_rows: int, indices: torch.Tensor) -> GraphAttention: ...

    def prefers_eager(self, batch: ForwardBatch) -> bool: ...


class ForwardContract(Protocol):
    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor: ...


class Captured(NamedTuple):
    output: torch.Tensor  # written again by every replay
    replay: Callable[[], None]


Capture = Callable[[Callable[[], torch.Tensor]], Captured]


def graph_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that get a graph, rising; the last is max_rows. Padding is less than a third of any batch above 8 rows."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class CudaCapture:
    """Captures into one memory pool: graphs are replayed one at a time, so that the next may write where the last has.

    And on one stream, warm-up included: cuBLAS keeps a workspace of tens of megabytes for each stream that it ever ran on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._aside: Any = None

    def __call__(self, function: Callable[[], torch.Tensor]) -> Captured:
        current = torch.cuda.current_stream(self._device)
        aside = self._aside = self._aside or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            function()  # kernels are compiled and libraries set up, which no capture may see
        current.wait_stream(aside)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=aside):
            output = function()
        self._pool = graph.pool()
        return Captured(output, graph.replay)


class DecodeGraph:
    """One number of rows. Plan a batch, then replay it."""

    def __init__(self, decoder: ForwardContract, attention: GraphAttention, buffers: ForwardBatch, capture: Capture) -> None:
        self.size = buffers.num_rows
        self.attention = attention
        self._buffers = buffers
        attention.plan(buffers)
        self._hidden, self._replay = capture(lambda: decoder.forward(buffers, attention))

    def plan(self, batch: ForwardBatch) -> None:
        n = batch.num_rows
        for buffer, values in ((self._buffers.input_ids, batch.input_ids), (self._buffers.positions, batch.positions)):
            buffer[:n].copy_(values)
            buffer[n:].zero_()
        self.attention.plan(batch)

    def replay(self, num_rows: int) -> torch.Tensor:
        """[num_rows, hidden_size] of the planned batch; valid until the next replay of any graph."""
        self._replay()
        return self._hidden[:num_rows]


class DecodeGraphs:
    """The graphs of all sizes. Call it, and plan and replay, under torch.inference_mode()."""

    def __init__(
        self,
        decoder: ForwardContract,
        attention: GraphableAttention,
        sizes: Sequence[int],
        num_indices: int,
        page_size: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """num_indices: page ids that a step may read in a graph, padding included; longer steps run without."""
        self._attention = attention
        largest = sizes[-1]
        num_indices = max(num_indices, largest)
        # ids of the padding page: a stale one is never read, but if it were, it would be in range
        indices = torch.zeros(num_indices, dtype=torch.int32, device=device)
        buffers = padding_batch(torch.zeros(largest, dtype=torch.int64, device=device), largest, page_size)
        graphs = []
        for size in reversed(sizes):  # the largest first: the others then find their memory in its
            of_size = padding_batch(buffers.input_ids[:size], size, page_size, buffers.positions[:size])
            graphs.append(DecodeGraph(decoder, attention.decode_graph(size, indices), of_size, capture))
        self._graphs = graphs[::-1]

    @property
    def sizes(self) -> list[int]:
        return [graph.size for graph in self._graphs]

    def choose(self, batch: ForwardBatch) -> DecodeGraph | None:
        """The smallest graph that holds the batch; None for one with prompt rows, a larger one, or one that is better off without."""
        if not batch.num_rows or batch.num_rows > batch.num_decode_rows:
            return None
        graph = next((graph for graph in self._graphs if graph.size >= batch.num_rows), None)
        if graph is None or not graph.attention.can_hold(batch) or self._attention.prefers_eager(batch):
            return None
        return graph
