"""Replay a trace through the real tree, pool and scheduler, without a model: python -m bench.simulate TRACE [options]; docs/simulator.md.

Prints one row per waiting order, eviction policy and router: what they re-used, next to what no eviction policy could beat.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.hardware import describe_hardware
from bench.report import append_jsonl
from bench.simulator.cost import COSTS_DIR, CostModel
from bench.simulator.fleet import Fleet, run_fleet
from bench.simulator.load import Load
from bench.simulator.replica import Settings
from bench.simulator.result import Result
from bench.simulator.router import ROUTERS
from bench.simulator.trace import load_trace
from radixserve.config import SchedulerConfig
from radixserve.errors import RadixServeError

HEADER = (
    "order", "eviction", "router", "hit %", "bound %", "ceiling %", "hit/bound", "prefilled Mtok", "TTFT p50/p90/p99 s",
    "evicted Mtok", "retractions", "refused", "virtual s", "CPU s", "wall s",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    add = parser.add_argument
    add("trace", nargs="?", type=Path, help="Mooncake's JSONL of hash ids, or JSONL of token ids")
    add("--fit", metavar="NAME", help="measure steps of the default model here and save the cost model under this name, then end")
    add("--fit-repeats", type=int, default=4, help="rounds of measurements, the shortest time of each step counts (default: 4)")
    add("--orders", default="lpm", help="waiting orders, by commas; names of --schedule-policy (default: lpm)")
    add("--evictions", default="lru", help="eviction policies, by commas; none: no re-use (default: lru)")
    add("--routers", default="round-robin", help=f"routers, by commas, of {', '.join(ROUTERS)} (default: round-robin)")
    add("--pool-tokens", default="1000000", help="tokens of a replica's pool; several by commas (default: 1000000)")
    add("--replicas", type=int, default=1, help="replicas behind the router (default: 1)")
    add("--processes", type=int, default=1, help="processes that share the replicas (default: 1)")
    add("--requests", type=int, help="so many requests: a part of the trace, or copies of it side by side (default: the trace)")
    add("--rate", type=float, help="arrivals per second over all replicas (default: the trace's, times the copies)")
    add("--page-size", type=int, help="of a trace of token ids (default: 1); Mooncake's is 512")
    add("--max-tokens", type=int, help="what clients ask for; answers end earlier (default: exactly what they take)")
    add("--cost", default="h100-8b", help="cost model: a file, a name that was fitted, or h100-8b, which is modelled (the default)")
    add("--chunked-prefill-size", type=int, default=8192, help="token budget of a step (default: 8192)")
    add("--max-running-requests", type=int, default=256, help="(default: 256)")
    add("--window-s", type=float, default=0.25, help="how old the router's picture of the loads may be, virtual (default: 0.25)")
    add("--seed", type=int, default=0)
    add("--single-steps", action="store_true", help="plan every decode step by itself: slower, same outcome")
    add("--no-bounds", action="store_true", help="leave out the bounds")
    add("--json", type=Path, metavar="FILE", help="append one line per row")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for what cannot be done, with a sentence on stderr."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.fit:
            return _fit(args.fit, args.fit_repeats)
        if args.trace is None:
            parser.error("expected a trace, or --fit NAME")
        _simulate(args)
    except (RadixServeError, ValueError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _fit(name: str, repeats: int) -> int:
    from bench.simulator.fit import measure

    model = measure(name, repeats)
    path = COSTS_DIR / f"{name}.json"
    model.save(path)
    print(f"{path}: {model}")
    return 0


def _simulate(args: argparse.Namespace) -> None:
    cost = CostModel.load(args.cost)
    trace = load_trace(args.trace, args.page_size, args.requests)
    load = Load(trace, args.requests, args.rate, args.seed, args.max_tokens)
    arrivals_s = load.arrival_s(load.num_requests - 1)
    print(describe_hardware())
    print(f"cost {cost.name}: {cost.origin}")
    print(f"{trace.name}: {load.num_requests} requests in {arrivals_s:.0f} s, page size {trace.page_size}, {args.replicas} replica(s)")
    print("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|")
    for fleet, settings in _runs(args):
        started = time.perf_counter()
        result = run_fleet(load, settings, cost, fleet, _Progress(load.num_requests))
        row = _row(settings, fleet, result, time.perf_counter() - started)
        print("| " + " | ".join(row) + " |", flush=True)
        if args.json:
            append_jsonl(args.json, {"pool_tokens": settings.pool_tokens, "cost": cost.name, **dict(zip(HEADER, row, strict=True))})


class _Progress:
    """A line on stderr now and then, for runs of minutes."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._started = self._told = time.monotonic()

    def __call__(self, num_done: int) -> None:
        now = time.monotonic()
        if now > self._told + 30:
            self._told = now
            print(f"{num_done} of {self._num_requests} requests done after {now - self._started:.0f} s", file=sys.stderr, flush=True)


def _runs(args: argparse.Namespace) -> Iterator[tuple[Fleet, Settings]]:
    names = (value.split(",") for value in (args.pool_tokens, args.orders, args.evictions, args.routers))
    for pool_tokens, order, eviction, router in itertools.product(*names):
        scheduler = SchedulerConfig(
            schedule_policy=order, chunked_prefill_size=args.chunked_prefill_size, max_running_requests=args.max_running_requests
        )
        settings = Settings(scheduler, int(pool_tokens), eviction, repeats_steps=not args.single_steps)
        yield Fleet(args.replicas, router, args.window_s, args.processes, args.seed, not args.no_bounds), settings


def _row(settings: Settings, fleet: Fleet, result: Result, wall_s: float) -> tuple[str, ...]:
    counts = result.counts

    def percent(tokens: int) -> str:
        return f"{100 * tokens / max(counts.prompt_tokens, 1):.2f}" if fleet.with_bounds else "-"

    order = settings.scheduler.schedule_policy
    return (
        order,
        f"{settings.eviction} @ {settings.pool_tokens:,}",
        fleet.router if fleet.num_replicas > 1 else "-",
        f"{100 * result.hit_rate:.2f}",
        percent(counts.bound_tokens),
        percent(counts.ceiling_tokens),
        f"{counts.hit_tokens / counts.bound_tokens:.3f}" if counts.bound_tokens else "-",
        f"{counts.prefilled_tokens / 1e6:.2f}",
        " / ".join(f"{value:.3f}" for value in result.ttft_percentiles()),
        f"{counts.evicted_tokens / 1e6:.2f}",
        str(counts.retractions),
        str(counts.refused),
        f"{counts.makespan_s:.0f}",
        f"{counts.cpu_s:.1f}",
        f"{wall_s:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
