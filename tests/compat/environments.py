"""One virtual environment per tool, made once: what a tool drags in never meets what we run on."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.compat.tool import CompatError, Tool

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def make_environment(tool: Tool, root: Path) -> Path:
    """The folder of the tool's environment; made, or made again after a change of what it needs. Raises CompatError if pip fails."""
    env_dir = root / tool.name
    stamp = env_dir / ".made-of"
    wanted = "\n".join(tool.packages)
    if stamp.is_file() and stamp.read_text() == wanted:
        return env_dir
    shutil.rmtree(env_dir, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(env_dir)], check=True)
    pip = [str(env_dir / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(CONSTRAINTS)]
    done = subprocess.run([*pip, *tool.packages], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise CompatError(f"pip ended with {done.returncode}:\n{done.stdout[-3000:]}")
    if tool.prepare is not None:
        tool.prepare(env_dir)
    stamp.write_text(wanted)
    return env_dir


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(tool: Tool, env_dir: Path) -> str:
    """`name 1.2.3, ...` of what the table shows."""
    site = [str(path) for path in env_dir.glob("lib/python*/site-packages")]
    installed = {normalized(found.name): found.version for found in importlib.metadata.distributions(path=site)}
    return ", ".join(f"{name} {installed.get(normalized(name), '?')}" for name in tool.shown)
