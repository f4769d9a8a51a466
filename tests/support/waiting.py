"""Waiting for what another thread or process does."""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

READY = "radixserve is ready on "


async def until(condition: Callable[[], object], limit_s: float = 5.0) -> None:
    """Returns when condition() is true; raises TimeoutError after limit_s."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - no event of this loop tells what happens over there
            await asyncio.sleep(0.001)


def ready_address(process: subprocess.Popen[str], log_file: Path | None = None) -> str:
    """The address in the line that a server prints once it listens; AssertionError, with the text of its log, if it ends before."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith(READY):
            return line.removeprefix(READY).split()[0]
    said = "" if log_file is None else f":\n{log_file.read_text()}"
    raise AssertionError(f"the server ended with {process.wait()} before it was ready{said}")
