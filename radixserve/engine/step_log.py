"""StepLog: the lines an operator reads, in SGLang's wording."""

import logging
from collections.abc import Callable

from radixserve.core import ScheduledBatch
from radixserve.metrics import EngineStats

logger = logging.getLogger("radixserve.engine")


class StepLog:
    """One line per batch with prompt chunks, one every `decode_interval` batches without. Throughput is per second spent in steps."""

    def __init__(self, decode_interval: int, shows_chunk_size: bool = False) -> None:
        """shows_chunk_size: end prompt lines with the chunk size that the next step may take."""
        self._decode_interval = decode_interval
        self._shows_chunk_size = shows_chunk_size
        self._num_decode_steps = 0
        self._decode_s = 0.0  # since the last decode line
        self._num_decoded = 0
        self._num_cached = 0

    def after_step(self, batch: ScheduledBatch, stats: Callable[[], EngineStats], step_s: float) -> None:
        """`step_s`: how long the batch took. `stats` is asked where a line is due, which it seldom is."""
        if batch.num_decode_rows < len(batch.rows):
            self._prefill_line(batch, stats(), step_s)
            return
        self._num_decode_steps += 1
        self._decode_s += step_s
        self._num_decoded += len(batch.rows)
        if self._num_decode_steps % self._decode_interval == 0:
            self._decode_line(stats())

    def _prefill_line(self, batch: ScheduledBatch, stats: EngineStats, step_s: float) -> None:
        chunks = [row for row in batch.rows if not row.is_decode]
        num_new_tokens = sum(row.count for row in chunks)
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, #queue-req: %d, "
            "input throughput (token/s): %.2f%s",
            sum(row.request is not None for row in chunks),
            num_new_tokens,
            stats.cached_tokens_total - self._num_cached,
            stats.token_usage,
            stats.num_running,
            stats.num_waiting,
            num_new_tokens / max(step_s, 1e-9),
            f", next chunk: {stats.max_prompt_tokens_per_step}" if self._shows_chunk_size else "",
        )
        self._num_cached = stats.cached_tokens_total

    def _decode_line(self, stats: EngineStats) -> None:
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, gen throughput (token/s): %.2f, #queue-req: %d",
            stats.num_running,
            stats.locked_tokens + stats.private_tokens,
            stats.token_usage,
            self._num_decoded / max(self._decode_s, 1e-9),
            stats.num_waiting,
        )
        self._decode_s, self._num_decoded = 0.0, 0
