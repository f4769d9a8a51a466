"""An engine process that computes nothing: every running request gets one token at a steady rate, so that what is measured is the server.

Output token i of a request is its prompt's token i, round and round. As an engine's process: `python -m bench.paced_engine RATE PHASES`.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from radixserve.config import EngineConfig
from radixserve.core import FinishReason, Request, RequestOutput
from radixserve.engine.info import EngineInfo
from radixserve.engine.process import main
from radixserve.metrics import EngineStats
from radixserve.tokenizer.tokenizer import Tokenizer

CONTEXT_LENGTH = 8192
MAX_STREAMS = 4096


@dataclass(slots=True)
class _Row:
    request: Request
    phase: int
    num_tokens: int = 0
    is_cut: bool = False


class PacedEngine:
    """`rate_hz` tokens a second for each request, which are dealt to `phases` steps per period; 1: all in one message, like a real step."""

    def __init__(self, config: EngineConfig, rate_hz: float, phases: int) -> None:
        assert config.model_path is not None
        self.info = EngineInfo(
            model_name="paced",
            model_path="",
            dtype="none",
            device="none",
            attention_backend="none",
            linear_backend="none",
            quantization="none",
            context_length=CONTEXT_LENGTH,
            max_total_tokens=CONTEXT_LENGTH * MAX_STREAMS,
            pool_size_bytes=0,
            page_size=1,
            schedule_policy="none",
            vocab_size=Tokenizer.from_directory(Path(config.model_path)).vocab_size,
            eos_token_ids=(),
            is_radix_cache_disabled=True,
            max_running_requests=MAX_STREAMS,
            chunked_prefill_size=CONTEXT_LENGTH,
        )
        self._interval_s = 1 / (rate_hz * phases)
        self._phases = phases
        self._rows: dict[str, _Row] = {}
        self._num_added = 0
        self._num_steps = 0
        self._next_at = time.monotonic()

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def add(self, request: Request) -> None:
        self._rows[request.request_id] = _Row(request, self._num_added % self._phases)
        self._num_added += 1

    def abort(self, request_id: str) -> None:
        if request_id in self._rows:
            self._rows[request_id].is_cut = True

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        self.abort(request_id)

    def step(self) -> list[RequestOutput]:
        now = time.monotonic()
        self._next_at = max(self._next_at + self._interval_s, now)  # no burst after a pause
        time.sleep(self._next_at - now)
        phase = self._num_steps % self._phases
        self._num_steps += 1
        sent_at = time.monotonic()
        outputs = [self._advance(row, sent_at) for row in self._rows.values() if row.phase == phase]
        for output in outputs:
            if output.is_final:
                del self._rows[output.request_id]
        return outputs

    def _advance(self, row: _Row, sent_at: float) -> RequestOutput:
        """queue_time_s, which means nothing here, carries the time of sending."""
        request, prompt = row.request, row.request.prompt_ids
        if row.is_cut:
            return RequestOutput(request.request_id, (), len(prompt), 0, row.num_tokens, FinishReason.ABORT)
        token_id = prompt[row.num_tokens % len(prompt)]
        row.num_tokens += 1
        reason = FinishReason.LENGTH if row.num_tokens == request.sampling.max_tokens else None
        return RequestOutput(request.request_id, (token_id,), len(prompt), 0, row.num_tokens, reason, queue_time_s=sent_at)

    def flush_cache(self) -> bool:
        return not self._rows

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._rows), decode_steps_total=self._num_steps)

    def close(self) -> None:
        pass

    def check_idle(self) -> None:
        pass


if __name__ == "__main__":
    status = main(lambda config: PacedEngine(config, float(sys.argv[1]), int(sys.argv[2])))
    sys.stderr.flush()
    os._exit(status)
