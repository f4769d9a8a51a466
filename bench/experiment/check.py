"""A plan's dry run: everything that it names is looked up, and nothing is started."""

import shlex
from pathlib import Path

from bench.experiment.peers import NotInstalledError, resolve_command, resolve_env
from bench.experiment.plan import Plan, ServerPlan
from bench.experiment.runner import check_baseline, check_loads, own_arguments, workload_of
from bench.experiment.tables import PlanError
from bench.words import Words, find_model_dir
from radixserve.cli import make_parser


def check_plan(plan: Plan) -> list[str]:
    """What would run, a line for each server and load.

    Raises PlanError for a load that cannot be made, a flag that this project's server does not have, a baseline that is not installed.
    """
    model_dir = find_model_dir(Path(plan.model_dir) if plan.model_dir else None)
    words = Words(model_dir)
    check_loads(plan, words)
    lines, there = [], []
    for server in plan.servers:
        try:
            command = _command(server, plan, str(model_dir))
        except NotInstalledError as error:
            lines.append(f"{server.label}: skipped, {error}")
            continue
        there.append(server.label)
        lines.append(f"{server.label}: {shlex.join(command)}")
    check_baseline(plan, there)
    for load in plan.loads:
        made, num_runs = workload_of(load, words, plan.seed), load.repeats * max(1, len(load.rates))
        lines.append(f"{load.label}: {made.num_requests} requests, {made.prompt_tokens:,} prompt tokens, {num_runs} runs on each server")
    return lines


def _command(server: ServerPlan, plan: Plan, model_dir: str) -> list[str]:
    resolve_env(server, model_dir)
    if server.is_peer:
        return resolve_command(server, model_dir)
    arguments = own_arguments(server, plan)
    try:
        make_parser().parse_args(arguments)
    except SystemExit:  # it has said on standard error what is wrong
        raise PlanError(f"servers ({server.label}): flags that radixserve serve does not take") from None
    return ["radixserve", *arguments]
