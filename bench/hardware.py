"""One line about this machine, for the entries of LOG.md: python -m bench.hardware"""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

from radixserve.processors import num_cores

# instruction sets that decide how fast a CPU multiplies matrices, as the kernel names them
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "bf16", "asimd")


NOT_INSTALLED = "not installed"


def _field_of_cpuinfo(cpuinfo: str, name: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def processor() -> str:
    """Its name, and the instruction sets that decide how fast it multiplies matrices."""
    cpuinfo = _read("/proc/cpuinfo")
    model = _field_of_cpuinfo(cpuinfo, "model name") or platform.processor() or platform.machine()
    flags = set((_field_of_cpuinfo(cpuinfo, "flags") or _field_of_cpuinfo(cpuinfo, "Features")).split())
    known = " ".join(flag for flag in _FLAGS if flag in flags) or "no known flags"
    return f"{model} ({known})"


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def describe_hardware() -> str:
    """Date, processor, cores open to this process, instruction sets, memory, Python and torch."""
    return (
        f"{datetime.date.today().isoformat()}; {processor()}, {num_cores()} cores; {memory_gib():.0f} GiB; {platform.system()}; "
        f"Python {platform.python_version()}, torch {package_version('torch')}"
    )


if __name__ == "__main__":
    print(describe_hardware())
