"""A small engine under the real engine contract: output token i of a request is prompt[i % len(prompt)], one per step.

So a test chooses the output by choosing the prompt. All run at once; --max-queued-requests refuses as the scheduler does, which counts
those beyond max_running_requests as waiting. Log-probabilities are a function of the token id alone, those of a prompt come in two
outputs. It re-uses prefixes by comparing with all earlier prompts, one by one.
"""

import dataclasses
import time
from itertools import takewhile

from radixserve.config import EngineConfig
from radixserve.core import FinishReason, Namespace, Request, RequestOutput, TokenLogprob
from radixserve.engine.info import EngineInfo
from radixserve.errors import InvalidRequestError, QueueFullError
from radixserve.metrics import EngineStats
from tests.support.byte_tokenizer import CRASH_ID, EOS_ID, REFUSE_ID, SLOW_ID, VOCAB_SIZE

CONTEXT_LENGTH = 1000
SLOW_STEP_S = 60.0


@dataclasses.dataclass(slots=True)
class _Running:
    request: Request
    num_cached: int
    num_tokens: int = 0
    end: FinishReason | None = None
    cut_at: int | None = None
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    is_half_sent: bool = False


def _common_length(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def echo_logprob(token_id: int, num_top: int) -> TokenLogprob:
    """The token is the likeliest, the ones after it (in a circle) follow."""
    first = -(1 + token_id % 7) / 8
    return TokenLogprob(token_id, first, tuple(((token_id + rank) % VOCAB_SIZE, first - rank) for rank in range(num_top)))


def _prompt_logprobs(request: Request) -> list[TokenLogprob]:
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return []
    return [echo_logprob(token_id, num_top) for token_id in request.prompt_ids[max(1, request.sampling.prompt_logprobs_start) :]]


class EchoEngine:
    def __init__(self, config: EngineConfig, step_s: float = 0.0) -> None:
        self.info = EngineInfo(
            model_name="echo",
            model_path="",
            dtype="none",
            device="none",
            attention_backend="none",
            linear_backend="none",
            quantization="none",
            context_length=CONTEXT_LENGTH,
            max_total_tokens=config.cache.max_total_tokens or 10 * CONTEXT_LENGTH,
            pool_size_bytes=0,
            page_size=1,
            schedule_policy="fcfs",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_ID,),
            is_radix_cache_disabled=False,
            max_running_requests=64,
            chunked_prefill_size=512,
        )
        self._step_s = step_s
        limit = config.scheduler.max_queued_requests
        self._max_unfinished = None if limit is None else limit + self.info.max_running_requests
        self._running: dict[str, _Running] = {}
        self._known: dict[Namespace, list[list[int]]] = {}
        self._stats = EngineStats(pool_tokens=self.info.max_total_tokens)
        self.num_steps = 0
        self.num_queue_refusals = 0
        self.abort_steps: list[int] = []
        self.finished_at: list[tuple[str, int]] = []
        self.num_idle_checks = 0
        self.num_flushes = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def running_ids(self) -> list[str]:
        return list(self._running)

    def add(self, request: Request) -> None:
        if REFUSE_ID in request.prompt_ids:
            raise InvalidRequestError("the engine does not like this prompt", param="prompt")
        if self._max_unfinished is not None and len(self._running) >= self._max_unfinished:
            self.num_queue_refusals += 1
            raise QueueFullError("the server is busy; try again later")
        ids = list(request.prompt_ids)
        known = self._known.setdefault(request.namespace, [])
        num_cached = max((_common_length(ids[:-1], other) for other in known), default=0)
        known.append(ids)
        self._running[request.request_id] = _Running(request, num_cached, prompt_logprobs=_prompt_logprobs(request))
        self._stats.requests_total += 1
        self._stats.prompt_tokens_total += len(ids)
        self._stats.cached_tokens_total += num_cached

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].end = FinishReason.ABORT
            self.abort_steps.append(self.num_steps)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        if request_id in self._running:
            self._running[request_id].end = FinishReason.STOP
            self._running[request_id].cut_at = num_output_tokens
            self.finished_at.append((request_id, num_output_tokens))

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        time.sleep(self._step_s)
        outputs = [self._advance(running) for running in self._running.values()]
        for output in outputs:
            if output.is_final:
                del self._running[output.request_id]
        return outputs

    def _advance(self, running: _Running) -> RequestOutput:
        request, prompt = running.request, running.request.prompt_ids
        if CRASH_ID in prompt:
            raise RuntimeError(f"step failed on purpose, secret {list(prompt)}")
        if SLOW_ID in prompt:
            time.sleep(SLOW_STEP_S)
        if running.end is not None:
            self._stats.aborted_total += running.end is FinishReason.ABORT
            count = running.num_tokens if running.cut_at is None else running.cut_at
            return RequestOutput(request.request_id, (), len(prompt), running.num_cached, count, running.end)
        sampling = request.sampling
        if len(running.prompt_logprobs) > 1 and not running.is_half_sent:
            running.is_half_sent = True
            half, running.prompt_logprobs = running.prompt_logprobs[:1], running.prompt_logprobs[1:]
            return self._output(running, (), None, prompt_logprobs=tuple(half))
        rest, running.prompt_logprobs = tuple(running.prompt_logprobs), []
        if sampling.max_tokens == 0:
            return self._output(running, (), FinishReason.LENGTH, prompt_logprobs=rest)
        token_id = prompt[running.num_tokens % len(prompt)]
        running.num_tokens += 1
        self._stats.generation_tokens_total += 1
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS_ID,))}
        is_end = token_id in ends and running.num_tokens > sampling.min_tokens
        is_full = running.num_tokens == sampling.max_tokens
        reason = FinishReason.STOP if is_end else FinishReason.LENGTH if is_full else None
        output = self._output(running, (token_id,), reason, prompt_logprobs=rest)
        return dataclasses.replace(output, stop_token_id=token_id if is_end else None)

    def _output(
        self, running: _Running, ids: tuple[int, ...], reason: FinishReason | None, prompt_logprobs: tuple[TokenLogprob, ...]
    ) -> RequestOutput:
        request, num_top = running.request, running.request.sampling.logprobs
        output = RequestOutput(request.request_id, ids, len(request.prompt_ids), running.num_cached, running.num_tokens, reason)
        logprobs = () if num_top is None else tuple(echo_logprob(token_id, num_top) for token_id in ids)
        pinned = None if request.pin_ttl_s is None else len(request.prompt_ids)
        if pinned is not None:
            self._stats.pinned_tokens = pinned
        return dataclasses.replace(output, logprobs=logprobs, prompt_logprobs=prompt_logprobs, num_pinned_tokens=pinned)

    def flush_cache(self) -> bool:
        self.num_flushes += 1
        if self._running:
            return False
        self._known.clear()
        return True

    def stats(self) -> EngineStats:
        return dataclasses.replace(self._stats, num_running=len(self._running))

    def close(self) -> None:
        pass

    def check_idle(self) -> None:
        assert not self._running
        self.num_idle_checks += 1
