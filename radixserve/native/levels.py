"""Instruction set levels: a build is for a level, not for one machine, so that it can be made ahead of time and shared by a fleet."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    needs: frozenset[str]  # flags of /proc/cpuinfo
    needs_torch_headers: bool = False  # torch's own products reach the matrix units

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        if self.name == "native":
            return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ()
        flags = tuple(f"-m{name.replace('avx512_', 'avx512')}" for name in sorted(self.needs) if not name.startswith("amx"))
        return (*flags, "-DRADIXSERVE_BRGEMM") if self.needs_torch_headers else flags


# best first
X86_LEVELS = (
    Level("amx", _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}, needs_torch_headers=True),
    Level("avx512_bf16", _AVX512 | {"avx512_bf16"}),
    Level("avx512", _AVX512),
    Level("avx2", _AVX2),
    Level("x86_64", frozenset()),
)


def known_levels() -> tuple[Level, ...]:
    """Those of this machine's architecture, best first."""
    return X86_LEVELS if platform.machine() in ("x86_64", "AMD64") else (Level("native", frozenset()),)


def level_of_this_machine() -> Level:
    """The best level that the processor has; RADIXSERVE_CPU_LEVEL names a lower one, for tests and for comparing."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    wanted = os.environ.get("RADIXSERVE_CPU_LEVEL")
    if wanted:
        return level_named(wanted)
    return next(level for level in known_levels() if level.needs <= flags)


def level_named(name: str) -> Level:
    """ValueError for a name that is none of this architecture's."""
    names = [level.name for level in known_levels()]
    if name not in names:
        raise ValueError(f"CPU level: expected one of {', '.join(names)}, got {name!r}")
    return known_levels()[names.index(name)]
