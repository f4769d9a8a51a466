"""The whole server in this process: the real app, the real AsyncEngine and engine loop, around an EchoEngine in a thread."""

import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from radixserve.core import RequestOutput
from radixserve.engine.client import AsyncEngine
from radixserve.engine.streams import RequestStream
from radixserve.server.app import create_app
from radixserve.server.stream import BODY_WRITER
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.echo_engine import EchoEngine
from tests.support.thread_link import ThreadLink
from tests.support.tiny_models import make_tiny_model
from tests.support.word_tokenizer import write_word_tokenizer


@dataclass(slots=True)
class Served:
    """One app with what stands behind it."""

    app: FastAPI
    engine: AsyncEngine
    echo: EchoEngine
    http: httpx.AsyncClient

    async def complete(self, **body: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "echo"
    write_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def words_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights, whose vocabulary is whole words: what bench.words asks for."""
    directory = tmp_path_factory.mktemp("models") / "words"
    make_tiny_model(directory, "llama", tie=True, vocab_size=4000)
    return write_word_tokenizer(directory)


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(model_dir)


@pytest.fixture
def step_s(request: pytest.FixtureRequest) -> float:
    """Seconds per engine step; set it with @pytest.mark.parametrize("step_s", [...], indirect=True)."""
    return getattr(request, "param", 0.0)


@pytest.fixture
def max_total_tokens() -> int | None:
    return None


@pytest.fixture
def max_queued_requests() -> int | None:
    return None


@pytest.fixture
async def served(
    tokenizer: Tokenizer, step_s: float, max_total_tokens: int | None, max_queued_requests: int | None
) -> AsyncIterator[Served]:
    cache, scheduler = CacheConfig(max_total_tokens=max_total_tokens), SchedulerConfig(max_queued_requests=max_queued_requests)
    config = EngineConfig(cache=cache, scheduler=scheduler)
    echoes = []

    def make_link() -> ThreadLink:
        echoes.append(EchoEngine(config, step_s))
        return ThreadLink(echoes[-1])

    engine = await AsyncEngine.start(config, make_link=make_link)
    app = create_app(engine, tokenizer, ServerConfig(max_body_bytes=100_000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(_with_body_writer(app)), base_url="http://server") as http:
        yield Served(app, engine, echoes[0], http)
    await engine.stop()


def _with_body_writer(app: ASGIApp) -> ASGIApp:
    """Offers, as our HTTP protocol does, the way to write where news arrive; every third piece is refused, as by a slow client."""

    async def with_body_writer(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope | {"extensions": {BODY_WRITER: {"writer": _Writer(send)}}}, receive, send)

    return with_body_writer


class _Writer:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._num_pieces = 0

    def try_write(self, piece: bytes) -> bool:
        self._num_pieces += 1
        if self._num_pieces % 3 == 0:
            return False
        sending = self._send({"type": "http.response.body", "body": piece, "more_body": True})
        try:
            sending.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return True
        raise AssertionError("the transport waited")


@pytest.fixture
def one_step_at_a_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine steps again only when the news of its last step were taken, so that no two are merged, however slow the machine is.

    For one request at a time.
    """
    turns = threading.Semaphore(1)
    step, take = served.echo.step, RequestStream.take

    def step_in_turn() -> list[RequestOutput]:
        assert turns.acquire(timeout=10)
        return step()

    def take_and_go_on(stream: RequestStream) -> RequestOutput | None:
        output = take(stream)
        if output is not None:
            turns.release()
        return output

    monkeypatch.setattr(served.echo, "step", step_in_turn)
    monkeypatch.setattr(RequestStream, "take", take_and_go_on)
