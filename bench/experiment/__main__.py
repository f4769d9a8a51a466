"""python -m bench.experiment plan.toml: run an experiment, or make the report of one again.

python -m bench.experiment bench/plans/quick.toml --out bench/out/quick
python -m bench.experiment bench/plans/peers.toml --check
python -m bench.experiment --report bench/out/quick
"""

import argparse
import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.client import RequestFailedError
from bench.experiment.canvas import PlotsUnavailableError, pyplot
from bench.experiment.check import check_plan
from bench.experiment.plan import load_plan
from bench.experiment.report import write_report
from bench.experiment.results import Results, ResultsFile, read_results
from bench.experiment.runner import Keep, run_experiment
from bench.experiment.tables import PlanError
from bench.experiment.trust import command_line
from bench.servers import ServerStartError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.experiment", description="Run a plan and write results, plots and a report.")
    parser.add_argument("plan", type=Path, nargs="?", help="a TOML file, see docs/experiments.md")
    parser.add_argument("--out", type=Path, help="folder to write to (default: bench/out/NAME-OF-THE-PLAN)")
    parser.add_argument("--check", action="store_true", help="say what the plan would run, and end")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="make the report in FOLDER again, from its results.json")
    return parser


async def _run(path: Path, arguments: Sequence[str], keep: Keep) -> Results:
    plan = load_plan(path)
    # as Ctrl-C: the servers are stopped on the way out
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {text}", flush=True)

    return await run_experiment(plan, command_line(arguments), say, keep)


def _main(arguments: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if (args.plan is None) == (args.report is None):
        parser.error("expected either a plan or --report FOLDER")
    if args.check and args.plan is None:
        parser.error("--check: expected a plan")
    folder: Path = args.report or args.out or Path("bench/out") / args.plan.stem
    file = ResultsFile(folder / "results.json")
    try:
        if args.check:
            print("\n".join(check_plan(load_plan(args.plan))))
            return 0
        pyplot()  # before minutes of measuring, not after
        if args.report is None:
            asyncio.run(_run(args.plan, arguments, file.write))
        write_report(read_results(folder / "results.json"), folder)
    except (PlanError, PlotsUnavailableError, RequestFailedError, ServerStartError, OSError, TimeoutError, ValueError) as error:
        print(f"experiment failed: {error}", file=sys.stderr)
        _tell_what_is_left(file, folder)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("experiment stopped; its servers are stopped too", file=sys.stderr)
        _tell_what_is_left(file, folder)
        return 130
    print(f"{folder / 'report.html'}")
    return 0


def _tell_what_is_left(file: ResultsFile, folder: Path) -> None:
    if file.has_runs:
        command = shlex.join(
            [sys.executable, "-m", "bench.experiment", "--report", str(folder)]
        )  # to be pasted: `python` may be another one
        print(f"what was measured until then: {command}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
