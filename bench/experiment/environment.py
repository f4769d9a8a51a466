"""Hardware and versions, as a report names them."""

import os
import platform
import subprocess
from pathlib import Path

from bench.hardware import cores, memory_gib, package_version, processor

PACKAGES = ("radixserve", "torch", "tokenizers", "numpy", "uvicorn", "fastapi")


def describe_environment() -> dict[str, str]:
    """What, and its value."""
    return {
        "processor": processor(),
        "cores open to this process": str(cores()),
        "memory": f"{memory_gib():.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {package_version(name)}" for name in PACKAGES),
        "commit": _commit(),
        "load average at the start": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
    }


def _commit() -> str:
    try:
        here = Path(__file__).resolve().parent
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
