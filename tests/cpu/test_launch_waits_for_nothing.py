"""A launch must not wait for the device, or nothing is a step ahead on a GPU. Tensors of the meta device have no values, so whoever reads
one fails; copies that the host would wait for, or out of memory that is not pinned, are caught by how they are asked for.
"""

import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch, padding_batch
from radixserve.attention.decode_groups import RowGroup
from radixserve.attention.decode_tables import decode_tables, extend_tables, shared_tables
from radixserve.attention.flashinfer_backend import PlanGuard
from radixserve.attention.timed import TimedAttention
from radixserve.core import PageWrite, Request, SamplingParams, ScheduledBatch, ScheduledRow
from radixserve.kv import KVPool, PageTable, pinned
from radixserve.runner.model_runner import ModelRunner
from radixserve.runner.pending import PendingStep
from radixserve.runner.shard_runner import ShardRunner
from radixserve.runner.upload import Uploader
from tests.support.pinned_memory import PinnedMemory

META = torch.device("meta")
VOCAB_SIZE = 600  # more than the sampler's candidates


class NoWaits(TorchFunctionMode):
    """AssertionError for a copy to the device that the host waits for, or that is made out of memory that is not pinned."""

    def __init__(self, memory: PinnedMemory) -> None:
        self.memory = memory
        self.num_copies = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor") and result.device == META:
            raise AssertionError(f"torch.{name} copies to the device and waits")
        if name in ("to", "copy_") and args[0].device != (result if name == "to" else args[1]).device:
            assert kwargs.get("non_blocking"), f"Tensor.{name} without non_blocking waits"
            assert self.memory.holds(args[name == "copy_"]), f"Tensor.{name} out of memory that is not pinned"
            self.num_copies += 1
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

    def __init__(self, wait_s: float = 0.0) -> None:
        self.waited_s, self.wait_s = 0.0, wait_s

    def plan(self, batch: ForwardBatch) -> None:
        time.sleep(self.wait_s)
        self.waited_s += self.wait_s

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> NoWaits:
    memory = PinnedMemory()
    memory.install(monkeypatch, META)
    return NoWaits(memory)


def launch(sampling: list[SamplingParams], no_waits: NoWaits, attention: AttentionBackend | None = None) -> PendingStep:
    """Prompts of two tokens, then a step of decode rows."""
    pool, page_table = KVPool(1, 16, 4, 1, 8, torch.float32, META), PageTable(4, 4, 4, META)
    runner = ModelRunner(Embedder(), pool, page_table, attention or NoAttention(), VOCAB_SIZE, (2,))
    runner._uploader = Uploader(META, is_packed=True)
    prompts = tuple(
        ScheduledRow(
            slot, 0, 2, array("i", [3, 4]), (PageWrite(0, array("i", [slot + 1])),), True, 0, Request(str(slot), array("i", [3, 4]), one)
        )
        for slot, one in enumerate(sampling)
    )
    decodes = tuple(ScheduledRow(slot, 2, 1, array("i"), is_sampled=True, output_index=1) for slot in range(len(sampling)))
    with no_waits:
        for step, rows in enumerate((prompts, decodes)):
            pending = runner.launch(ScheduledBatch(step, rows))
            assert pending.drawn is not None and pending.sampled == list(range(len(sampling)))
    return pending


GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=1)
BIASED = SamplingParams(temperature=0.7, min_p=0.1, min_tokens=4, logit_bias=((5, 1.0),))


@pytest.mark.parametrize("sampling", [[GREEDY, GREEDY], [DRAWN], [GREEDY, DRAWN, BIASED]], ids=["greedy", "drawn", "mixed"])
def test_a_launch_waits_for_nothing(sampling: list[SamplingParams], no_waits: NoWaits) -> None:
    launch(sampling, no_waits)
    assert no_waits.num_copies >= 4  # tables and slots, of two steps


@pytest.mark.parametrize("waits", [SamplingParams(temperature=0.7, top_p=0.5), SamplingParams(repetition_penalty=1.3)])
def test_what_has_to_look_at_the_device_is_seen(waits: SamplingParams, no_waits: NoWaits) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        launch([waits], no_waits)


def test_copies_out_of_other_memory_are_seen(no_waits: NoWaits) -> None:
    with no_waits, pytest.raises(AssertionError, match="not pinned"):
        torch.arange(3).to(META, non_blocking=True)


def test_tables_of_shared_rows_are_sent_without_waiting(no_waits: NoWaits) -> None:
    batch = padding_batch(torch.zeros(3, dtype=torch.int64), 3, 4, rows=[(9, 1)] * 3)
    on_device = {name: getattr(batch, name).to(META) for name in ("input_ids", "kv_indices")}
    fields = {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
    with no_waits:
        tables = shared_tables(ForwardBatch(**(fields | on_device)), [RowGroup((0, 2), 2)])
    assert tables.order is not None and tables.order.device == META
    np.testing.assert_array_equal(tables.own.seq_lens, [1, 1, 9])


@pytest.mark.parametrize("rows", [[(9, 1)] * 3, [(9, 1), (12, 4)], [(12, 4)]], ids=["decode", "mixed", "prompts"])
def test_a_batch_of_pinned_tables_gives_pinned_tables(rows: list[tuple[int, int]], no_waits: NoWaits) -> None:
    """What planners copy to the device, whichever way it was cut out of a batch."""
    num_decode = sum(new == 1 for _, new in rows)
    batch = padding_batch(torch.zeros(sum(new for _, new in rows), dtype=torch.int64), num_decode, 4, rows=rows)
    fields = {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
    fields |= {name: pinned.pin(fields[name], META) for name in fields if name.endswith("_host")}
    batch = ForwardBatch(**(fields | {"kv_indices": batch.kv_indices.to(META)}))
    tables = [extend_tables(batch)] if len(rows) > num_decode else []
    if num_decode:
        tables += [decode_tables(batch), decode_tables(batch).padded(num_decode + 2, torch.zeros(4, dtype=torch.int32, device=META))]
    if num_decode > 2:
        shared = shared_tables(batch, [RowGroup((0, 2), 2)])
        tables += [shared.own, shared.groups]
    for one in tables:
        for table in (one.qo_indptr, one.kv_indptr, one.last_page_len, one.seq_lens):
            assert no_waits.memory.holds(table) and table.dtype == torch.int32


class Copied:
    """The event of a copy that takes its time."""

    def synchronize(self) -> None:
        time.sleep(0.02)

    def record(self) -> None: ...


@pytest.mark.parametrize("backend", [lambda: NoAttention(wait_s=0.02), lambda: TimedAttention(NoAttention(wait_s=0.02))])
def test_what_planning_waits_for_the_device_is_told_apart(no_waits: NoWaits, backend: Callable[[], AttentionBackend]) -> None:
    """A step that is planned ahead stands still until the one before has read its tables: that is no cost of planning."""
    start = time.perf_counter()
    pending = launch([GREEDY], no_waits, backend())
    elapsed = time.perf_counter() - start
    assert pending.wait_s == pytest.approx(0.02) and 0 < pending.plan_s <= elapsed - 2 * 0.02
    guard = PlanGuard(torch.device("cpu"))
    guard._planned = Copied()  # type: ignore[assignment]
    for _ in range(2):
        assert guard.waited_s == 0.0
        with guard:
            pass
    assert guard.waited_s >= 0.02
    uploader = Uploader(META, is_packed=True)
    uploader._buffers[1].copied = Copied()  # type: ignore[assignment]
    uploader.upload({"a": np.arange(3)})
    assert uploader.waited_s >= 0.02


def test_another_ranks_step_waits_for_nothing(no_waits: NoWaits) -> None:
    runner = ShardRunner(Embedder(), KVPool(1, 16, 4, 1, 8, torch.float32, META), PageTable(4, 4, 4, META), NoAttention())
    runner._uploader = Uploader(META, is_packed=True)
    prompt = ScheduledRow(0, 0, 2, array("i", [3, 4]), (PageWrite(0, array("i", [1])),), True, 0)
    decode = ScheduledRow(0, 2, 1, array("i"), is_sampled=True, output_index=1)
    with no_waits:
        runner.execute(ScheduledBatch(0, (prompt,)), array("i"))
        num_copies = no_waits.num_copies
        runner.execute(ScheduledBatch(1, (decode,)), array("i", [7]))
    assert num_copies == 1 and no_waits.num_copies == num_copies + 3, "tables; and with them slots and tokens of decode rows"
