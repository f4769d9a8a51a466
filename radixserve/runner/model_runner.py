"""ModelRunner: executes a ScheduledBatch. It holds the page table, the sampling settings and the last token of every slot;
it knows neither requests' texts nor who owns a page.

    hidden [num_tokens] -> logits of sampled rows -> adjustments (penalties, bias, min_tokens) -> sampler -> token ids
                                   '-> their log-probabilities, before adjustments
                        -> logits of prompt targets, some rows at a time -> their log-probabilities
"""

import time
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch
from radixserve.attention.timed import TimedAttention
from radixserve.core import RowLogprobs, ScheduledBatch, StepOutput, TokenLogprob
from radixserve.kv import KVPool, PageTable, device_state, pinned
from radixserve.runner.adjustments import LogitAdjustments
from radixserve.runner.batch_builder import build_forward_batch, check_rows
from radixserve.runner.decode_graphs import DecodeGraphs
from radixserve.runner.logprobs import token_logprobs
from radixserve.runner.pending import HostCopy, PendingStep, StepClock
from radixserve.runner.sampler import count_empty, sample
from radixserve.runner.slots import SlotSettings
from radixserve.runner.upload import Uploader


class DecoderContract(Protocol):
    """What the runner needs of a model; models.Decoder is one."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """[num_tokens, hidden_size], after the final norm."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""

    def seconds(self) -> tuple[float, float, float, float]:
        """Wall seconds so far: attention, products, norms and rotary, head; zeros where they are not measured."""


class ModelRunner:
    """Runs one model over one pool.

    vocab_size: ids at and above it are never drawn. Where a head has more rows than the tokenizer has tokens, a vocab_size of all rows
    lets those be drawn too, as transformers does; they are no text.
    eos_token_ids: ids that end a request, which min_tokens holds back.
    graphs: decode steps that run as CUDA graphs, over the same decoder, pool and attention.
    """

    def __init__(
        self,
        decoder: DecoderContract,
        pool: KVPool,
        page_table: PageTable,
        attention: AttentionBackend,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        graphs: DecodeGraphs | None = None,
    ) -> None:
        assert pool.page_size == page_table.page_size, (
            f"ModelRunner: expected one page size, got {pool.page_size} in the pool and {page_table.page_size} in the page table"
        )
        self._decoder = decoder
        self._pool = pool
        self._page_table = page_table
        self._attention = attention
        self._graphs = graphs
        self._vocab_size = vocab_size
        self._slots = SlotSettings(page_table.num_slots)
        self._adjustments = LogitAdjustments(page_table.num_slots, vocab_size, pool.device, eos_token_ids)
        # on the device, so that the next step can start without the host having seen this one's tokens
        self._last_token_ids = torch.zeros(page_table.num_slots, dtype=torch.int64, device=pool.device)
        self._last_on_host = self._last_token_ids.numpy() if pool.device.type == "cpu" else None  # the same memory
        self._has_last_token = [False] * page_table.num_slots
        self._uploader = Uploader(pool.device)
        self._parts = self._forward_parts()  # at the end of the last step

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step: freed slots first, then page writes, forward, one token for each sampled row, and the log-probabilities asked for.

        AssertionError, with nothing computed, where the batch breaks its contract (core.ScheduledBatch).
        """
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """The same without waiting for its end where the device is a GPU. The next step may be launched before that: it is queued behind,
        and decodes from the tokens that are on the device. Log-probabilities, top_k, top_p and penalties wait for the device in here.

        One thread launches all steps.
        """
        with device_state.current(self._pool.device):  # a thread begins with the first one
            return self._launch(batch)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        started, waited, clock = time.perf_counter(), self._seconds_waited(), StepClock(self._pool.device)
        self._apply_slot_changes(batch)
        if not batch.rows:
            return PendingStep(batch, [], None, (), time.perf_counter() - started, 0.0, clock, [])
        forward_batch = build_forward_batch(batch, self._page_table, self._last_token_ids, self._pool.device, self._uploader)
        graph = self._graphs.choose(forward_batch) if self._graphs is not None else None
        (graph or self._attention).plan(forward_batch)
        wait_s = self._seconds_waited() - waited
        plan_s = time.perf_counter() - started - wait_s
        clock.mark()
        if graph is not None:
            hidden = graph.replay(forward_batch.num_rows)
        else:
            hidden = self._decoder.forward(forward_batch, self._attention)
        sampled = [index for index, row in enumerate(batch.rows) if row.is_sampled]
        is_all = len(sampled) == len(batch.rows) == forward_batch.num_tokens  # and in their order
        logits = self._logits(hidden, None if is_all else forward_batch.logits_indices[: len(sampled)]) if sampled else None
        clock.mark()
        token_ids: HostCopy | None = None
        of_sampled: dict[int, TokenLogprob] = {}
        if logits is not None:
            drawn = self._sample(batch, sampled, logits)
            token_ids = HostCopy(torch.cat([drawn, count_empty(logits)]) if drawn.device.type == "cuda" else drawn)
            of_sampled = self._sampled_logprobs(batch, sampled, logits, drawn)
        of_prompt = self._prompt_logprobs(batch, hidden, forward_batch.logits_indices, len(sampled))
        before, self._parts = self._parts, self._forward_parts()
        parts = [after - earlier for after, earlier in zip(self._parts, before, strict=True)]
        clock.mark()
        return PendingStep(batch, sampled, token_ids, _row_logprobs(len(batch.rows), of_sampled, of_prompt), plan_s, wait_s, clock, parts)

    def _seconds_waited(self) -> float:
        """Seconds so far in which planning stood still until the device had read an earlier step's tables."""
        return self._uploader.waited_s + self._attention.waited_s

    def _forward_parts(self) -> tuple[float, ...]:
        """Seconds so far: attention, products, norms and rotary, head."""
        in_decoder, *others = self._decoder.seconds()
        return (in_decoder + (self._attention.seconds if isinstance(self._attention, TimedAttention) else 0.0), *others)

    def _apply_slot_changes(self, batch: ScheduledBatch) -> None:
        check_rows(batch, self._vocab_size)
        for slot in batch.freed_slots:
            self._slots.clear(slot)
            self._adjustments.clear(slot)
            self._page_table.clear(slot)
            self._has_last_token[slot] = False
        for row in batch.rows:
            if row.request is not None:
                self._slots.put(row.slot, row.request)
                self._adjustments.put(row.slot, row.request, row.output_ids)
            assert self._slots.is_taken(row.slot), f"slot {row.slot}: expected a request at first sight of the slot, got None"
            assert not row.is_decode or self._has_last_token[row.slot], f"slot {row.slot}: a decode row before any token was sampled in it"
            assert not row.target_ids or self._slots.num_prompt_top[row.slot] is not None, (
                f"slot {row.slot}: expected targets only where prompt_logprobs is set, got {len(row.target_ids)}"
            )
            for page_write in row.page_writes:
                highest = max(page_write.page_ids, default=0)
                assert highest <= self._pool.num_pages, f"slot {row.slot}: expected page ids in 1..{self._pool.num_pages}, got {highest}"
                self._page_table.write(row.slot, page_write)

    def _logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """[n, vocab_size] float32 of the tokens at indices [n], None being all of them; a head's padding is cut off."""
        logits = self._decoder.compute_logits(hidden if indices is None else hidden.index_select(0, indices))
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size]

    def _sample(self, batch: ScheduledBatch, sampled: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Token ids [n] int64 of rows `sampled`, whose logits are [n, vocab_size]; remembers them by slot. Leaves logits as they are."""
        slots = np.array([batch.rows[index].slot for index in sampled], dtype=np.int64)
        output_indices = np.array([batch.rows[index].output_index for index in sampled], dtype=np.int64)
        adjusted = self._adjustments.apply(logits, slots, output_indices)
        token_ids = sample(adjusted, self._slots.sampling_rows(slots, output_indices))
        self._adjustments.record(slots, token_ids)
        if self._last_on_host is not None:
            for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
                self._last_on_host[slot] = token_id
        else:
            self._last_token_ids.index_copy_(0, pinned.send(slots, token_ids.device), token_ids)
        for slot in slots.tolist():
            self._has_last_token[slot] = True
        return token_ids

    def _sampled_logprobs(
        self, batch: ScheduledBatch, sampled: list[int], logits: torch.Tensor, token_ids: torch.Tensor
    ) -> dict[int, TokenLogprob]:
        """By index of the row, of those of `sampled` whose request asks for them."""
        num_top = [self._slots.num_top[batch.rows[index].slot] for index in sampled]
        wanted = [place for place, k in enumerate(num_top) if k is not None]
        if not wanted:
            return {}
        index = pinned.send(np.array(wanted, dtype=np.int64), logits.device)
        logprobs = token_logprobs(
            lambda first, last: logits.index_select(0, index[first:last]),
            token_ids.index_select(0, index),
            [k for k in num_top if k is not None],
        )
        return {sampled[place]: logprob for place, logprob in zip(wanted, logprobs, strict=True)}

    def _prompt_logprobs(
        self, batch: ScheduledBatch, hidden: torch.Tensor, logits_indices: torch.Tensor, num_sampled: int
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """By index of the row, of rows with targets. The tokens whose logits say how likely each target was follow the sampled ones'."""
        with_targets = [index for index, row in enumerate(batch.rows) if row.target_ids]
        if not with_targets:
            return {}
        indices = logits_indices[num_sampled:]
        rows = [batch.rows[index] for index in with_targets]
        target_ids = pinned.send(np.concatenate([np.asarray(row.target_ids, dtype=np.int64) for row in rows]), hidden.device)
        num_top = [self._slots.num_prompt_top[row.slot] or 0 for row in rows for _ in row.target_ids]
        logprobs = iter(token_logprobs(lambda first, last: self._logits(hidden, indices[first:last]), target_ids, num_top))
        return {index: tuple(islice(logprobs, len(row.target_ids))) for index, row in zip(with_targets, rows, strict=True)}


def _row_logprobs(
    num_rows: int, of_sampled: dict[int, TokenLogprob], of_prompt: dict[int, tuple[TokenLogprob, ...]]
) -> tuple[RowLogprobs | None, ...]:
    if not of_sampled and not of_prompt:
        return ()
    return tuple(
        RowLogprobs(of_sampled.get(index), of_prompt.get(index, ())) if index in of_sampled or index in of_prompt else None
        for index in range(num_rows)
    )
