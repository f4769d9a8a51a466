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
from bench.experiment.drive import Drive, warm_up
from bench.experiment.environment import describe_environment
from bench.experiment.exposition import COUNTERS, growth, read_metrics
from bench.experiment.peers import NotInstalledError, resolve_command
from bench.experiment.plan import LoadPlan, Plan, ServerPlan
from bench.experiment.results import Results, Run, ServerInfo, TtftResult
from bench.experiment.sampler import Sampler
from bench.experiment.tables import PlanError
from bench.hardware import package_version
from bench.servers import Server
from bench.ttft import measure_ttft, read_model_shape
from bench.words import Words, find_model_dir

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Live:
    """A server of the plan that is up."""

    plan: ServerPlan
    url: str


async def run_experiment(plan: Plan, command: str, say: Say) -> Results:
    """Raises PlanError before any server starts, ServerStartError, RequestFailedError; nothing is left running in any case."""
    started_at, clock = datetime.now().astimezone(), time.perf_counter()
    model_dir = find_model_dir(Path(plan.model_dir) if plan.model_dir else None)
    drive = Drive(Words(model_dir))
    for index, load in enumerate(plan.loads):
        try:
            drive.workload(load, plan.seed)
        except ValueError as error:
            raise PlanError(f"loads[{index}] ({load.label}): {error}") from None
    environment = describe_environment()
    async with AsyncExitStack() as stack:
        infos, live = await _start(stack, plan, model_dir, say)
        for server in [*live, *reversed(live)]:
            await warm_up(drive, server.plan, server.url)
        runs = [run for load in plan.loads for run in await _run_load(drive, plan, load, live, say)]
        ttft = await _ttft(drive, plan, live, model_dir, say)
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
        return package_version("radixserve")
    try:
        status, body = await fetch(url, "GET", "/version", timeout_s=10)
        return str(json.loads(body)["version"]) if status == 200 else ""
    except (RequestFailedError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        return ""


async def _run_load(drive: Drive, plan: Plan, load: LoadPlan, live: Sequence[_Live], say: Say) -> list[Run]:
    """Every rate, every repeat, every server; the order of the servers turns round from repeat to repeat."""
    runs = []
    for at, rate in enumerate(load.rates or (None,)):
        for repeat in range(load.repeats):
            # prompts of its own for each rate and repeat: a server that cannot flush has not seen them
            seed = plan.seed + at * load.repeats + repeat
            for server in live if repeat % 2 == 0 else reversed(live):
                run = await _run_once(drive, plan, load, server, rate, repeat, seed)
                say(_line(run))
                runs.append(run)
    return runs


async def _run_once(drive: Drive, plan: Plan, load: LoadPlan, server: _Live, rate: float | None, repeat: int, seed: int) -> Run:
    workload = drive.workload(load, seed)
    if server.plan.flush:
        await _flush(server)
    before = await read_metrics(server.url, COUNTERS)
    async with Sampler(server.url, plan.sample_interval_s) as sampler:
        wall_s, records = await drive.run(workload, load, server.plan, server.url, rate, seed)
    counters = growth(before, await read_metrics(server.url, COUNTERS))
    if records and all(record.error for record in records):
        raise RequestFailedError(f"{server.plan.label}, load {load.label}: every request failed, the first with: {records[0].error}")
    by_group = workload.ideal_by_group
    ideal_by_group = by_group if len(by_group) > 1 else {}
    kept = {name: value for name, value in counters.items() if "_bucket" not in name}
    return Run(
        load.label, server.plan.label, rate, repeat, seed, wall_s, workload.ideal_hit_rate, ideal_by_group, tuple(records), kept, tuple(sampler.samples)
    )


async def _flush(server: _Live) -> None:
    status, body = await fetch(server.url, "POST", server.plan.flush)
    if status != 200:
        raise RequestFailedError(f"{server.plan.label}: POST {server.plan.flush}: HTTP {status}: {body[:300].decode(errors='replace')}")


def _line(run: Run) -> str:
    where = run.load if run.rate is None else f"{run.load} at {run.rate:g}/s"
    failed = sum(record.error is not None for record in run.records)
    return f"{where}, {run.server}, repeat {run.repeat + 1}: {run.wall_s:.2f} s" + (f", {failed} requests failed" if failed else "")


async def _ttft(drive: Drive, plan: Plan, live: Sequence[_Live], model_dir: Path, say: Say) -> list[TtftResult]:
    found = next((server for server in live if plan.ttft and server.plan.label == plan.ttft.server), None)
    if plan.ttft is None or found is None:
        return []
    shape, results = read_model_shape(model_dir), []
    target = drive.target(found.plan, found.url)
    for n, p in plan.ttft.pairs:
        pair = await measure_ttft(target, drive.words, shape, n, p, repeats=plan.ttft.repeats, seed=plan.seed)
        say(f"one request at a time: {pair.describe()}")
        results.append(TtftResult(n, p, pair.repeats, pair.cold_s, pair.hit_s, pair.cached_tok, pair.floor))
    return results
