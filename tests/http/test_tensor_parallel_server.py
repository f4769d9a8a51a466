"""`radixserve serve --tp-size 3` with the default model: answers, re-use, what it says of itself, and a rank that is killed."""

import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from radixserve.models.location import resolve_model
from tests.support.waiting import ready_address, until

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--tp-size", "3", "--max-total-tokens", "1024", "--dtype", "float32", "--device", "cpu", "--check-account-every-step")


@dataclass(slots=True)
class Server:
    url: str
    process: psutil.Process
    log_file: Path

    def ranks(self) -> list[psutil.Process]:
        (engine,) = self.process.children()
        return engine.children()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    resolve_model(None)  # fetched here, where a failure is readable
    command = [sys.executable, "-m", "radixserve", "serve", "--port", "0", *OPTIONS]
    log_file = tmp_path / "server.log"
    with open(log_file, "w") as log:  # noqa: ASYNC230 - nothing else runs here
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)  # noqa: ASYNC220
    assert process.stdout is not None
    below: list[psutil.Process] = []
    try:
        yield Server(ready_address(process, log_file), psutil.Process(process.pid), log_file)
        below = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.terminate()
        assert process.wait(20) == 0
        process.stdout.close()
    await until(lambda: not any(one.is_running() for one in below))


async def test_three_ranks_behind_a_server(server: Server) -> None:
    prompt = "You are a careful assistant. " * 8 + "The capital of France is"
    body = {"model": "default", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        cold, warm = [(await http.post("/v1/completions", json=body)).json() for _ in range(2)]
        assert "Paris" in cold["choices"][0]["text"]
        assert warm["choices"] == cold["choices"]
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == warm["usage"]["prompt_tokens"] - 1
        info = (await http.get("/server_info")).json()
        assert (info["tp_size"], info["attention_backend"], info["linear_backend"]) == (3, "cpu", "torch")
        first, second = server.ranks()
        for rank in (first, second):
            addresses = {one.laddr.ip for one in rank.net_connections("inet") if one.status == psutil.CONN_LISTEN}
            assert addresses <= {"127.0.0.1"}
        second.kill()
        # idle: nobody asks for anything, and the engine ends all the same
        await until(lambda: "the process of tensor-parallel rank" in server.log_file.read_text())
        assert "ended by signal SIGKILL" in server.log_file.read_text()
        await until(lambda: not first.is_running())
        assert (await http.post("/v1/completions", json=body)).status_code == 503
