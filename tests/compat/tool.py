"""What a tool is to the runner, and what the runner gives it: an environment of its own, a server, a folder, a way to call a program."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600.0
# float32 whatever the processor: hits and misses must not depend on it
SERVER_FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384", "--log-level", "warning")


class CompatError(Exception):
    """The tool did not do what it should; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Tool:
    """`packages` are what pip is given; `shown` the distributions whose versions stand in the table; `run` returns the line for it."""

    name: str
    packages: tuple[str, ...]
    shown: tuple[str, ...]
    command: str
    run: "Callable[[Context], Awaitable[str]]"
    prepare: Callable[[Path], None] | None = None  # after pip, with the environment's folder


@dataclass(frozen=True, slots=True)
class Context:
    """`url` goes through the recorder, `direct_url` does not; `model_dir` has the tokenizer; `record_url` is for other servers."""

    env_dir: Path
    work_dir: Path
    url: str
    direct_url: str
    model_dir: Path
    model_name: str
    record_url: Callable[[str], str]

    @property
    def python(self) -> str:
        return str(self.env_dir / "bin" / "python")

    def program(self, name: str) -> str:
        return str(self.env_dir / "bin" / name)

    async def call(self, argv: Sequence[str], env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
        """Both outputs together. Raises CompatError with their end if the program fails or takes longer."""
        return await asyncio.to_thread(call, argv, self.work_dir, env, timeout_s)


def clean_environ(**extra: str) -> dict[str, str]:
    """Ours without what would make the tool import this project's packages, and with no hub to fall back to."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    return {**kept, "TOKENIZERS_PARALLELISM": "false", "OPENAI_API_KEY": "none", **extra}


def call(argv: Sequence[str], cwd: Path, env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=clean_environ(**(env or {})), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        raise CompatError(f"{Path(argv[0]).name} took longer than {timeout_s:g} s:\n{text[-1500:]}") from None
    if done.returncode != 0:
        raise CompatError(f"{Path(argv[0]).name} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout
