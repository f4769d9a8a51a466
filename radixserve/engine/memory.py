"""How much memory there is, and what the processor computes natively: what "auto" in a config is decided from."""

from pathlib import Path

import torch

MAX_CPU_POOL_BYTES = 4 << 30


def free_host_bytes() -> int:
    """Memory that can be taken without swapping: the kernel's estimate, or what a container's limit leaves, whichever is less."""
    free = _available_by_kernel()
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is None or used is None:
        return free
    return min(free, max(0, limit - used + _reclaimable_by_kernel()))


def _reclaimable_by_kernel() -> int:
    """Pages of files that this container read and that the kernel drops when memory is wanted: they count as used and are not."""
    try:
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        return int(stat.get("inactive_file", 0))
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
