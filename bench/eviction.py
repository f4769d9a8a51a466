"""Judges eviction policies: replays traces of prompts, one after the other, through the real PrefixCache, and prints hits per policy.

usage: python -m bench.eviction TRACE ... [--sizes 260000,1000000] [--policies lru,adaptive]

A trace is one that bench/simulator/trace.py reads. No clock and no scheduler here, so figures are of the tree alone.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.simulator.trace import MOONCAKE_BLOCK, TraceError, load_trace
from bench.simulator.tracelab import TraceLabError
from radixserve.core import BASE_NAMESPACE, IntArray
from radixserve.tree.adaptive import ADAPTIVE
from radixserve.tree.eviction import EVICTION_POLICIES
from radixserve.tree.prefix_cache import PrefixCache

SIZES = (260_000, 1_000_000, 3_000_000, 10_200_000, 50_000_000)


@dataclass(frozen=True, slots=True)
class Replay:
    """Tokens, not blocks."""

    num_prompt: int
    num_cached: int
    num_evicted: int
    seconds: float  # of processor time, all of the replay

    @property
    def hit_rate(self) -> float:
        return self.num_cached / self.num_prompt if self.num_prompt else 0.0


def replay_tree(trace: Iterable[IntArray], policy: str, num_pages: int, page_size: int = MOONCAKE_BLOCK) -> Replay:
    """Each prompt is matched, computed and released before the next one comes. One that is longer than the pool is left out."""
    cache = PrefixCache(num_pages, page_size, policy)
    num_prompt = num_cached = 0
    start = time.process_time()
    for now, tokens in enumerate(trace, start=1):
        if len(tokens) > num_pages * page_size:
            continue
        match = cache.match(BASE_NAMESPACE, tokens, len(tokens))
        path = cache.lock(match, now)
        cache.reserve(path, len(tokens), now)
        cache.release(path, tokens, len(tokens), now)
        num_prompt += len(tokens)
        num_cached += match.num_tokens
    seconds = time.process_time() - start
    cache.check_account([])
    return Replay(num_prompt, num_cached, cache.num_evicted_pages * page_size, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="sizes of the cache in tokens")
    parser.add_argument("--policies", default=",".join((*EVICTION_POLICIES, ADAPTIVE)))
    parser.add_argument("--page-size", type=int, default=MOONCAKE_BLOCK)
    args = parser.parse_args(arguments)
    for path in args.traces:
        try:
            loaded = load_trace(path, MOONCAKE_BLOCK)  # of a trace of tokens only the prompts are read, whatever its blocks
        except (OSError, TraceError, TraceLabError) as error:
            parser.error(str(error))
        trace = [loaded.prompt(index) for index in range(len(loaded.requests))]
        for size in map(int, args.sizes.split(",")):
            print(f"{path.name}, {size} tokens, {len(trace)} prompts", flush=True)
            base = None
            for policy in args.policies.split(","):
                got = replay_tree(trace, policy, size // args.page_size, args.page_size)
                base = base or got
                ratio = got.num_cached / base.num_cached if base.num_cached else 1.0
                line = f"{got.hit_rate:7.2%} of tokens cached, {ratio:5.2f} x the first policy, {got.seconds:5.1f} s"
                print(f"  {policy:9} {line}", flush=True)


if __name__ == "__main__":
    main()
