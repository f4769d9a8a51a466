"""An EngineLink whose engine runs the real loop in a thread of this process: fast to start, and open to a test's eyes."""

import itertools
import threading

import zmq
import zmq.asyncio

from radixserve.config import EngineConfig
from radixserve.engine import wire
from radixserve.engine.process import FAILED, EngineLoop, StepEngine
from radixserve.errors import EngineDeadError

_numbers = itertools.count()


class ThreadLink:
    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._address = f"inproc://engine-{next(_numbers)}"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        socket = zmq.Context(self._context).socket(zmq.DEALER)
        socket.connect(self._address)
        try:
            socket.send(wire.encode(wire.Ready(self._engine.info)))
            EngineLoop(self._engine, socket).run()
        except Exception:
            socket.send(wire.encode(wire.Fatal(FAILED)))
        finally:
            socket.close()

    async def start(self, config: EngineConfig, log_level: str) -> None:
        self._socket.bind(self._address)
        self._thread.start()

    def send(self, message: wire.ClientMessage) -> None:
        self._socket.send(wire.encode(message))

    async def receive(self) -> wire.EngineMessage:
        while True:
            if await self._socket.poll(100):
                return wire.decode_engine_message(await self._socket.recv())
            if not self._thread.is_alive():
                raise EngineDeadError("the engine thread ended")

    async def stop(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self.send(wire.Shutdown())
            self._thread.join(5)
        self._socket.close(linger=0)
        self._context.term()
