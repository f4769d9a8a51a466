"""The door for new work: counts what is inside, and closes when the server drains."""

import asyncio


class Gate:
    """Entered by each request that makes the engine work, once its body is here; left when its last byte is sent."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def enter(self) -> None:
        self.num_inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self.num_inside -= 1
        if self.num_inside == 0:
            self._empty.set()

    def close(self) -> None:
        self.is_open = False

    async def wait_empty(self, timeout_s: float) -> bool:
        """Whether everyone was out within timeout_s."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
