"""How much memory there is, and what the processor computes natively: what "auto" in a config is decided from."""

from pathlib import Path

import torch

from radixserve.processors import CGROUP

MAX_CPU_POOL_BYTES = 4 << 30


def free_host_bytes(root: Path = CGROUP) -> int:
    """Memory that can be taken without swapping: the kernel's estimate, or what a container's limit leaves, whichever is less.

    Of cgroup v2, or of v1, whose counts of what lies below a group are apart from its own.
    """
    limits = (
        _left_by_limit(root, "memory.max", "memory.current", "inactive_file"),
        _left_by_limit(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    return min([_available_by_kernel(), *(left for left in limits if left is not None)])


def _left_by_limit(group: Path, limit_name: str, used_name: str, reclaimable_name: str) -> int | None:
    limit, used = _read_int(group / limit_name), _read_int(group / used_name)
    if limit is None or used is None:
        return None
    return max(0, limit - used + _reclaimable_by_kernel(group / "memory.stat", reclaimable_name))


def _reclaimable_by_kernel(path: Path, name: str) -> int:
    """Pages of files that this container read and that the kernel drops when memory is wanted: they count as used and are not."""
    try:
        stat = dict(line.split() for line in path.read_text().splitlines())
        return int(stat.get(name, 0))
    except (OSError, ValueError):
        return 0


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken on the device."""
    return free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _available_by_kernel() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no better word: half of what is built in


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such limit, or "max"
        return None


def has_native_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or Arm's BF16); without that float32 is faster and exacter."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def cpu_pool_bytes() -> int:
    """Bytes for a KV pool in main memory, weights being loaded already: min(4 GiB, half of the free memory)."""
    return min(MAX_CPU_POOL_BYTES, free_host_bytes() // 2)
