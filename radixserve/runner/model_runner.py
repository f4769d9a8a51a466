"""ModelRunner: executes a ScheduledBatch. It holds the page table, the sampling settings and the last token of every slot;
it knows neither requests' texts nor who owns a page.
"""

import time
from typing import Protocol

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch
from radixserve.core import ScheduledBatch, StepOutput, StepTimes
from radixserve.kv import KVPool, PageTable
from radixserve.runner.batch_builder import build_forward_batch, check_rows
from radixserve.runner.sampler import sample
from radixserve.runner.slots import SlotSettings


class DecoderContract(Protocol):
    """What the runner needs of a model; models.Decoder is one."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """[num_tokens, hidden_size], after the final norm."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""


class ModelRunner:
    """Runs one model over one pool.

    vocab_size: ids at and above it are never drawn. Where a head has more rows than the tokenizer has tokens, a vocab_size of all rows
    lets those be drawn too, as transformers does; they are no text.
    """

    def __init__(self, decoder: DecoderContract, pool: KVPool, page_table: PageTable, attention: AttentionBackend, vocab_size: int) -> None:
        assert pool.page_size == page_table.page_size, (
            f"ModelRunner: expected one page size, got {pool.page_size} in the pool and {page_table.page_size} in the page table"
        )
        self._decoder = decoder
        self._pool = pool
        self._page_table = page_table
        self._attention = attention
        self._vocab_size = vocab_size
        self._slots = SlotSettings(page_table.num_slots)
        # on the device, so that the next step can start without the host having seen this one's tokens
        self._last_token_ids = torch.zeros(page_table.num_slots, dtype=torch.int64, device=pool.device)
        self._has_last_token = [False] * page_table.num_slots

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step: freed slots first, then page writes, forward, and one token for each row that wants logits.

        AssertionError, with nothing computed, where the batch breaks its contract (core.ScheduledBatch).
        """
        started = time.perf_counter()
        self._apply_slot_changes(batch)
        if not batch.rows:
            return StepOutput(batch.step, (), StepTimes(plan_s=time.perf_counter() - started))
        forward_batch = build_forward_batch(batch, self._page_table, self._last_token_ids, self._pool.device)
        self._attention.plan(forward_batch)
        planned = time.perf_counter()
        hidden = self._decoder.forward(forward_batch, self._attention)
        logits = None
        if forward_batch.logits_indices.shape[0]:
            logits = self._decoder.compute_logits(hidden.index_select(0, forward_batch.logits_indices))
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)  # else the forward's time would be counted as sampling
        forwarded = time.perf_counter()
        token_ids = self._sample(batch, logits)
        return StepOutput(batch.step, token_ids, StepTimes(planned - started, forwarded - planned, time.perf_counter() - forwarded))

    def _apply_slot_changes(self, batch: ScheduledBatch) -> None:
        check_rows(batch, self._vocab_size)
        for slot in batch.freed_slots:
            self._slots.clear(slot)
            self._page_table.clear(slot)
            self._has_last_token[slot] = False
        for row in batch.rows:
            if row.request is not None:
                self._slots.put(row.slot, row.request)
            assert self._slots.is_taken(row.slot), f"slot {row.slot}: expected a request at first sight of the slot, got None"
            assert not row.is_decode or self._has_last_token[row.slot], f"slot {row.slot}: a decode row before any token was sampled in it"
            for page_write in row.page_writes:
                highest = max(page_write.page_ids, default=0)
                assert highest <= self._pool.num_pages, f"slot {row.slot}: expected page ids in 1..{self._pool.num_pages}, got {highest}"
                self._page_table.write(row.slot, page_write)

    def _sample(self, batch: ScheduledBatch, logits: torch.Tensor | None) -> tuple[int, ...]:
        """One id per row, -1 where none is wanted; remembers them by slot."""
        wanted = [index for index, row in enumerate(batch.rows) if row.num_logits]
        result = [-1] * len(batch.rows)
        if logits is None:
            return tuple(result)
        slots = [batch.rows[index].slot for index in wanted]
        settings = self._slots.sampling_rows(slots, [batch.rows[index].output_index for index in wanted])
        token_ids = sample(logits[:, : self._vocab_size], settings)
        self._last_token_ids.index_copy_(0, torch.tensor(slots, device=token_ids.device), token_ids)
        for index, slot, token_id in zip(wanted, slots, token_ids.tolist(), strict=True):
            self._has_last_token[slot] = True
            result[index] = token_id
        return tuple(result)
