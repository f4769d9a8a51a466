"""A launch must not wait for the device, or nothing is a step ahead on a GPU. Tensors of the meta device have no values, so whoever reads
one fails; copies that the host would wait for are caught by how they are asked for.
"""

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from radixserve.attention.batch import ForwardBatch, padding_batch
from radixserve.attention.decode_groups import RowGroup
from radixserve.attention.decode_tables import shared_tables
from radixserve.core import PageWrite, Request, SamplingParams, ScheduledBatch, ScheduledRow
from radixserve.kv import KVPool, PageTable
from radixserve.runner.model_runner import ModelRunner
from radixserve.runner.upload import Uploader

META = torch.device("meta")
VOCAB_SIZE = 600  # more than the sampler's candidates


class NoWaits(TorchFunctionMode):
    """AssertionError for a copy to the device that the host waits for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor") and result.device == META:
            raise AssertionError(f"torch.{name} copies to the device and waits")
        if name in ("to", "copy_") and args[0].device != (result if name == "to" else args[1]).device:
            assert kwargs.get("non_blocking"), f"Tensor.{name} without non_blocking waits"
        return result


class Embedder:
    """A model of one table."""

    def forward(self, batch: ForwardBatch, attention: object) -> torch.Tensor:
        return torch.empty(batch.num_tokens, 8, device=META)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.empty(hidden.shape[0], VOCAB_SIZE, device=META)

    def seconds(self) -> tuple[float, float, float, float]:
        return 0.0, 0.0, 0.0, 0.0


class NoAttention:
    name = "none"

    def plan(self, batch: ForwardBatch) -> None: ...

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q


def launch(sampling: list[SamplingParams]) -> None:
    """Prompts of two tokens, then a step of decode rows."""
    runner = ModelRunner(Embedder(), KVPool(1, 16, 4, 1, 8, torch.float32, META), PageTable(4, 4, 4, META), NoAttention(), VOCAB_SIZE, (2,))
    runner._uploader = Uploader(META, is_packed=True)
    prompts = tuple(
        ScheduledRow(
            slot, 0, 2, array("i", [3, 4]), (PageWrite(0, array("i", [slot + 1])),), True, 0, Request(str(slot), array("i", [3, 4]), one)
        )
        for slot, one in enumerate(sampling)
    )
    decodes = tuple(ScheduledRow(slot, 2, 1, array("i"), is_sampled=True, output_index=1) for slot in range(len(sampling)))
    with NoWaits():
        for step, rows in enumerate((prompts, decodes)):
            pending = runner.launch(ScheduledBatch(step, rows))
            assert pending.drawn is not None and pending.sampled == list(range(len(sampling)))


GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=1)
BIASED = SamplingParams(temperature=0.7, min_p=0.1, min_tokens=4, logit_bias=((5, 1.0),))


@pytest.mark.parametrize("sampling", [[GREEDY, GREEDY], [DRAWN], [GREEDY, DRAWN, BIASED]], ids=["greedy", "drawn", "mixed"])
def test_a_launch_waits_for_nothing(sampling: list[SamplingParams]) -> None:
    launch(sampling)


@pytest.mark.parametrize("waits", [SamplingParams(temperature=0.7, top_p=0.5), SamplingParams(repetition_penalty=1.3)])
def test_what_has_to_look_at_the_device_is_seen(waits: SamplingParams) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        launch([waits])


def test_tables_of_shared_rows_are_sent_without_waiting() -> None:
    batch = padding_batch(torch.zeros(3, dtype=torch.int64), 3, 4, rows=[(9, 1)] * 3)
    on_device = {name: getattr(batch, name).to(META) for name in ("input_ids", "kv_indices")}
    fields = {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
    with NoWaits():
        tables = shared_tables(ForwardBatch(**(fields | on_device)), [RowGroup((0, 2), 2)])
    assert tables.order is not None and tables.order.device == META
    np.testing.assert_array_equal(tables.own.seq_lens, [1, 1, 9])
