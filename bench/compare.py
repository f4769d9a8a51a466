"""python -m bench.compare: the same loads with and without re-use, on two servers that this program starts itself.

  python -m bench.compare --load A,B --repeats 4 --out bench/out/compare.jsonl -- --max-total-tokens 40000
  python -m bench.compare --load none --ttft 1024:896,4096:3968

Both servers live side by side (the idle one costs nothing) and run in turn (on, off, off, on, ...), so that a drift of the machine meets
both. Flags after -- go to both servers.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.client import RequestFailedError
from bench.hardware import describe_hardware
from bench.load import ClosedLoop, Target, flush, run
from bench.report import RunSummary, append_jsonl, describe, medians, spread, summarize
from bench.servers import Server, ServerStartError, StepClock, read_step_clock
from bench.serving import add_load_arguments, check_load_arguments, warm_up
from bench.ttft import measure_ttft, read_model_shape
from bench.words import Words, find_model_dir
from bench.workloads import make_workload

BOUND_SHARE_GOAL = 0.85  # of 1 / (1 - h f), on load A
OVERHEAD_GOAL = 0.01  # tree and scheduler in the step time, on load B


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a load on one server, and what its engine's clocks say of it."""

    result: RunSummary
    clock: StepClock


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts with re-use (on) and without (off), one right after the other."""

    on: Run
    off: Run

    @property
    def ratio(self) -> float:
        """Total time off / on: how many times faster re-use is."""
        return self.off.result.wall_s / self.on.result.wall_s

    @property
    def bound(self) -> float | None:
        """1 / (1 - h f): h the token hit rate of the on run, f the share of prefill in the off run's step time; None if unknown."""
        hit_rate, prefill_share = self.on.result.hit_rate, self.off.clock.prefill_share
        return None if hit_rate is None or prefill_share is None else 1.0 / (1.0 - hit_rate * prefill_share)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description="Compare re-use on and off; flags after -- go to both servers."
    )
    add_load_arguments(parser, default="A,B")
    parser.add_argument("--ttft", type=_lengths, default=[], help="also one request at a time: n:p pairs, e.g. 1024:896,2048:1920")
    parser.add_argument("--ttft-repeats", type=int, default=7, help="pairs of cold and hit for each n:p (default: %(default)s)")
    return parser


def _lengths(text: str) -> list[tuple[int, int]]:
    pairs = [tuple(map(int, item.split(":"))) for item in text.split(",")]
    if not all(len(pair) == 2 and 0 < pair[1] < pair[0] for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected n:p with 0 < p < n, got {text!r}")
    return [(n, p) for n, p in pairs]


async def _run_once(server: Server, words: Words, args: argparse.Namespace, name: str, seed: int) -> Run:
    workload = make_workload(name, words, seed, **dict(args.option))
    await flush(server.url)
    before = await read_step_clock(server.url)
    done = await run(workload, Target(server.url), ClosedLoop(args.concurrency or workload.concurrency))
    if done.errors:
        raise RequestFailedError(f"{server.label}, load {name}: {done.errors[0].error}")
    result = summarize(server.label, seed, done)
    clock = (await read_step_clock(server.url)).since(before)
    if args.out:
        append_jsonl(args.out, result)
    return Run(result, clock)


async def _run_pairs(on: Server, off: Server, words: Words, args: argparse.Namespace, name: str) -> list[Pair]:
    pairs = []
    for index in range(args.repeats):
        order = (on, off) if index % 2 == 0 else (off, on)
        runs = {server.label: await _run_once(server, words, args, name, args.seed + index) for server in order}
        pairs.append(Pair(runs[on.label], runs[off.label]))
    return pairs


def describe_pairs(name: str, pairs: Sequence[Pair]) -> str:
    """The report of one load: both sides' medians, the ratios, and the goals that the load is there for."""
    ratios = [pair.ratio for pair in pairs]
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return "\n".join(
        [
            _describe_side([pair.on.result for pair in pairs]),
            _describe_side([pair.off.result for pair in pairs]),
            f"-- load {name}: total time off/on {statistics.median(ratios):.3f} (pairs {each}; spread {spread(ratios):.2f})",
            _describe_bound(name, pairs),
            _describe_overhead(name, pairs),
        ]
    )


def _describe_side(results: Sequence[RunSummary]) -> str:
    return describe(medians(results), len(results), spread([result.wall_s for result in results]))


def _describe_bound(name: str, pairs: Sequence[Pair]) -> str:
    bounds = [bound for pair in pairs if (bound := pair.bound) is not None]
    hit_rates = [rate for pair in pairs if (rate := pair.on.result.hit_rate) is not None]
    prefill_shares = [share for pair in pairs if (share := pair.off.clock.prefill_share) is not None]
    mixed_shares = [share for pair in pairs if (share := pair.off.clock.mixed_share) is not None]
    if len(bounds) < len(pairs):
        return "   1/(1 - h f): unknown, since /metrics has no step seconds or usage no cached tokens"
    reached = statistics.median([pair.ratio / bound for pair, bound in zip(pairs, bounds)])
    verdict = f"; goal at least {BOUND_SHARE_GOAL}: {_verdict(reached >= BOUND_SHARE_GOAL)}" if name == "A" else ""
    return (
        f"   1/(1 - h f) = {statistics.median(bounds):.3f} with h {statistics.median(hit_rates):.3f}, "
        f"f {statistics.median(prefill_shares):.3f} (with the decode rows of mixed steps {statistics.median(mixed_shares):.3f}); "
        f"ratio over bound {reached:.3f}{verdict}"
    )


def _describe_overhead(name: str, pairs: Sequence[Pair]) -> str:
    shares = [share for pair in pairs if (share := pair.on.clock.share("tree", "schedule")) is not None]
    if not shares:
        return "   tree and scheduler: unknown, since /metrics has no step seconds"
    share = statistics.median(shares)
    verdict = f"; goal at most {OVERHEAD_GOAL:.0%}: {_verdict(share <= OVERHEAD_GOAL)}" if name == "B" else ""
    parts = {part: sum(pair.on.clock.parts.get(part, 0.0) for pair in pairs) for part in pairs[0].on.clock.parts}
    by_part = ", ".join(f"{part} {seconds / sum(parts.values()):.2%}" for part, seconds in parts.items())
    return f"   tree and scheduler {share:.3%} of the step time with re-use on{verdict} ({by_part})"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


async def _compare(args: argparse.Namespace, names: Sequence[str], flags: Sequence[str]) -> None:
    model_dir: Path = find_model_dir(args.model_dir)
    words = Words(model_dir)
    print(f"{describe_hardware()}\nflags of both servers: {' '.join(flags) or 'none'}", flush=True)
    async with AsyncExitStack() as stack:
        on = await stack.enter_async_context(Server("on", flags))
        off = await stack.enter_async_context(Server("off", [*flags, "--disable-radix-cache"]))
        for server in (on, off, off, on):
            await warm_up(Target(server.url), words)
        for name in names:
            print(describe_pairs(name, await _run_pairs(on, off, words, args, name)), flush=True)
        for n, p in args.ttft:
            shape = read_model_shape(model_dir)
            pair = await measure_ttft(Target(on.url), words, shape, n, p, repeats=args.ttft_repeats, seed=args.seed)
            print(f"-- one request at a time, {pair.describe()}", flush=True)


def _main() -> int:
    own, flags = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, flags = own[:split], own[split + 1 :]
    parser = _parser()
    args = parser.parse_args(own)
    names = [] if args.workload == "none" else check_load_arguments(parser, args)
    try:
        asyncio.run(_compare(args, names, flags))
    except (RequestFailedError, ServerStartError, OSError, TimeoutError, ValueError) as error:
        print(f"comparison failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
