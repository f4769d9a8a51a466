"""OpenStreams: who listens to which request, and the room in the engine's queue that each request takes until its end has come."""

import asyncio
from collections.abc import Callable, Sequence

from radixserve.core import Request, RequestOutput
from radixserve.engine.queue_room import QueueRoom
from radixserve.engine.streams import RequestStream
from radixserve.errors import RadixServeError

OUTPUTS_PER_TURN = 16  # of one message: delivering may write to a socket each time, and the loop has others to serve between them


class OpenStreams:
    """A request whose stream is forgotten keeps its room: the engine still has it."""

    def __init__(self, room: QueueRoom) -> None:
        self._room = room
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    @property
    def num_tokens_without_news(self) -> int:
        """Prompt tokens of all requests that nothing was heard of yet."""
        return sum(stream.num_prompt_tokens for stream in self._streams.values() if not stream.has_news)

    def ids(self, prefix: str = "") -> list[str]:
        return [request_id for request_id in self._streams if request_id.startswith(prefix)]

    def open(self, request: Request, abort: Callable[[str], None], finish: Callable[[str, int], None]) -> RequestStream:
        """For a request that was sent; its id is in no use."""
        stream = self._streams[request.request_id] = RequestStream(request, abort, finish)
        self._room.enter(request.request_id)
        return stream

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for count, output in enumerate(outputs, 1):
            stream = self._streams.get(output.request_id)
            if output.is_final:
                self._room.leave(output.request_id)
                self.forget(output.request_id)
            if stream is not None:
                stream.push(output)
            if count % OUTPUTS_PER_TURN == 0:
                await asyncio.sleep(0)

    def cut_all(self, error: RadixServeError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.cut(error)
