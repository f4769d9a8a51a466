"""How many threads compute, torch's and the native kernels' alike: what there is, a container's quota allows, and ranks leave over."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def cpu_quota(root: Path = CGROUP) -> int | None:
    """Processors that a container may use at most, rounded up; None where nothing limits it. cgroup v2's cpu.max, or v1's cfs quota.

    More threads than that are all stopped together for the rest of a period once they have spent it.
    """
    quota, period = _v2(root / "cpu.max") or _v1(root / "cpu") or (0, 0)
    return max(1, math.ceil(quota / period)) if quota > 0 and period > 0 else None


def num_cores() -> int:
    """Open to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(num_ranks: int, environment: Mapping[str, str] = os.environ, quota: int | None = None) -> None:
    """Take fewer threads than torch would, never more. Whoever sets OMP_NUM_THREADS has counted for himself, and no quota is looked at."""
    allowed = num_cores()
    if "OMP_NUM_THREADS" not in environment and quota is not None:
        allowed = min(allowed, quota)
    if allowed < num_cores() or num_ranks > 1:
        torch.set_num_threads(min(torch.get_num_threads(), max(1, allowed // num_ranks)))


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
