"""How many processors this process may use: those open to it, and what a container's quota allows. Files as cgroup v1 and v2 write them."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Open to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_usable(root: Path = CGROUP) -> int:
    """What is worth keeping busy: open to this process and within its quota."""
    quota = cpu_quota(root)
    return num_cores() if quota is None else min(num_cores(), quota)


def cpu_quota(root: Path = CGROUP) -> int | None:
    """Processors that a container may use at most, rounded up; None where nothing limits it. cgroup v2's cpu.max, or v1's cfs quota.

    More threads than that are all stopped together for the rest of a period once they have spent it.
    """
    quota, period = _v2(root / "cpu.max") or _v1(root / "cpu") or (0, 0)
    return max(1, math.ceil(quota / period)) if quota > 0 and period > 0 else None


def _v2(path: Path) -> tuple[int, int] | None:
    """ "QUOTA PERIOD" in microseconds, or "max PERIOD" """
    try:
        quota, period = path.read_text().split()
        return int(quota), int(period)
    except (OSError, ValueError):
        return None


def _v1(directory: Path) -> tuple[int, int] | None:
    """A quota of -1 is none."""
    try:
        return int((directory / "cpu.cfs_quota_us").read_text()), int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
