"""`radixserve serve` as a user starts it, for as long as a test needs it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import ready_address

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def real_server(*flags: str) -> Iterator[str]:
    """The address of a server with these flags, on a free port. It must end well when it is told to."""
    command = [sys.executable, "-m", "radixserve", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield ready_address(process)
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stdout.close()
