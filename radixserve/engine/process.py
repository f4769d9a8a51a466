"""The engine in its own process: reads Start from standard input, builds the engine, then steps it while there is work.

It belongs to its server: it ignores SIGINT, SIGTERM and SIGHUP (the server decides when it ends) and dies with the server, even inside a
long step.
"""

import ctypes
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import zmq

from radixserve.config import EngineConfig
from radixserve.core import FinishReason, Request, RequestError, RequestOutput
from radixserve.engine import wire
from radixserve.engine.garbage import spare_pauses
from radixserve.engine.info import EngineInfo
from radixserve.errors import RadixServeError, UserError
from radixserve.metrics import EngineStats

logger = logging.getLogger("radixserve.engine")

PARENT_WATCH_INTERVAL_S = 0.5
FAILED = "the engine failed; see its log"  # all that a client may know: the exception may hold paths or prompts
IDLE_CHECK_DELAY_S = 1.0  # quiet for so long before the account is recounted: a recount must not delay the next of a row of requests
_PR_SET_PDEATHSIG = 1


class StepEngine(Protocol):
    """What the loop needs of an engine. abort and finish only mark; the final output comes from the next step.

    An unknown request id is no error there: the request may have ended while the message was under way.
    """

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def finish(self, request_id: str, num_output_tokens: int) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def flush_cache(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def check_idle(self) -> None: ...
    def close(self) -> None: ...


EngineFactory = Callable[[EngineConfig], StepEngine]


class EngineLoop:
    """Messages in, steps, outputs out, until Shutdown. The socket never drops a message: its high-water marks are off."""

    def __init__(self, engine: StepEngine, socket: "zmq.Socket[bytes]", *, is_watchful: bool = False) -> None:
        """is_watchful: check an idle engine again and again, since it has processes of its own that may end."""
        self._engine = engine
        self._socket = socket
        self._is_running = True
        self._send_seconds = 0.0
        self._is_watchful = is_watchful
        self._idle_check_due = is_watchful

    def run(self) -> None:
        try:
            while self._is_running:
                self._receive()
                if self._is_running and self._engine.has_work:
                    self._idle_check_due = True
                    self._send_outputs(self._engine.step())
        finally:
            self._engine.close()

    def _receive(self) -> None:
        """Handle all messages that are there; wait for one when there is nothing to step. A flush that was withdrawn meanwhile is none."""
        if not self._engine.has_work and not self._socket.poll(int(IDLE_CHECK_DELAY_S * 1000) if self._idle_check_due else None):
            self._idle_check_due = self._is_watchful
            self._engine.check_idle()
            return
        messages = list(self._waiting_messages())
        withdrawn = {message.ticket for message in messages if isinstance(message, wire.WithdrawFlush)}
        for message in messages:
            if not (isinstance(message, wire.Flush) and message.ticket in withdrawn):
                self._handle(message)

    def _waiting_messages(self) -> Iterator[wire.ClientMessage]:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield wire.decode_client_message(data)

    def _handle(self, message: wire.ClientMessage) -> None:
        match message:
            case wire.Add(request):
                try:
                    self._engine.add(request)
                except UserError as error:
                    self._send_outputs([_refusal(request, error)])
            case wire.Abort(request_id):
                self._engine.abort(request_id)
            case wire.Finish(request_id, num_output_tokens):
                self._engine.finish(request_id, num_output_tokens)
            case wire.Flush(ticket):
                self._send(wire.Flushed(ticket, self._engine.flush_cache()))
            case wire.WithdrawFlush():
                pass  # it had happened before
            case wire.GetStats(ticket):
                self._send(wire.Stats(ticket, self._stats()))
            case wire.Shutdown():
                self._is_running = False

    def _stats(self) -> EngineStats:
        stats = self._engine.stats()
        return dataclasses.replace(stats, step_seconds=dataclasses.replace(stats.step_seconds, send=self._send_seconds))

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            started = time.perf_counter()
            self._send(wire.Outputs(outputs))
            self._send_seconds += time.perf_counter() - started

    def _send(self, message: wire.EngineMessage) -> None:
        self._socket.send(wire.encode(message))


def _refusal(request: Request, error: UserError) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        token_ids=(),
        num_prompt_tokens=len(request.prompt_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        finish_reason=FinishReason.ERROR,
        error=RequestError.of(error),
    )


def die_with_parent(parent_pid: int) -> None:
    """End this process when the server is gone: by the kernel where it can do so, and by a thread that looks, everywhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    end_without_parent(parent_pid)


def end_without_parent(parent_pid: int) -> None:
    """The part of die_with_parent that does not mind which of the parent's threads started this process, and whether that one lives on."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def build_engine(config: EngineConfig) -> StepEngine:
    from radixserve.engine.engine import Engine

    return Engine.build(config)


def main(factory: EngineFactory = build_engine) -> int:
    """Returns the exit status. The factory is an argument so that tests can run this very process around a small engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    start = wire.decode_start(sys.stdin.buffer.read())
    logging.basicConfig(level=start.log_level.upper(), format="%(asctime)s %(message)s", datefmt="[%Y-%m-%d %H:%M:%S]", stream=sys.stderr)
    die_with_parent(start.parent_pid)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(start.address)
    try:
        engine = factory(start.config)
        spare_pauses()
        socket.send(wire.encode(wire.Ready(engine.info)))
        EngineLoop(engine, socket, is_watchful=start.config.tp_size > 1).run()
        return 0
    except RadixServeError as error:
        socket.send(wire.encode(wire.Fatal(error.message)))
        return 1
    except Exception:
        logger.exception("the engine failed")
        socket.send(wire.encode(wire.Fatal(FAILED)))
        return 1
    finally:
        socket.close()
        context.term()


if __name__ == "__main__":
    # Straight out: a thread of a math library or a pool to free must not hold up a process whose work is done.
    status = main()
    sys.stderr.flush()
    os._exit(status)
