"""Work that is worth a thread only when there is much of it: the loop has other streams to serve meanwhile."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def off_loop_from(limit: int, size: int, work: Callable[[], T]) -> T:
    """What `work` gives: done here, or in a thread where `size` (in the unit of `limit`) is at least `limit`."""
    return await asyncio.to_thread(work) if size >= limit else work()
