"""Runs a plan: servers up, loads in turn, cache flushed in between, everything recorded. Draws and judges nothing."""

import json
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bench.client import RequestFailedError, fetch
from bench.experiment.counters import all_growth
from bench.experiment.environment import describe_environment, own_version
from bench.experiment.peers import NotInstalledError, resolve_command, resolve_env
from bench.experiment.plan import LoadPlan, Plan, ServerPlan
from bench.experiment.results import Results, Run, ServerInfo, TtftResult
from bench.experiment.sampler import Sampler
from bench.experiment.tables import PlanError
from bench.load import ClosedLoop, Mode, OpenLoop, Target, flush, run
from bench.servers import Server
from bench.ttft import ModelShape, measure_ttft, read_model_shape
from bench.words import Words, find_model_dir
from bench.workloads import Workload, make_workload, warm_up

Say = Callable[[str], None]
Keep = Callable[[Results], None]


@dataclass(frozen=True, slots=True)
class _Live:
    """A server of the plan that is up."""

    plan: ServerPlan
    server: Server

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def target(self) -> Target:
        dropped = dict.fromkeys(self.plan.drop)  # None takes a field away
        return Target(self.url, self.plan.model, self.plan.path, self.plan.send_text, {**self.plan.extra, **dropped})


async def run_experiment(plan: Plan, command: str, say: Say, keep: Keep) -> Results:
    """`keep` gets all that was measured so far, after each run.

    Raises PlanError before any load runs, FileNotFoundError without a model, ServerStartError, RequestFailedError; nothing is left running
    in any case.
    """
    started_at, clock = f"{datetime.now().astimezone():%Y-%m-%d %H:%M}", time.perf_counter()
    model_dir = find_model_dir(Path(plan.model_dir) if plan.model_dir else None)
    words = Words(model_dir)
    check_loads(plan, words)
    shape = read_model_shape(model_dir) if plan.ttft else None
    environment = describe_environment()
    runs: list[Run] = []
    ttft: list[TtftResult] = []
    async with AsyncExitStack() as stack:
        infos, live = await _start(stack, plan, model_dir, say)
        for server in [*live, *reversed(live)]:
            # never the same prompts twice, or a warm server would re-use them
            await run(warm_up(words, time.time_ns()), server.target, ClosedLoop(8))

        def so_far() -> Results:
            took_s = time.perf_counter() - clock
            return Results(plan, command, started_at, took_s, environment, tuple(infos), tuple(runs), tuple(ttft))

        for load in plan.loads:
            async for done in _run_load(words, plan, load, live):
                say(_line(done))
                runs.append(done)
                keep(so_far())
        if shape is not None:
            async for pair in _ttft(words, plan, live, shape, say):
                ttft.append(pair)
                keep(so_far())
    return so_far()


def check_loads(plan: Plan, words: Words) -> None:
    """Raises PlanError for a load that cannot be made, before anything starts."""
    for index, load in enumerate(plan.loads):
        try:
            workload_of(load, words, plan.seed)
        except (ValueError, OSError) as error:
            raise PlanError(f"loads[{index}] ({load.label}): {error}") from None


def check_baseline(plan: Plan, there: Sequence[str]) -> None:
    if plan.baseline not in there:
        raise PlanError(f"baseline: {plan.baseline} is not installed, so there is nothing to compare with")


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
        live.append(_Live(server, up))
    check_baseline(plan, [server.plan.label for server in live])
    return infos, live


def _server(server: ServerPlan, plan: Plan, model_dir: Path) -> Server:
    if server.is_peer:
        command, env = resolve_command(server, str(model_dir)), resolve_env(server, str(model_dir))
        return Server(server.label, (), server.start_timeout_s, command=command, env=env, health=server.health)
    return Server(server.label, own_arguments(server, plan)[1:], server.start_timeout_s, env=resolve_env(server, str(model_dir)))


def own_arguments(server: ServerPlan, plan: Plan) -> list[str]:
    model = ["--model-path", plan.model_dir] if plan.model_dir else []
    return ["serve", *model, *plan.flags, *server.flags]


def _shown(server: ServerPlan, plan: Plan) -> str:
    """The command without what is of this machine alone: interpreter and port."""
    if server.is_peer:
        return shlex.join(server.command)
    return shlex.join(["radixserve", *own_arguments(server, plan)])


async def _version(server: ServerPlan, url: str) -> str:
    """This project's own, or what a peer says at /version."""
    if not server.is_peer:
        return own_version()
    try:
        status, body = await fetch(url, "GET", "/version", timeout_s=10)
        return str(json.loads(body)["version"]) if status == 200 else ""
    except (RequestFailedError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        return ""


async def _run_load(words: Words, plan: Plan, load: LoadPlan, live: Sequence[_Live]) -> AsyncIterator[Run]:
    """Every rate, every repeat, every server; the order of the servers turns round from repeat to repeat."""
    for at, rate in enumerate(load.rates or (None,)):
        for repeat in range(load.repeats):
            # prompts of its own for each rate and repeat: a server that cannot flush has not seen them
            seed = plan.seed + at * load.repeats + repeat
            for server in live if repeat % 2 == 0 else reversed(live):
                try:
                    yield await _run_once(words, plan, load, server, rate, repeat, seed)
                except (RequestFailedError, OSError, TimeoutError) as error:
                    where = f"{server.plan.label}, load {load.label}, repeat {repeat + 1}"
                    raise RequestFailedError(f"{where}: {error}{server.server.how_it_ended}") from None


async def _run_once(words: Words, plan: Plan, load: LoadPlan, server: _Live, rate: float | None, repeat: int, seed: int) -> Run:
    workload = workload_of(load, words, seed)
    if server.plan.flush:
        await flush(server.url, server.plan.flush)
    mode: Mode = ClosedLoop(load.concurrency) if load.concurrency else OpenLoop(rate, load.arrivals, seed)
    async with Sampler(server.url, plan.sample_interval_s) as sampler:
        result = await run(workload, server.target, mode)
    if not result.served:
        raise RequestFailedError(f"every request failed, the first with: {result.records[0].error}")
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


def workload_of(load: LoadPlan, words: Words, seed: int) -> Workload:
    return make_workload(load.workload, words, seed, **load.options)


def _line(run: Run) -> str:
    where = run.load if run.rate is None else f"{run.load} at {run.rate:g}/s"
    failed = f", {len(run.failed)} requests failed" if run.failed else ""
    return f"{where}, {run.server}, repeat {run.repeat + 1}: {run.wall_s:.2f} s{failed}"


async def _ttft(words: Words, plan: Plan, live: Sequence[_Live], shape: ModelShape, say: Say) -> AsyncIterator[TtftResult]:
    found = next((server for server in live if plan.ttft and server.plan.label == plan.ttft.server), None)
    if plan.ttft is None or found is None:
        return
    for n, p in plan.ttft.pairs:
        pair = await measure_ttft(found.target, words, shape, n, p, repeats=plan.ttft.repeats, seed=plan.seed, flush_path=found.plan.flush)
        say(f"one request at a time: {pair.describe()}")
        parts = (pair.cold_step_s, pair.hit_step_s, pair.hit_server_s)
        yield TtftResult(n, p, pair.repeats, pair.cold_s, pair.hit_s, pair.cached_tok, pair.floor, *parts)
