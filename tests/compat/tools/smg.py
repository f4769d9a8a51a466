"""smg in front of two servers: prefixes stay with their server, and when one is killed no client sees an error before its stream began."""

import asyncio
import json
import socket
import subprocess
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from bench.servers import Server
from tests.compat.tool import SERVER_FLAGS, CompatError, Context, Tool, clean_environ

NUM_GROUPS = 6
MAX_GROUPS = 24
NUM_PER_GROUP = 4
NUM_CLIENTS = 6
WORKER_HEADER = "x-smg-routed-worker-id"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def gateway(context: Context, workers: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    port = free_port()
    argv = [context.program("smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    argv += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "2", "--disable-tokenizer-autoload"]
    log = context.work_dir / "smg.log"
    with log.open("w") as file:
        process = subprocess.Popen(  # noqa: ASYNC220
            [*argv, "--worker-urls", *workers], stdout=file, stderr=subprocess.STDOUT, env=clean_environ(), cwd=context.work_dir
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            await wait_for_workers(http, len(workers), log.read_text)
            yield http
    finally:
        process.terminate()
        process.wait(20)


async def wait_for_workers(http: httpx.AsyncClient, count: int, log: Callable[[], str]) -> None:
    seen = ""
    for _ in range(120):
        try:
            reply = await http.get("/workers")
            seen = reply.text
            healthy = [
                worker for worker in reply.json()["workers"] if worker.get("is_healthy", worker.get("status") in {"healthy", "ready"})
            ]
            if len(healthy) == count:
                return
        except (httpx.TransportError, ValueError, KeyError):
            pass
        await asyncio.sleep(0.5)
    raise CompatError(f"smg did not take {count} workers: {seen}\n{log()}"[-3000:])


@dataclass(slots=True)
class Outcome:
    """Of one streamed chat."""

    worker: str
    num_chunks: int
    error: str | None  # None when the stream was whole

    @property
    def failed_before_it_began(self) -> bool:
        return self.error is not None and self.num_chunks == 0


async def chat(http: httpx.AsyncClient, context: Context, group: int, question: int, max_tokens: int = 4) -> Outcome:
    system = f"You are helper number {group} of a large office. " + f"Rule {group}: be polite and careful. " * 20
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {question}?"}]
    body = {"model": context.model_name, "messages": messages, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    outcome = Outcome("", 0, "the stream did not end with [DONE]")
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body | {"ignore_eos": True}) as reply:
            outcome.worker = reply.headers.get(WORKER_HEADER, "")
            if reply.status_code != 200:
                outcome.error = f"{reply.status_code} {(await reply.aread()).decode()[:200]}"
                return outcome
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: "):
                    continue
                if data == "[DONE]":
                    outcome.error = None if outcome.error == "the stream did not end with [DONE]" else outcome.error
                elif "error" in json.loads(data):
                    outcome.error = data[:200]
                else:
                    outcome.num_chunks += 1
    except httpx.TransportError as error:
        outcome.error = repr(error)
    return outcome


async def check_stickiness(http: httpx.AsyncClient, context: Context) -> str:
    """How many prefixes each server got. The gateway picks a server for a new prefix by chance: more prefixes, until both have one."""
    workers: dict[int, set[str]] = defaultdict(set)
    for group in range(MAX_GROUPS):
        if group >= NUM_GROUPS and len(set().union(*workers.values())) == 2:
            break
        workers[group].add(await routed_to(http, context, group, 0))
    for question in range(1, NUM_PER_GROUP):
        for group in list(workers):
            workers[group].add(await routed_to(http, context, group, question))
    if any(len(seen) != 1 for seen in workers.values()):
        raise CompatError(f"prefixes moved between workers: {dict(workers)}")
    counts = Counter(worker for seen in workers.values() for worker in seen)
    if len(counts) != 2:
        raise CompatError(f"all prefixes went to one worker: {dict(workers)}")
    return f"{len(workers)} prefixes x {NUM_PER_GROUP}: each stayed with its server ({'+'.join(map(str, sorted(counts.values())))})"


async def routed_to(http: httpx.AsyncClient, context: Context, group: int, question: int) -> str:
    outcome = await chat(http, context, group, question)
    if outcome.error is not None or not outcome.worker:
        raise CompatError(f"group {group}, question {question}: {outcome}")
    return outcome.worker


async def check_loss(http: httpx.AsyncClient, context: Context, victim: Server) -> tuple[int, int]:
    """(streams, those cut after they began) while one server is killed amid the traffic, and after it."""
    outcomes: list[Outcome] = []
    is_over = False

    async def ask(client: int) -> None:
        question = 0
        while not is_over:
            question += 1
            outcomes.append(await chat(http, context, client % NUM_GROUPS, 100 * client + question, max_tokens=24))

    clients = [asyncio.create_task(ask(client)) for client in range(NUM_CLIENTS)]
    await asyncio.sleep(5)
    victim.kill()
    await asyncio.sleep(12)
    is_over = True
    await asyncio.gather(*clients)
    failed = [outcome for outcome in outcomes if outcome.failed_before_it_began]
    if failed:
        raise CompatError(f"{len(failed)} of {len(outcomes)} clients saw an error before their stream began: {failed[:3]}")
    last = [await chat(http, context, group, 999) for group in range(NUM_GROUPS)]
    if any(outcome.error for outcome in last) or len({outcome.worker for outcome in last}) != 1:
        raise CompatError(f"after the loss: {last}")
    return len(outcomes), sum(outcome.error is not None for outcome in outcomes)


async def run(context: Context) -> str:
    # the recorder stands before the server that stays: before the other one it would turn a refused connection into an answer
    async with Server("smg-second", SERVER_FLAGS) as victim, gateway(context, [context.url, victim.url]) as http:
        spread = await check_stickiness(http, context)
        num_streams, num_cut = await check_loss(http, context, victim)
    return (
        f"{spread}; one of two servers killed under {NUM_CLIENTS} clients: {num_streams} streams, "
        f"none failed before it began, {num_cut} cut after"
    )


TOOL = Tool(
    name="smg",
    packages=("smg",),
    shown=("smg",),
    command="smg launch --policy cache_aware --worker-urls URL1 URL2",
    run=run,
)
