"""Hardware and versions, as a report names them."""

import os
import platform
import subprocess
import tomllib
from pathlib import Path

from bench.hardware import NOT_INSTALLED, memory_gib, package_version, processor
from radixserve.processors import num_cores

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "tokenizers", "numpy", "uvicorn", "fastapi")


def own_version() -> str:
    """That of the installed package, or of the source tree that this file lies in."""
    version = package_version("radixserve")
    if version == NOT_INSTALLED:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        version = f"{project['version']} (source tree)"
    return version


def describe_environment() -> dict[str, str]:
    """What, and its value."""
    return {
        "processor": processor(),
        "cores open to this process": str(num_cores()),
        "memory": f"{memory_gib():.0f} GiB",
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "packages": ", ".join([f"radixserve {own_version()}", *(f"{name} {package_version(name)}" for name in PACKAGES)]),
        "commit": _commit(),
        "load average at the start": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
    }


def _commit() -> str:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
