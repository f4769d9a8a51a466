"""`python -m tests.compat.run`: every foreign tool in an environment of its own against a real server. Exits with 1 if one fails."""

import argparse
import asyncio
import datetime
import tempfile
import time
import traceback
from pathlib import Path

from bench.servers import Server
from radixserve.models.location import ModelLocation, resolve_model
from tests.compat.environments import ROOT, make_environment, versions
from tests.compat.recorder import Recorder, write_requests
from tests.compat.report import Row, read_rows, write_rows
from tests.compat.tool import SERVER_FLAGS, CompatError, Context, Tool
from tests.compat.tools import TOOLS

DOC = ROOT / "docs" / "compat.md"
RECORDED = ROOT / "tests" / "http" / "recorded"


async def run_tool(tool: Tool, env_dir: Path, model: ModelLocation, server: Server) -> str:
    """What the tool found. What it sent is written to its file also when it failed."""
    recorders: list[Recorder] = []

    def record(target: str) -> str:
        recorders.append(Recorder(target, model.path.resolve(), model.name))
        return recorders[-1].start()

    with tempfile.TemporaryDirectory(prefix=f"compat-{tool.name}-") as work_dir:
        url = record(server.url)
        context = Context(env_dir, Path(work_dir), url, server.url, model.path.resolve(), model.name, record)
        try:
            return await tool.run(context)
        finally:
            for recorder in recorders:
                recorder.stop()
            requests = [request for recorder in recorders for request in recorder.requests]
            distinct = {repr(request): request for request in requests}
            write_requests(list(distinct.values()), RECORDED / f"{tool.name}.jsonl")


async def run_all(tools: list[Tool], environments: Path) -> bool:
    model = resolve_model(None)
    rows, is_good = read_rows(DOC), True
    for tool in tools:
        started = time.monotonic()
        print(f"== {tool.name}", flush=True)
        try:
            env_dir = make_environment(tool, environments)
            async with Server(tool.name, SERVER_FLAGS) as server:
                result = "passed: " + await run_tool(tool, env_dir, model, server)
        except Exception as error:  # one tool's failure is a row, and the next one's turn
            is_good = False
            result = f"FAILED: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            print(error if isinstance(error, CompatError) else traceback.format_exc(), flush=True)
        print(f"{tool.name}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
        version = versions(tool, environments / tool.name)
        rows[tool.name] = Row(tool.name, version, tool.command, result, datetime.date.today().isoformat())
        write_rows(rows, DOC)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="tools, separated by commas: " + ", ".join(tool.name for tool in TOOLS))
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-compat", help="folder of the tools' environments")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name]
    unknown = set(wanted) - {tool.name for tool in TOOLS}
    if unknown:
        parser.error(f"--only: no such tool: {', '.join(sorted(unknown))}")
    RECORDED.mkdir(exist_ok=True)
    tools = [tool for tool in TOOLS if not wanted or tool.name in wanted]
    return 0 if asyncio.run(run_all(tools, arguments.environments.resolve())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
