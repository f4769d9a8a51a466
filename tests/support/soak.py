"""The soak: clients that come, share prefixes and go at random, some more urgent, some that pin; a tiny pool, forced retractions, flushes,
each eviction and waiting policy in turn; nothing may leak, hang or differ.

python -m tests.support.soak --seconds 600
"""

import argparse
import gc
import os
import random
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from radixserve.core import FinishReason, Request, RequestOutput
from radixserve.engine.engine import Engine
from radixserve.scheduler.state import RequestState
from tests.support.engine_runs import Answer, is_equal_up_to_a_near_tie, make_request, run, tiny_engine

NUM_CLIENTS = 64
NUM_KINDS = 160  # different requests; each comes again and again
POOL_TOKENS = 640
FORCED_INTERVAL = 20
STEPS_BETWEEN_RESTS = 80
MAX_GROWTH_BYTES = 32 * 2**20
PRIORITIES = (0, 0, 0, 0, 2, 5)  # of the clients, in turn
SHARE_OF_PINS, MAX_PIN_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class SetUp:
    page_size: int
    is_tree_on: bool
    eviction: str
    waiting: str
    overlap: str = "off"

    def __str__(self) -> str:
        tree, overlap = f"tree {self.eviction}" if self.is_tree_on else "no tree", ", overlapped" * (self.overlap == "on")
        return f"page size {self.page_size}, {tree}, {self.waiting}{overlap}"

    @property
    def options(self) -> dict[str, object]:
        return {
            "page_size": self.page_size,
            "disable_radix_cache": not self.is_tree_on,
            "radix_eviction_policy": self.eviction,
            "schedule_policy": self.waiting,
            "overlap_schedule": self.overlap,
            "priority_scheduling_preemption_threshold": 1,
            "priority_aging_passes": 32,
        }


SET_UPS = (
    SetUp(1, True, "lru", "lpm"),
    SetUp(16, True, "adaptive", "dfs-weight"),
    SetUp(1, True, "priority", "cost"),
    SetUp(16, True, "lfu", "fcfs"),
    SetUp(1, True, "slru", "dfs-weight"),
    SetUp(16, True, "fifo", "lpm"),
    SetUp(1, False, "lru", "fcfs"),
    SetUp(16, False, "lru", "cost"),
    SetUp(1, True, "adaptive", "lpm", overlap="on"),
    SetUp(16, True, "lru", "cost", overlap="on"),
)


@dataclass(slots=True)
class Client:
    """At most one request at a time."""

    number: int
    num_sent: int = 0
    request_id: str = ""
    kind: int = 0
    abort_in: int | None = None  # steps; None: never
    is_aborted: bool = False
    pins: bool = False
    answer: Answer = field(default_factory=Answer)

    @property
    def priority(self) -> int:
        return PRIORITIES[self.number % len(PRIORITIES)]

    @property
    def is_busy(self) -> bool:
        return bool(self.request_id)


@dataclass(slots=True)
class Report:
    num_steps: int = 0
    num_ended: int = 0
    num_aborted: int = 0
    num_near_ties: int = 0
    num_flushes: int = 0
    num_retracted: int = 0
    num_preempted: int = 0  # among the retracted
    num_pins: int = 0  # requests whose prompt was pinned, at least a page of it
    num_cached_tokens: int = 0
    memory_bytes: list[int] = field(default_factory=list)  # at each rest
    num_objects: list[int] = field(default_factory=list)

    def check_memory(self) -> None:
        """The last third of the rests against the middle one; the first is warm-up."""
        third = len(self.memory_bytes) // 3
        assert third >= 1, f"expected at least 3 rests, got {len(self.memory_bytes)}: let it run for longer"
        for values, allowed in ((self.memory_bytes, MAX_GROWTH_BYTES), (self.num_objects, 4000)):
            growth = min(values[2 * third :]) - max(values[third : 2 * third])
            assert growth <= allowed, f"grew by {growth}, allowed are {allowed}: {values}"


def kinds(seed: int) -> list[dict[str, object]]:
    """Prompts of a few families whose members part anywhere; mostly greedy, some sampled, some that stop early."""
    rng = random.Random(seed)
    families = [[rng.randrange(384) for _ in range(120)] for _ in range(6)]
    result: list[dict[str, object]] = []
    for number in range(NUM_KINDS):
        shared = rng.choice(families)[: rng.randrange(60)]
        prompt = shared + [rng.randrange(384) for _ in range(rng.randrange(1, 30))]
        settings: dict[str, object] = {
            "prompt": prompt,
            "seed": number,
            "max_tokens": rng.randrange(1, 90),
            "logprobs": 2,
            "temperature": 0.0,
        }
        if number % 8 == 0:
            settings |= {"temperature": 1.0, "top_p": 0.9}
        elif number % 8 == 1:
            settings |= {"prompt_logprobs": 0}
        elif number % 8 == 2:
            settings |= {"ignore_eos": True}
        result.append(settings)
    return result


def build(kind: dict[str, object], request_id: str) -> Request:
    return make_request(request_id, **kind)  # type: ignore[arg-type]


class Soak:
    """One engine under load, its calm answers, and the clients."""

    def __init__(self, model_dir: Path, set_up: SetUp, seed: int) -> None:
        self._set_up = set_up
        self._rng = random.Random(seed)
        self._kinds = kinds(seed)
        options: dict[str, object] = {"max_running_requests": 16, "chunked_prefill_size": 64}
        calm = tiny_engine(model_dir, page_size=set_up.page_size, max_total_tokens=1 << 15, **options)
        self._calm = run(calm, [build(kind, str(number)) for number, kind in enumerate(self._kinds)])
        self._engine = self._pressed_engine(model_dir, **options, **set_up.options)
        self._clients = [Client(number) for number in range(NUM_CLIENTS)]
        self._by_id: dict[str, Client] = {}
        self.report = Report()
        self._count_preemptions()

    @staticmethod
    def _pressed_engine(model_dir: Path, **options: object) -> Engine:
        with patch.dict(os.environ, RADIXSERVE_TEST_RETRACT=str(FORCED_INTERVAL)):
            return tiny_engine(model_dir, max_total_tokens=POOL_TOKENS, schedule_conservativeness=0.0, **options)

    def _count_preemptions(self) -> None:
        """At their source: the stats have them among the retractions."""
        preemption = self._engine._scheduler._preemption
        victims = preemption.victims

        def counted(*args: Any) -> list[RequestState]:
            chosen = victims(*args)
            self.report.num_preempted += len(chosen)
            return chosen

        preemption.victims = counted  # type: ignore[method-assign]

    def run_for(self, seconds: float) -> Report:
        """At least three rests are made, however short it is."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(self.report.memory_bytes) < 3:
            for _ in range(STEPS_BETWEEN_RESTS):
                self._start_some()
                self._abort_some()
                self._step()
            self._rest()
        self.report.check_memory()
        return self.report

    def _start_some(self) -> None:
        for client in self._clients:
            if not client.is_busy and self._rng.random() < 0.3:
                client.num_sent += 1
                client.request_id = f"client-{client.number}-{client.num_sent}"
                client.kind = self._rng.randrange(NUM_KINDS)
                client.abort_in = self._rng.randrange(1, 60) if self._rng.random() < 0.15 else None
                client.is_aborted = False
                client.pins = self._set_up.is_tree_on and self._rng.random() < SHARE_OF_PINS
                client.answer = Answer()
                self._by_id[client.request_id] = client
                self._engine.add(self._request_of(client))

    def _request_of(self, client: Client) -> Request:
        request = build(self._kinds[client.kind], client.request_id)
        ttl_s = self._rng.uniform(0.01, MAX_PIN_S) if client.pins else None
        return replace(request, priority=client.priority, pin_ttl_s=ttl_s)

    def _abort_some(self) -> None:
        for client in self._clients:
            if client.is_busy and client.abort_in is not None:
                client.abort_in -= 1
                if client.abort_in == 0:
                    client.is_aborted = True
                    self._engine.abort(client.request_id)

    def _step(self) -> None:
        if self._rng.random() < 0.05:
            is_busy = bool(self._by_id)
            is_flushed, stats = self._engine.flush_cache(), self._engine.stats()
            assert is_flushed != is_busy or not stats.num_running + stats.num_waiting, "a flush is refused while anybody is there"
        for output in self._engine.step():
            client = self._by_id[output.request_id]  # KeyError: news of a request that ended before
            client.answer.take(output)
            if output.is_final:
                del self._by_id[client.request_id]
                self._check(client)
                client.request_id = ""
        self.report.num_steps += 1
        stats = self._engine.stats()
        assert stats.pinned_tokens <= self._engine.config.cache.max_pinned_fraction * stats.pool_tokens

    def _check(self, client: Client) -> None:
        answer, calm, report = client.answer, self._calm[str(client.kind)], self.report
        assert answer.final is not None and calm.final is not None
        report.num_ended += 1
        if answer.final.finish_reason is FinishReason.ABORT:
            report.num_aborted += 1
            assert client.is_aborted
            calm = Answer(calm.token_ids[: len(answer.token_ids)], calm.logprobs[: len(answer.token_ids)])
        if self._kinds[client.kind]["temperature"] == 0.0:
            is_equal = is_equal_up_to_a_near_tie(answer, calm)
            report.num_near_ties += not is_equal
        else:
            is_equal = answer.token_ids == calm.token_ids
            assert is_equal, f"{client.request_id}: a seeded sample differs"
        assert len(answer.logprobs) == len(answer.token_ids)
        if answer.final.finish_reason is not FinishReason.ABORT and is_equal:
            assert answer.final.finish_reason is self._calm[str(client.kind)].final.finish_reason  # type: ignore[union-attr]
            assert len(answer.prompt_logprobs) == len(calm.prompt_logprobs)
        self._check_pin(client, answer.final)

    def _check_pin(self, client: Client, final: RequestOutput) -> None:
        num_pinned = final.num_pinned_tokens
        if not client.pins:
            assert num_pinned is None
        elif final.finish_reason is not FinishReason.ABORT or num_pinned is not None:
            assert num_pinned is not None, f"{client.request_id}: its pin is forgotten"
            assert 0 <= num_pinned <= final.num_prompt_tokens and num_pinned % self._set_up.page_size == 0
            self.report.num_pins += num_pinned > 0

    def _rest(self) -> None:
        """Let all come to an end, forget the cache, and look at the memory."""
        for _ in range(100_000):
            if not self._engine.has_work:
                break
            self._abort_some()
            self._step()
        assert not self._by_id, f"{len(self._by_id)} requests have no end"
        assert self._engine.flush_cache()
        report, stats = self.report, self._engine.stats()
        assert stats.free_tokens == stats.pool_tokens and stats.pinned_tokens == 0
        assert stats.requests_total == stats.finished_total + stats.aborted_total == report.num_ended
        report.num_flushes += 1
        report.num_retracted, report.num_cached_tokens = stats.retracted_total, stats.cached_tokens_total
        gc.collect()
        report.num_objects.append(len(gc.get_objects()))
        report.memory_bytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    import torch

    from tests.support.tiny_models import make_tiny_model

    torch.set_num_threads(1)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_tiny_model(Path(directory), "llama", True)
        for set_up in SET_UPS:
            report = Soak(model_dir, set_up, args.seed).run_for(args.seconds / len(SET_UPS))
            print(f"{set_up}: {report}", flush=True)


if __name__ == "__main__":
    main()
