"""What the waiting order costs: `python -m bench.scheduler`. CPU time per step with many waiting, a large tree, and a tree that changes.

Each step of the measured kind: the tree changes (a running request publishes a chunk, one ends, pages are evicted), a new request
comes, one is aborted, and a pass is made that admits one. Counted as ordering: the queue's share of all that, and what it does when the
tree tells it of a change; not the tree's own work. Page size 1, as the most there can be to do. Python's garbage collector is off
meanwhile (--gc leaves it on): its pauses grow with the whole heap, this bench's tree included.
"""

import argparse
import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.hardware import describe_hardware
from radixserve.config import SchedulerConfig
from radixserve.core import BASE_NAMESPACE, IntArray, Request, SamplingParams
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.state import RequestState
from radixserve.tree.node import TreeNode
from radixserve.tree.prefix_cache import PrefixCache

VOCAB = 50_000
POLICIES = ("lpm", "fcfs", "dfs-weight", "cost")


class CpuClock:
    """Adds up the CPU time of the calls that go through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time()
        result = call(*args)
        self.seconds += time.thread_time() - start
        return result


class TimedWatcher:
    """Between tree and queue: what the queue does when the tree changes is ordering too."""

    def __init__(self, watcher: Any, clock: CpuClock) -> None:
        self._watcher = watcher
        self._clock = clock

    def grew(self, node: TreeNode, num_bytes: int) -> None:
        self._clock.run(self._watcher.grew, node, num_bytes)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._clock.run(self._watcher.split, upper, lower)

    def cut(self, leaf: TreeNode, num_bytes: int) -> None:
        self._clock.run(self._watcher.cut, leaf, num_bytes)

    def cleared(self, root: TreeNode) -> None:
        self._clock.run(self._watcher.cleared, root)


@dataclass(frozen=True, slots=True)
class Shape:
    """The prompts: families share a document; `own` tokens follow. kind: mixed, one-document, cut-anywhere (in one document),
    equal, strangers."""

    kind: str
    num_families: int = 200
    document: int = 1000
    own: int = 60


class Driver:
    """A queue before a cache, and requests that run a few steps each."""

    def __init__(self, policy: str, num_waiting: int, num_nodes: int, shape: Shape, seed: int) -> None:
        self.rng = random.Random(f"{policy}/{num_waiting}/{num_nodes}/{shape}/{seed}")
        self.shape = shape
        families = {"mixed": shape.num_families, "strangers": num_waiting}.get(shape.kind, 1)
        self.documents = [self.draw(shape.document) for _ in range(min(families, shape.num_families))]
        self.clock, self.now, self.num_added = CpuClock(), 0.0, 0
        self.running: list[RequestState] = []
        self.cache = PrefixCache(16 * num_nodes + 2_000_000)
        while self.num_nodes < num_nodes:
            self.publish(self.prompt() if self.rng.random() < 0.1 and shape.kind == "mixed" else self.draw(self.rng.randrange(4, 30)))
        # full, so that whatever comes evicts
        self.ballast = self.cache._pool.allocate(self.cache.num_free_pages)
        self.queue = WaitingQueue(SchedulerConfig(schedule_policy=policy), self.cache)
        self.cache.tree.watcher = TimedWatcher(self.cache.tree.watcher, self.clock)
        for _ in range(num_waiting):
            self.add()

    @property
    def num_nodes(self) -> int:
        return len(self.cache.tree.order)

    def draw(self, length: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(length)]

    def prompt(self) -> IntArray:
        if self.shape.kind == "equal":
            return array("i", self.documents[0])
        if self.shape.kind == "strangers":
            return array("i", self.draw(self.shape.document))
        document = self.rng.choice(self.documents)
        cut = len(document) if self.shape.kind == "one-document" else self.rng.randrange(100, len(document))
        return array("i", document[:cut] + self.draw(self.shape.own))

    def publish(self, tokens: list[int] | IntArray) -> None:
        """One that ran and ended."""
        self.now += 1
        ids = array("i", tokens)
        path = self.cache.lock(self.cache.match(BASE_NAMESPACE, ids, 0), self.now)
        self.cache.reserve(path, len(ids), self.now)
        self.cache.release(path, ids, len(ids), self.now)

    def add(self) -> None:
        self.num_added += 1
        request = Request(str(self.num_added), self.prompt(), SamplingParams(max_tokens=self.rng.randrange(1, 200)))
        state = RequestState(request, self.now, len(request.prompt_ids), self.num_added)
        self.clock.run(self.queue.add, state)

    def step(self, chunk: int = 256) -> float:
        """CPU seconds of ordering in this step."""
        self.clock.seconds, self.now = 0.0, self.now + 1
        self.clock.run(self.queue.start_pass, self.running)
        head = self.clock.run(self.queue.head)
        if head is not None and len(self.running) < 16:
            match = self.cache.match(head.request.namespace, head.token_ids, head.max_cached)
            head.path, head.num_computed = self.cache.lock(match, self.now), match.num_tokens
            self.clock.run(self.queue.admitted, head)
            self.running.append(head)
            self.add()
        for state in self.running[:2]:
            self.compute(state, chunk)
        self.publish(self.draw(self.rng.randrange(4, 30)))
        waiting = next(iter(self.queue))
        self.clock.run(self.queue.remove, waiting.request.request_id)
        self.add()
        return self.clock.seconds

    def compute(self, state: RequestState, chunk: int) -> None:
        assert state.path is not None
        end = min(state.num_computed + chunk, len(state.token_ids))
        self.cache.reserve(state.path, end, self.now)
        state.num_computed = end
        self.cache.commit(state.path, state.token_ids, end, self.now)
        if end == len(state.token_ids):
            self.running.remove(state)
            self.cache.release(state.path, state.token_ids, end, self.now)


def burst(num_waiting: int, is_equal: bool, num_leaders: int = 16) -> list[float]:
    """CPU seconds per step while leaders compute for all who wait: of equal prompts, or of as many questions on 16 documents."""
    driver = Driver("lpm", 0, 1000, Shape("equal", document=4000), seed=0)
    driver.cache._pool.free(driver.ballast)
    documents = [driver.draw(4000) for _ in range(1 if is_equal else num_leaders)]
    for i in range(num_waiting):
        driver.num_added += 1
        own = [] if is_equal else driver.draw(60)
        request = Request(str(driver.num_added), array("i", documents[i % len(documents)] + own))
        driver.queue.add(RequestState(request, 0.0, 4100, driver.num_added))
    times = []
    for _ in range(30):
        driver.clock.seconds, driver.now = 0.0, driver.now + 1
        driver.clock.run(driver.queue.start_pass, driver.running)
        while len(driver.running) < num_leaders and (head := driver.clock.run(driver.queue.head)) is not None:
            match = driver.cache.match(head.request.namespace, head.token_ids, head.max_cached)
            head.path, head.num_computed = driver.cache.lock(match, driver.now), match.num_tokens
            driver.clock.run(driver.queue.admitted, head)
            driver.running.append(head)
        for state in list(driver.running):
            driver.compute(state, 256)
        times.append(driver.clock.seconds)
    return times


def _row(label: str, times: list[float]) -> str:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"| {label} | {statistics.median(ordered) * 1e3:.3f} | {p99 * 1e3:.3f} | {ordered[-1] * 1e3:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description="CPU time of the waiting order per step.")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--waiting", default="100,1000,5000")
    parser.add_argument("--nodes", default="1000,10000,100000", help="evictable leaves of the tree")
    parser.add_argument("--kinds", default="mixed", help="of mixed, one-document, cut-anywhere, equal, strangers")
    parser.add_argument("--document", type=int, default=1000, help="tokens of each document")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on")
    args = parser.parse_args()
    if not args.gc:
        gc.disable()
    print(describe_hardware())
    print("| policy, prompts, waiting, tree leaves | median, ms | p99 | max | per arrival at the start, us |\n|---|---|---|---|---|")
    for policy in args.policies.split(","):
        for kind in args.kinds.split(","):
            for num_nodes in map(int, args.nodes.split(",")):
                for num_waiting in map(int, args.waiting.split(",")):
                    driver = Driver(policy, num_waiting, num_nodes, Shape(kind, document=args.document), seed=0)
                    arrivals = driver.clock.seconds / num_waiting
                    times = [driver.step() for _ in range(args.steps)]
                    gc.collect()
                    print(_row(f"{policy}, {kind}, {num_waiting}, {num_nodes}", times) + f" {arrivals * 1e6:.0f} |", flush=True)
    for is_equal in (True, False):
        print(_row(f"lpm, burst of 5000 {'equal prompts' if is_equal else 'questions on 16 documents'}, 16 slots", burst(5000, is_equal)))


if __name__ == "__main__":
    main()
