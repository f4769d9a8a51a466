"""Waiting for what another thread or process does."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], limit_s: float = 5.0) -> None:
    """Returns when condition() is true; raises TimeoutError after limit_s."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - no event of this loop tells what happens over there
            await asyncio.sleep(0.001)
