"""AsyncEngine: the server's side of the wire. Gives each request its stream, answers for a dead engine, and starts a new one."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Self

import zmq

from radixserve.config import EngineConfig
from radixserve.core import FinishReason, Request
from radixserve.engine import wire
from radixserve.engine.info import EngineInfo
from radixserve.engine.link import EngineLink, ProcessLink
from radixserve.engine.open_streams import OpenStreams
from radixserve.engine.progress import Progress
from radixserve.engine.questions import Questions
from radixserve.engine.queue_room import QueueRoom
from radixserve.engine.streams import RequestStream
from radixserve.errors import EngineDeadError, RadixServeError
from radixserve.metrics import EngineStats

logger = logging.getLogger("radixserve.server")

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0
STOP_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 1.0  # an engine that has work and was silent for so long is asked for its figures


class AsyncEngine:
    """One engine process after another behind one face. Lives on one event loop; use start() to make it."""

    def __init__(self, config: EngineConfig, log_level: str, make_link: Callable[[], EngineLink], max_restarts: int) -> None:
        self._config = config
        self._log_level = log_level
        self._make_link = make_link
        self._max_restarts = max_restarts
        self._restart_times: deque[float] = deque()
        self._link: EngineLink | None = None
        self._info: EngineInfo | None = None
        self._is_alive = False
        self._is_stopping = False
        self._is_last = False
        self._given_up = asyncio.Event()
        self._questions = Questions(self._send_if_alive)
        self._last_stats = EngineStats()
        self._stats_of_the_dead = EngineStats()  # the counters of all engines before this one
        self._supervisor: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._progress = Progress()
        self.room = QueueRoom(config.scheduler.max_queued_requests)
        self._streams = OpenStreams(self.room)
        self.num_restarts = 0

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "info",
        make_link: Callable[[], EngineLink] = ProcessLink,
        max_restarts: int = MAX_RESTARTS,
    ) -> Self:
        """Start an engine and wait until it is ready.

        Raises EngineDeadError, with what the engine or the operating system said, when it cannot start; ConfigError for a bad TMPDIR.
        """
        engine = cls(config, log_level, make_link, max_restarts)
        await engine._open_link()
        engine._supervisor = asyncio.create_task(engine._supervise(), name="engine-supervisor")
        engine._watcher = asyncio.create_task(engine._watch(), name="engine-watcher")
        return engine

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine was never ready"
        return self._info

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    @property
    def last_stats(self) -> EngineStats:
        """Gauges of the living engine, 0 without one; counters over all engines so far: they never fall."""
        return self._last_stats

    @property
    def num_tokens_without_news(self) -> int:
        """Prompt tokens of all requests that nothing was heard of yet."""
        return self._streams.num_tokens_without_news

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine last moved anything, while it has work; 0 without work. Accurate to about WATCH_INTERVAL_S."""
        return self._progress.silent_s(time.monotonic()) if self._streams else 0.0

    def has_moved_since(self, then: float) -> bool:
        """Whether the engine moved anything after `then`, of time.monotonic(). Learnt up to WATCH_INTERVAL_S late."""
        return self._progress.has_moved_since(then)

    def submit(self, request: Request) -> RequestStream:
        """Hand a request over. Its stream always ends in one final output, also when the engine dies.

        Raises EngineDeadError when there is no engine to take it.
        """
        self._require_alive()
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        if not self._streams:
            self._progress.note_move(time.monotonic())
        self._send(wire.Add(request))  # first: what could not be sent leaves nothing behind
        return self._streams.open(request, self._abandon, self._abandon_finished)

    def abort(self, request_id: str) -> None:
        """Ask for an end with reason abort; the stream still gets its final output. An unknown id is ignored."""
        if request_id in self._streams and self._is_alive:
            self._send(wire.Abort(request_id))

    def abort_matching(self, prefix: str) -> int:
        """Abort every request whose id begins with `prefix` ("" for all); returns how many there were."""
        request_ids = self._streams.ids(prefix)
        for request_id in request_ids:
            self.abort(request_id)
        return len(request_ids)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """Ask for an end with reason stop after num_output_tokens tokens. An unknown id is ignored."""
        if request_id in self._streams and self._is_alive:
            self._send(wire.Finish(request_id, num_output_tokens))

    def cut_all(self, error: RadixServeError) -> None:
        """End every stream now with `error`, and abort what runs."""
        self.abort_matching("")
        self._streams.cut_all(error)

    async def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Empty the tree. False when the engine was still busy, or did not answer, after timeout_s; it does not happen later then.

        Raises EngineDeadError.
        """
        return await self._questions.flush(timeout_s)

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """The newest snapshot that can be had within timeout_s: an older one in the middle of a long step, or without an engine."""
        try:
            answer = await self._questions.ask(wire.GetStats, timeout_s)
        except (TimeoutError, EngineDeadError):
            return self._last_stats
        assert isinstance(answer, wire.Stats)
        return self._last_stats

    async def wait_given_up(self) -> None:
        """Returns when no engine runs and none will be started any more."""
        await self._given_up.wait()

    def replace_no_more(self) -> None:
        """From now on an engine that dies is the last: for a server that only lets finish what runs."""
        self._is_last = True

    async def stop(self) -> None:
        """End the engine process and every stream; no restart follows."""
        self._is_stopping = True
        tasks = [task for task in (self._supervisor, self._watcher) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._mark_dead(EngineDeadError("the server stopped its engine"))
        await self._close_link(STOP_TIMEOUT_S)

    def _send_if_alive(self, message: wire.ClientMessage) -> None:
        self._require_alive()
        self._send(message)

    def _send(self, message: wire.ClientMessage) -> None:
        assert self._link is not None
        self._link.send(message)

    async def _close_link(self, timeout_s: float) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.stop(timeout_s)

    async def _open_link(self) -> None:
        try:
            link = self._link = self._make_link()
            await link.start(self._config, self._log_level)
            message = await link.receive()
            if isinstance(message, wire.Fatal):
                raise EngineDeadError(message.message)
            assert isinstance(message, wire.Ready), f"expected Ready, got {type(message).__name__}"
        except (OSError, zmq.ZMQError) as error:
            await self._close_link(0.0)
            raise EngineDeadError(f"the engine process could not be started: {error}") from error
        except BaseException:
            await self._close_link(0.0)
            raise
        self._info = message.info
        self.room.num_slots = message.info.max_running_requests
        self._progress.note_move(time.monotonic())
        self._is_alive = True

    async def _supervise(self) -> None:
        """Returns, and says so, when there will be no engine any more: whatever the reason, a server at 503 for ever is none."""
        try:
            await self._replace_the_dead()
            if not self._is_last:
                logger.error("engine: died more than %d times in %d s; giving up", self._max_restarts, RESTART_WINDOW_S)
        except Exception:
            logger.exception("engine: its supervisor failed; giving up")
            self._mark_dead(EngineDeadError("the engine is not running"))
        self._given_up.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self._is_alive and self.stalled_s >= WATCH_INTERVAL_S:
                await self.stats(WATCH_INTERVAL_S)

    async def _replace_the_dead(self) -> None:
        while True:
            try:
                await self._pump()
            except EngineDeadError as error:
                logger.error("engine: %s", error.message)
                self._mark_dead(error)
            except Exception:
                logger.exception("engine: its message could not be understood")
                self._mark_dead(EngineDeadError("the engine sent what its server does not understand"))
            await self._close_link(0.0)
            if not await self._restart():
                return

    async def _pump(self) -> None:
        link = self._link
        assert link is not None
        while True:
            match await link.receive():
                case wire.Outputs(outputs):
                    if any(output.finish_reason is not FinishReason.ERROR for output in outputs):
                        self._progress.note_move(time.monotonic())  # a refusal is none: an engine that only answers gets nowhere
                    await self._streams.deliver(outputs)
                case wire.Flushed() | wire.Stats() as answer:
                    if isinstance(answer, wire.Stats):
                        self._last_stats = answer.stats.plus_counters_of(self._stats_of_the_dead)
                        self._progress.note_stats(answer.stats, time.monotonic())
                    self._questions.answer(answer)
                case wire.Fatal(message):
                    raise EngineDeadError(message)
                case wire.Ready():
                    raise AssertionError("an engine is ready once")

    async def _restart(self) -> bool:
        while True:
            now = time.monotonic()
            while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_S:
                self._restart_times.popleft()
            if self._is_last or len(self._restart_times) >= self._max_restarts:
                return False
            self._restart_times.append(now)
            self.num_restarts += 1
            logger.warning("engine: starting a new one (%d of %d)", len(self._restart_times), self._max_restarts)
            try:
                await self._open_link()
            except RadixServeError as error:
                logger.error("engine: %s", error.message)
            except Exception:
                logger.exception("engine: it could not be started")
            else:
                logger.info("engine: ready again")
                return True

    def _mark_dead(self, error: EngineDeadError) -> None:
        self._is_alive = False
        self._stats_of_the_dead = self._last_stats = self._last_stats.without_gauges()
        self.room.clear()
        self._streams.cut_all(error)
        self._questions.fail_all(error)

    def _require_alive(self) -> None:
        if not self._is_alive:
            raise EngineDeadError(
                "the engine is not running"
                if self._is_stopping or self._given_up.is_set()
                else "the engine ended and is being started again"
            )

    def _abandon(self, request_id: str) -> None:
        self.abort(request_id)
        self._streams.forget(request_id)

    def _abandon_finished(self, request_id: str, num_output_tokens: int) -> None:
        self.finish(request_id, num_output_tokens)
        self._streams.forget(request_id)
