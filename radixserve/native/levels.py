"""Instruction set levels: a build is for a level, not for one machine, so that it can be made ahead of time and shared by a fleet."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from radixserve.errors import ConfigError

CPUINFO = Path("/proc/cpuinfo")
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
# what tells one Arm core from another
_IDENTITY = ("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    needs: frozenset[str]  # flags of /proc/cpuinfo
    needs_torch_headers: bool = False  # torch's own products reach the matrix units, and find out by themselves what there is

    @property
    def compiled_for(self) -> frozenset[str]:
        """Without these it dies of an illegal instruction. Less than it needs where torch drives the matrix units."""
        return frozenset(name for name in self.needs if not name.startswith("amx"))

    @property
    def is_for_one_processor(self) -> bool:
        """Compiled for whatever the compiler finds, so it is nobody else's."""
        return self.name == "native"

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        if self.is_for_one_processor:
            return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ()
        flags = tuple(f"-m{name.replace('avx512_', 'avx512')}" for name in sorted(self.compiled_for))
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
    """The best level that the processor has; RADIXSERVE_CPU_LEVEL names another that it can run, for tests and for comparing.

    ConfigError for a name that is none, and for one whose instructions the processor lacks. "amx" runs without AMX, on torch's products.
    """
    flags = set(_cpuinfo().split())
    wanted = os.environ.get("RADIXSERVE_CPU_LEVEL")
    if not wanted:
        return next(level for level in known_levels() if level.needs <= flags)
    runnable = {level.name: level for level in known_levels() if level.compiled_for <= flags}
    if wanted not in runnable:
        raise ConfigError(f"RADIXSERVE_CPU_LEVEL: expected one of {', '.join(runnable)} on this processor, got {wanted!r}")
    return runnable[wanted]


def can_run(level: Level) -> bool:
    """Whether this processor has the instructions that a level is compiled to."""
    return level.compiled_for <= set(_cpuinfo().split())


def level_named(name: str) -> Level:
    """ValueError for a name that is none of this architecture's."""
    names = [level.name for level in known_levels()]
    if name not in names:
        raise ValueError(f"CPU level: expected one of {', '.join(names)}, got {name!r}")
    return known_levels()[names.index(name)]


def processor_identity() -> str:
    """What distinguishes this processor from others that a build for one processor may not run on."""
    lines = {line.strip() for line in _cpuinfo().splitlines() if line.startswith(_IDENTITY)}
    return "\n".join(sorted(lines))


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""
