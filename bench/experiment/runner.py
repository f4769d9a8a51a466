"""Runs a plan: servers up, loads in turn, cache flushed in between, everything recorded. Draws and judges nothing."""

import json
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bench.client import RequestFailedError, fetch
from bench.experiment.counters import all_growth
from bench.experiment.environment import describe_environment, own_version
from bench.experiment.peers import NotInstalledError, resolve_command
from bench.experiment.plan import LoadPlan, Plan, ServerPlan
from bench.experiment.results import Results, Run, ServerInfo, TtftResult
from bench.experiment.sampler import Sampler
from bench.experiment.tables import PlanError
from bench.load import ClosedLoop, Mode, OpenLoop, Target, flush, run
from bench.servers import Server
from bench.ttft import measure_ttft, read_model_shape
from bench.words import Words, find_model_dir
from bench.workloads import Workload, make_workload, warm_up

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Live:
    """A server of the plan that is up."""

    plan: ServerPlan
    url: str

    @property
    def target(self) -> Target:
        dropped = dict.fromkeys(self.plan.drop)  # None takes a field away
        return Target(self.url, self.plan.model, self.plan.path, self.plan.send_text, {**self.plan.extra, **dropped})


async def run_experiment(plan: Plan, command: str, say: Say) -> Results:
    """Raises PlanError before any server starts, ServerStartError, RequestFailedError; nothing is left running in any case."""
    started_at, clock = datetime.now().astimezone(), time.perf_counter()
    model_dir = find_model_dir(Path(plan.model_dir) if plan.model_dir else None)
    words = Words(model_dir)
    for index, load in enumerate(plan.loads):
        try:
            _workload(load, words, plan.seed)
        except (ValueError, OSError) as error:
            raise PlanError(f"loads[{index}] ({load.label}): {error}") from None
    environment = describe_environment()
    async with AsyncExitStack() as stack:
        infos, live = await _start(stack, plan, model_dir, say)
        for server in [*live, *reversed(live)]:
            # never the same prompts twice, or a warm server would re-use them
            await run(warm_up(words, time.time_ns()), server.target, ClosedLoop(8))
        runs = [run for load in plan.loads for run in await _run_load(words, plan, load, live, say)]
        ttft = await _ttft(words, plan, live, model_dir, say)
    took_s = time.perf_counter() - clock
    return Results(plan, command, f"{started_at:%Y-%m-%d %H:%M}", took_s, environment, tuple(infos), tuple(runs), tuple(ttft))


async def _start(stack: AsyncExitStack, plan: Plan, model_dir: Path, say: Say) -> tuple[list[ServerInfo], list[_Live]]:
    """All servers of the plan that are installed."""
    infos, live = [], []
    for server in plan.servers:
        try:
            made = _server(server, plan, model_dir)
        except NotInstalledError as error:
            say(f"{server.label}: skipped, {error}")
            infos.append(ServerInfo(server.label, shlex.join(server.command), skipped=str(error)))
            continue
        say(f"{server.label}: starting")
        up = await stack.enter_async_context(made)
        infos.append(ServerInfo(server.label, _shown(server, plan), await _version(server, up.url)))
        live.append(_Live(server, up.url))
    if plan.baseline not in [server.plan.label for server in live]:
        raise PlanError(f"baseline: {plan.baseline} is not installed, so there is nothing to compare with")
    return infos, live


def _server(server: ServerPlan, plan: Plan, model_dir: Path) -> Server:
    if server.is_peer:
        command = resolve_command(server, str(model_dir))
        return Server(server.label, (), server.start_timeout_s, command=command, env=server.env, health=server.health)
    model = ("--model-path", plan.model_dir) if plan.model_dir else ()
    return Server(server.label, (*model, *plan.flags, *server.flags), server.start_timeout_s, env=server.env)


def _shown(server: ServerPlan, plan: Plan) -> str:
    """The command without what is of this machine alone: interpreter and port."""
    if server.is_peer:
        return shlex.join(server.command)
    model = ("--model-path", plan.model_dir) if plan.model_dir else ()
    return shlex.join(["radixserve", "serve", *model, *plan.flags, *server.flags])


async def _version(server: ServerPlan, url: str) -> str:
    """This project's own, or what a peer says at /version."""
    if not server.is_peer:
        return own_version()
    try:
        status, body = await fetch(url, "GET", "/version", timeout_s=10)
        return str(json.loads(body)["version"]) if status == 200 else ""
    except (RequestFailedError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        return ""


async def _run_load(words: Words, plan: Plan, load: LoadPlan, live: Sequence[_Live], say: Say) -> list[Run]:
    """Every rate, every repeat, every server; the order of the servers turns round from repeat to repeat."""
    runs = []
    for at, rate in enumerate(load.rates or (None,)):
        for repeat in range(load.repeats):
            # prompts of its own for each rate and repeat: a server that cannot flush has not seen them
            seed = plan.seed + at * load.repeats + repeat
            for server in live if repeat % 2 == 0 else reversed(live):
                run = await _run_once(words, plan, load, server, rate, repeat, seed)
                say(_line(run))
                runs.append(run)
    return runs


async def _run_once(words: Words, plan: Plan, load: LoadPlan, server: _Live, rate: float | None, repeat: int, seed: int) -> Run:
    workload = _workload(load, words, seed)
    if server.plan.flush:
        await flush(server.url, server.plan.flush)
    mode: Mode = ClosedLoop(load.concurrency) if load.concurrency else OpenLoop(rate, load.arrivals, seed)
    async with Sampler(server.url, plan.sample_interval_s) as sampler:
        result = await run(workload, server.target, mode)
    if not result.served:
        raise RequestFailedError(f"{server.plan.label}, load {load.label}: every request failed, the first with: {result.records[0].error}")
    by_group = workload.ideal_by_group
    return Run(
        load.label,
        server.plan.label,
        rate,
        repeat,
        seed,
        result.wall_s,
        workload.ideal_hit_rate,
        by_group if len(by_group) > 1 else {},
        result.records,
        all_growth(result.metrics_before, result.metrics_after),
        tuple(sampler.samples),
    )


def _workload(load: LoadPlan, words: Words, seed: int) -> Workload:
    return make_workload(load.workload, words, seed, **load.options)


def _line(run: Run) -> str:
    where = run.load if run.rate is None else f"{run.load} at {run.rate:g}/s"
    failed = sum(record.error is not None for record in run.records)
    return f"{where}, {run.server}, repeat {run.repeat + 1}: {run.wall_s:.2f} s" + (f", {failed} requests failed" if failed else "")


async def _ttft(words: Words, plan: Plan, live: Sequence[_Live], model_dir: Path, say: Say) -> list[TtftResult]:
    found = next((server for server in live if plan.ttft and server.plan.label == plan.ttft.server), None)
    if plan.ttft is None or found is None:
        return []
    shape, results = read_model_shape(model_dir), []
    for n, p in plan.ttft.pairs:
        pair = await measure_ttft(found.target, words, shape, n, p, repeats=plan.ttft.repeats, seed=plan.seed)
        say(f"one request at a time: {pair.describe()}")
        results.append(TtftResult(n, p, pair.repeats, pair.cold_s, pair.hit_s, pair.cached_tok, pair.floor))
    return results
