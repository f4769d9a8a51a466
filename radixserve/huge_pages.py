"""Main memory in huge pages, for what a step reads from end to end: weights and K and V. With pages of 4 KiB a processor spends up to a
third of such a read on finding out where the next page lies, most of all in a virtual machine, and its own prefetching ends at each page.

No torch in here, and no promise: where the system has no huge pages it is memory like any other.
"""

import ctypes
import mmap
from contextlib import suppress

HUGE_BYTES = 2 << 20  # of x86-64; elsewhere a multiple of the usual page is as good
_CHUNK_BYTES = 32 << 20  # address space for small pieces; none of it is memory before it is written to
_ALIGNMENT = 64


class HugePages:
    """Hands out pieces, which lie side by side if they are small. A piece's memory lives as long as anything that was made of it."""

    def __init__(self) -> None:
        self._chunk = memoryview(b"")
        self._num_used = 0

    def take(self, num_bytes: int) -> memoryview:
        """Writable zeros, at a multiple of 64 bytes. MemoryError."""
        assert num_bytes >= 0, f"HugePages.take: expected num_bytes >= 0, got {num_bytes}"
        if num_bytes > len(self._chunk) - self._num_used:
            if num_bytes > _CHUNK_BYTES // 2:
                return _map(num_bytes)
            self._chunk, self._num_used = _map(_CHUNK_BYTES), 0
        first = self._num_used
        self._num_used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[first : first + num_bytes]


def _map(num_bytes: int) -> memoryview:
    """Zeros from a multiple of HUGE_BYTES on. What does not fill a huge page at the end takes small ones."""
    try:
        mapped = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has none
    except OSError as error:
        raise MemoryError(f"no address space for {num_bytes} bytes: {error}") from error
    first = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % HUGE_BYTES
    num_huge = num_bytes // HUGE_BYTES * HUGE_BYTES
    if num_huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE, first, num_huge)
    return memoryview(mapped)[first : first + num_bytes]
