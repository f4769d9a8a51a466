"""Real processes: the server as its own process with uvicorn, its engine process below it, the openai package in front."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from radixserve.config import EngineConfig, ServerConfig
from radixserve.engine.client import AsyncEngine
from radixserve.engine.garbage import FULL_COLLECTION_INTERVAL
from radixserve.engine.link import ProcessLink
from radixserve.errors import ConfigError, EngineDeadError
from radixserve.server.serve import LAST_BYTES_TIMEOUT_S, LAST_WORDS_TIMEOUT_S, _bind, run_server
from tests.support.waiting import ready_address, until

ROOT = Path(__file__).resolve().parents[2]
STEP_S = 0.01


@dataclass(slots=True)
class Server:
    process: subprocess.Popen[str]
    url: str
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def engine(self) -> psutil.Process:
        """The engine process, once there is exactly one."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    async def health(self) -> int:
        return (await self.http.get("/health")).status_code

    async def wait_health(self, is_healthy: bool, limit_s: float = 10.0) -> None:
        async with asyncio.timeout(limit_s):
            while (await self.health() == 200) is not is_healthy:  # noqa: ASYNC110 - it is another process that changes
                await asyncio.sleep(0.02)

    async def wait_exit(self, limit_s: float = 10.0) -> int:
        await until(lambda: self.process.poll() is not None, limit_s)
        return self.process.returncode


@pytest.fixture
def drain_timeout_s(request: pytest.FixtureRequest) -> float:
    return getattr(request, "param", 10.0)


@pytest.fixture
async def server(model_dir: Path, drain_timeout_s: float, tmp_path: Path) -> AsyncIterator[Server]:
    command = [sys.executable, "-m", "tests.support.echo_server_main", str(model_dir), str(STEP_S), str(drain_timeout_s)]
    with open(tmp_path / "server.log", "w") as log:  # noqa: ASYNC230 - nor does this
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)  # noqa: ASYNC220 - starting takes no time
    try:
        url = await asyncio.to_thread(ready_address, process, tmp_path / "server.log")
        async with httpx.AsyncClient(base_url=url) as http, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            yield Server(process, url, client, http, tmp_path / "server.log")
    finally:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        process.wait()
        await until(lambda: all(is_gone(child) for child in children))
        assert process.stdout is not None
        process.stdout.close()


def is_gone(process: psutil.Process) -> bool:
    """Ended; whether somebody has asked for its status yet is not our business."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def collect(server: Server, **body: object) -> str:
    stream = await server.client.completions.create(model="default", stream=True, **body)
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def test_openai_client(server: Server) -> None:
    answer = await server.client.completions.create(model="default", prompt="hello ", max_tokens=12)
    assert answer.choices[0].text == "hello hello "
    assert answer.choices[0].finish_reason == "length"
    answer = await server.client.completions.create(model="echo", prompt=["hello ", "xyz"], max_tokens=3)
    assert [choice.text for choice in answer.choices] == ["hel", "xyz"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert await collect(server, prompt="né😀", max_tokens=14) == "né😀" * 2
    assert [model.id for model in (await server.client.models.list()).data] == ["echo"]
    with pytest.raises(openai.BadRequestError) as refused:
        await server.client.completions.create(model="default", prompt="a", temperature=-1)
    assert refused.value.code == "invalid_value"
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await server.client.completions.create(model="other", prompt="a")


async def test_closing_the_connection_aborts(server: Server) -> None:
    stream = await server.client.completions.create(model="default", prompt="abc", max_tokens=900, stream=True)
    assert (await anext(stream)).choices[0].text == "a"
    await stream.close()
    unstreamed = asyncio.create_task(server.client.completions.create(model="default", prompt="abc", max_tokens=900))
    await asyncio.sleep(0.1)
    unstreamed.cancel()
    await asyncio.gather(unstreamed, return_exceptions=True)
    assert (await server.http.post("/flush_cache")).status_code == 200
    metrics = (await server.http.get("/metrics")).text
    assert 'sglang:num_aborted_requests_total{model_name="echo"} 2.0' in metrics
    assert 'sglang:num_running_reqs{model_name="echo"} 0.0' in metrics


async def test_kill_9_of_the_engine_is_answered_within_a_second_and_repaired(server: Server) -> None:
    streaming = await server.client.completions.create(model="default", prompt="abc", max_tokens=900, stream=True)
    await anext(streaming)
    whole = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 900}))
    await asyncio.sleep(0.1)
    first_pid = server.engine.pid
    killed_at = time.monotonic()
    os.kill(first_pid, signal.SIGKILL)
    with pytest.raises(openai.APIError) as cut:
        async for _ in streaming:
            pass
    assert cut.value.code == "engine_dead"
    reply = await whole
    assert time.monotonic() - killed_at < 1.0
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
    assert await server.health() == 503
    await server.wait_health(True)
    assert server.engine.pid != first_pid
    replies = await asyncio.gather(*(collect(server, prompt=f"{number} ", max_tokens=6) for number in range(100, 130)))
    assert replies == [f"{number} {number}"[:6] for number in range(100, 130)]


async def test_a_step_that_raises_keeps_its_reason_in_the_log(server: Server) -> None:
    reply = await server.http.post("/v1/completions", json={"prompt": "<crash>"})
    assert reply.status_code == 503
    assert reply.json()["error"] == {
        "message": "the engine failed; see its log",
        "type": "server_error",
        "param": None,
        "code": "engine_dead",
    }


async def test_the_server_gives_up_with_an_error_status_after_three_restarts(server: Server) -> None:
    for _ in range(4):
        await server.wait_health(True)
        server.engine.kill()
        with contextlib.suppress(httpx.HTTPError):  # after the last one the server may be gone already
            await server.wait_health(False)
    assert await server.wait_exit() == 1


@pytest.mark.parametrize("prompt", ["abc", "<slow>"])
async def test_kill_9_of_the_server_ends_the_engine(server: Server, prompt: str) -> None:
    asking = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 900}))
    await asyncio.sleep(0.2)
    engine = server.engine
    server.process.kill()
    await until(lambda: is_gone(engine), 2.0)
    await asyncio.gather(asking, return_exceptions=True)


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(server: Server) -> None:
    running = [asyncio.create_task(collect(server, prompt="abc", max_tokens=300)) for _ in range(5)]
    while (await server.http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] < 5:  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.02)
    engine = server.engine
    server.process.send_signal(signal.SIGTERM)
    await server.wait_health(False)
    with pytest.raises(openai.InternalServerError) as refused:
        await server.client.completions.create(model="default", prompt="new")
    assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
    assert await asyncio.gather(*running) == ["abc" * 100] * 5
    assert await server.wait_exit() == 0
    assert is_gone(engine)
    # what was there at the start is frozen, and full collections are seldom, in both processes
    words = [line for line in server.log().splitlines() if line.startswith("collector of the ")]
    assert sorted(words) == [f"collector of the {name}: frozen True, {FULL_COLLECTION_INTERVAL}" for name in ("engine", "server")]


@pytest.mark.parametrize("drain_timeout_s", [0.5], indirect=True)
async def test_sigterm_cuts_what_takes_too_long(server: Server) -> None:
    streaming = await server.client.completions.create(model="default", prompt="abc", max_tokens=300, stream=True)
    whole = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 900}))
    await anext(streaming)
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError) as cut:
        async for _ in streaming:
            pass
    assert cut.value.code == "shutting_down"
    assert (await whole).status_code == 503
    assert await server.wait_exit(5) == 0


async def test_ctrl_c_stops_at_once_and_leaves_no_process(server: Server) -> None:
    streaming = await server.client.completions.create(model="default", prompt="abc", max_tokens=900, stream=True)
    await anext(streaming)
    engine = server.engine
    # what a terminal does: every process of the group gets the signal
    for pid in (engine.pid, server.process.pid):
        os.kill(pid, signal.SIGINT)
    assert await server.wait_exit(5) == 0
    assert is_gone(engine)


async def test_ctrl_c_in_a_long_step_leaves_no_process(server: Server) -> None:
    asking = asyncio.create_task(server.http.post("/v1/completions", json={"prompt": "<slow>"}))
    await asyncio.sleep(0.2)
    engine = server.engine
    server.process.send_signal(signal.SIGINT)
    assert await server.wait_exit(6) == 0
    assert is_gone(engine)
    assert (await asking).status_code == 503


async def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineDeadError, match="no-such-model"):
        await AsyncEngine.start(EngineConfig(model_path="/no-such-model"))
    assert os.listdir(tmp_path) == []
    silent = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"]
    with pytest.raises(EngineDeadError, match="ended with status 3"):
        await AsyncEngine.start(EngineConfig(), make_link=lambda: ProcessLink(silent))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_while_the_engine_loads_leaves_nothing(model_dir: Path, tmp_path: Path, sent: signal.Signals) -> None:
    script = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "from radixserve.config import *; from radixserve.engine.link import ProcessLink; "
        "from radixserve.server.serve import run_server; loading = [sys.executable, '-c', 'import time; time.sleep(60)']; "
        f"sys.exit(run_server(EngineConfig({str(model_dir)!r}), ServerConfig(port=0), make_link=lambda: ProcessLink(loading)))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)  # noqa: ASYNC220 - starting takes no time
    try:
        await until(lambda: psutil.Process(process.pid).children(), 10.0)
        (engine,) = psutil.Process(process.pid).children()
        process.send_signal(sent)
        await until(lambda: process.poll() is not None)
        assert process.returncode == 0
        assert is_gone(engine)
        assert os.listdir(tmp_path) == []
    finally:
        process.kill()
        process.wait()


async def test_a_taken_port_is_told_before_anything_is_loaded(server: Server) -> None:
    config = ServerConfig(port=int(server.url.rpartition(":")[2]))
    with pytest.raises(ConfigError, match="cannot listen on 127"):
        run_server(EngineConfig("/no-such-model"), config)


def test_two_servers_that_start_at_once_do_not_share_a_port() -> None:
    """The winner here has not loaded its model yet: it only just took its port."""
    with _bind(ServerConfig(port=0)) as listener, pytest.raises(ConfigError, match="cannot listen on 127"):
        _bind(ServerConfig(port=listener.getsockname()[1]))


@pytest.mark.parametrize("drain_timeout_s", [0.5], indirect=True)
async def test_clients_that_neither_send_nor_read_do_not_hold_up_the_end(server: Server, drain_timeout_s: float) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address) as sends_no_body, socket.socket() as reads_nothing, socket.create_connection(address) as idle:
        sends_no_body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        reads_nothing.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reads_nothing.connect(address)
        body = json.dumps({"prompt": "a" * 50, "max_tokens": 900, "n": 64, "stream": True, "logprobs": 5}).encode()
        reads_nothing.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(1.0)
        server.process.send_signal(signal.SIGTERM)
        asked_at = time.monotonic()
        assert await server.wait_exit() == 0
        assert time.monotonic() - asked_at < drain_timeout_s + LAST_WORDS_TIMEOUT_S + LAST_BYTES_TIMEOUT_S + 1.5
        assert idle.recv(1) == b""
    log = server.log()
    assert "stopping: 1 requests are cut" in log, "the reader was to be inside still, and the sender never was"
    assert "Traceback" not in log
    assert "Cancel" not in log


@pytest.mark.parametrize("drain_timeout_s", [10.0], indirect=True)
async def test_a_body_that_never_comes_does_not_hold_up_the_drain(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as sends_no_body:
        sends_no_body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await asyncio.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert await server.wait_exit(4) == 0
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("delay_s", [0.02, 0.05, 0.1, 0.2])
def test_ctrl_c_right_after_the_start_is_no_traceback(delay_s: float) -> None:
    """The interpreter's own start is not ours: the clock runs from the first line of ours."""
    command = [sys.executable, "-X", "importtime", "-m", "radixserve", "serve", "--model-path", "/no-such-model", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "argparse" in line:
                break
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.stderr.read()
    # the first: the signal came while the interpreter ended, which prints no traceback either
    assert process.returncode in (-signal.SIGINT, 2, 130)
