"""Whether a library's file is what was built: its last 32 bytes are the SHA-256 of what lies before them, which no loader minds.

In the file itself, not beside it: one rename puts both in place. Nothing is mapped before it has been read whole: the loader does not
notice that the end of a file is missing, and the first use of a page that is not there ends the process.
"""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from radixserve.native.compiler import torch_dir
from radixserve.native.levels import Level, can_run
from radixserve.native.signatures import SIGNATURES

_DIGEST_BYTES = hashlib.sha256().digest_size
_TIMEOUT_S = 120
_LOAD = "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); [getattr(library, name) for name in sys.argv[2:]]"


def seal(library: Path) -> None:
    digest = hashlib.sha256(library.read_bytes()).digest()
    with open(library, "ab") as file:
        file.write(digest)


def fault_of(library: Path) -> str:
    """What is wrong with a sealed file, after its name; empty where nothing is."""
    try:
        data = memoryview(library.read_bytes())
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    is_whole = len(data) > _DIGEST_BYTES and hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]
    return "" if is_whole else "is damaged"


def why_not_loadable(library: Path, level: Level) -> str:
    """What keeps a fresh library from being loaded, or which function it lacks; empty where nothing does. In a process of its own,
    which may die of it. Of a library for another processor only the names are looked for: loading runs some of its code."""
    if not can_run(level):
        data = library.read_bytes()
        missing = [name for name in SIGNATURES if name.encode() + b"\0" not in data]
        return f"no function {missing[0]}" if missing else ""
    found = os.pathsep.join(filter(None, (str(torch_dir() / "lib"), os.environ.get("LD_LIBRARY_PATH"))))
    command = [sys.executable, "-I", "-S", "-c", _LOAD, str(library), *SIGNATURES]
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LD_LIBRARY_PATH": found},
        )
    except subprocess.TimeoutExpired:
        return f"loading it did not end within {_TIMEOUT_S} s"
    if run.returncode < 0:
        return f"loading it ends a process by {signal.Signals(-run.returncode).name}"
    return (run.stderr.splitlines() or ["no message"])[-1].replace(f"{library}: ", "") if run.returncode else ""
