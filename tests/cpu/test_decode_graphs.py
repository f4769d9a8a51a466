"""What a captured decode step may not do is caught, batches find the right graph, and index tables are sent in one piece."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from radixserve.attention.batch import ForwardBatch, padding_batch
from radixserve.engine.graphs import GraphPlan, capture_graphs
from radixserve.errors import ConfigError
from radixserve.kv import PageTable
from radixserve.runner.decode_graphs import Captured, DecodeGraphs, graph_sizes
from radixserve.runner.upload import Uploader
from tests.support.recorded_graph import GraphRecorder, HostAccessError

CPU = torch.device("cpu")


class Doubler:
    """A model whose hidden state is 2 * token + position, and attention without keys."""

    name = "doubler"

    def __init__(self, harm: Callable[[ForwardBatch], object] = lambda batch: None) -> None:
        self._harm = harm
        self.num_planned: list[int] = []
        self.wants_eager = False

    def forward(self, batch: ForwardBatch, attention: object) -> torch.Tensor:
        self._harm(batch)
        return (2 * batch.input_ids + batch.positions)[:, None]

    def decode_graph(self, num_rows: int, indices: torch.Tensor) -> "Doubler":
        assert len(indices) == 12
        return self

    def prefers_eager(self, batch: ForwardBatch) -> bool:
        return self.wants_eager

    def can_hold(self, batch: ForwardBatch) -> bool:
        return batch.kv_indices.shape[0] <= 12

    def plan(self, batch: ForwardBatch) -> None:
        self.num_planned.append(batch.num_rows)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q


def make_graphs(model: Doubler, recorder: GraphRecorder) -> DecodeGraphs:
    return DecodeGraphs(model, model, [1, 2, 4], 12, 1, CPU, recorder)


def batch_of(ids: list[int], positions: list[int]) -> ForwardBatch:
    return padding_batch(torch.tensor(ids), len(ids), 1, torch.tensor(positions))


def test_a_replay_computes_the_new_batch_in_the_old_places() -> None:
    model, recorder = Doubler(), GraphRecorder()
    graphs = make_graphs(model, recorder)
    assert graphs.sizes == [1, 2, 4] and model.num_planned == [4, 2, 1]
    places = set()
    for ids, positions in (([5, 6, 7], [1, 2, 3]), ([9, 8, 7, 6], [4, 4, 4, 4]), ([1, 1, 2], [0, 9, 0])):
        batch = batch_of(ids, positions)
        graph = graphs.choose(batch)
        assert graph is not None and graph.size == 4
        graph.plan(batch)
        hidden = graph.replay(batch.num_rows)
        assert hidden[:, 0].tolist() == [2 * token + position for token, position in zip(ids, positions)]
        places.add(hidden.data_ptr())
    assert len(places) == 1
    assert recorder.graphs[0].num_replays == 3


def test_which_graph() -> None:
    model = Doubler()
    graphs = make_graphs(model, GraphRecorder())
    for n, size in ((1, 1), (2, 2), (3, 4), (4, 4)):
        graph = graphs.choose(batch_of([1] * n, [0] * n))
        assert graph is not None and graph.size == size
    assert graphs.choose(batch_of([1] * 5, [0] * 5)) is None
    model.wants_eager = True
    assert graphs.choose(batch_of([1], [0])) is None


@pytest.mark.parametrize(
    "harm",
    [
        lambda batch: batch.input_ids.sum().item(),
        lambda batch: batch.input_ids.cpu(),
        lambda batch: batch.input_ids.tolist(),
        lambda batch: batch.input_ids.nonzero(),
        lambda batch: batch.input_ids[batch.positions > 0],
        lambda batch: bool((batch.input_ids > 0).all()),
        lambda batch: torch.tensor([1, 2]),
    ],
    ids=["item", "cpu", "tolist", "nonzero", "boolean index", "branch", "upload"],
)
def test_host_access_inside_of_a_graph_is_caught(harm: Callable[[ForwardBatch], object]) -> None:
    with pytest.raises(HostAccessError):
        make_graphs(Doubler(harm), GraphRecorder())


def test_sizes_end_at_the_most_rows() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64)[-3:] == [48, 56, 64]
    sizes = graph_sizes(512)
    assert sizes == sorted(set(sizes)) and len(sizes) == 31
    assert all(larger - size <= max(8, larger / 5) for size, larger in pairwise(sizes))


def test_one_piece_by_two_buffers_in_turn() -> None:
    """Packed on the CPU as it would be for a GPU: what was sent last stays readable on the host while the next is written."""
    uploader = Uploader(CPU, is_packed=True)
    sent = []
    for step in range(6):
        arrays = {
            "a": np.arange(3, dtype=np.int32) + step,
            "none": np.zeros(0, dtype=np.int64),
            "b": np.arange(10**step, dtype=np.int64) * step,
        }
        one = uploader.upload(arrays)
        for name, array in arrays.items():
            assert one.host[name].dtype == one.device[name].dtype == torch.from_numpy(array).dtype
            assert np.array_equal(one.host[name], array) and np.array_equal(one.device[name], array)
        assert one.device["a"].untyped_storage().data_ptr() == one.device["b"].untyped_storage().data_ptr()
        assert one.host["a"].untyped_storage().data_ptr() != one.device["a"].untyped_storage().data_ptr()
        if sent:
            assert sent[-1].host["a"].tolist() == [step - 1, step, step + 1]
        assert all(earlier.device["a"][0] == place for place, earlier in enumerate(sent))
        sent.append(one)


@pytest.mark.parametrize("is_memory", [True, False])
def test_memory_that_the_driver_lacks_is_one_sentence(is_memory: bool) -> None:
    def capture(function: Callable[[], torch.Tensor]) -> Captured:
        raise RuntimeError("CUDA error: out of memory" if is_memory else "CUDA error: an illegal memory access")

    model = Doubler()
    kind, sentence = (
        (ConfigError, "no memory for 3 CUDA graphs of up to 4 rows.*--cuda-graph-max-bs") if is_memory else (RuntimeError, "illegal")
    )
    with pytest.raises(kind, match=sentence):
        capture_graphs(GraphPlan([1, 2, 4], 12), model, model, PageTable(4, 4, 1), capture)
