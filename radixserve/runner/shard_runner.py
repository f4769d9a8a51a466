"""ShardRunner: what a rank other than 0 does of a step: its part of the forward and of the logits, in the order of rank 0's ModelRunner.

It samples nothing and knows no request: the tokens that rank 0 drew come with the next batch.
"""

import numpy as np
import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.core import IntArray, ScheduledBatch
from radixserve.kv import KVPool, PageTable, pinned
from radixserve.runner.batch_builder import build_forward_batch
from radixserve.runner.logprobs import row_ranges
from radixserve.runner.model_runner import DecoderContract
from radixserve.runner.upload import Uploader


class ShardRunner:
    def __init__(self, decoder: DecoderContract, pool: KVPool, page_table: PageTable, attention: AttentionBackend) -> None:
        self._decoder = decoder
        self._page_table = page_table
        self._attention = attention
        self._device = pool.device
        self._uploader = Uploader(pool.device)
        self._last_token_ids = torch.zeros(page_table.num_slots, dtype=torch.int64, device=pool.device)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch, decode_ids: IntArray) -> None:
        """decode_ids: the input token of each decode row. `batch` is one that rank 0 executes too, which checks it."""
        for slot in batch.freed_slots:
            self._page_table.clear(slot)
        for row in batch.rows:
            for page_write in row.page_writes:
                self._page_table.write(row.slot, page_write)
        if not batch.rows:
            return
        if decode_ids:
            slots = pinned.send(np.array([row.slot for row in batch.rows[: len(decode_ids)]], dtype=np.int64), self._device)
            self._last_token_ids.index_copy_(0, slots, pinned.send(np.array(decode_ids, dtype=np.int64), self._device))
        forward_batch = build_forward_batch(batch, self._page_table, self._last_token_ids, self._device, self._uploader)
        self._attention.plan(forward_batch)
        hidden = self._decoder.forward(forward_batch, self._attention)
        sampled, targets = self._logits_indices(batch, forward_batch.logits_indices)
        if len(sampled):
            self._decoder.compute_logits(hidden.index_select(0, sampled))
        for first, last in row_ranges(len(targets)):
            self._decoder.compute_logits(hidden.index_select(0, targets[first:last]))

    def _logits_indices(self, batch: ScheduledBatch, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_sampled = sum(row.is_sampled for row in batch.rows)
        return indices[:num_sampled], indices[num_sampled:]
