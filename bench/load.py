"""Runs a workload against an address as a closed loop. Knows the client and the words; prints nothing."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from bench.client import Completion, RequestFailedError, completion_body, fetch, stream_completion
from bench.report import RunResult, summarize
from bench.words import Words
from bench.workloads import Conversation, Workload


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to ask. `extra` is merged into each request's body, see completion_body."""

    url: str
    model: str = "default"
    path: str = "/v1/completions"
    send_text: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


async def run_workload(target: Target, words: Words, workload: Workload, *, label: str, seed: int) -> RunResult:
    """Run all of `workload`. The first failed request ends the run with its error (see stream_completion)."""
    waiting = list(reversed(workload.conversations))
    completions: list[Completion] = []
    sent_lens: list[int] = []

    async def worker() -> None:
        while waiting:
            # a list, for `total += await ...` would read the total before the wait and lose what others add meanwhile
            sent_lens.append(await _converse(target, words, waiting.pop(), workload.output_len, completions))

    started_at = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workload.concurrency):
                group.create_task(worker())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return summarize(label, workload, seed, sum(sent_lens), time.perf_counter() - started_at, completions)


async def _converse(target: Target, words: Words, conversation: Conversation, output_len: int, completions: list[Completion]) -> int:
    """All turns of one conversation; returns the number of prompt tokens sent.

    A later turn needs the answer before it, which comes back as text: a conversation of several turns is sent as text, always.
    """
    if len(conversation.turns) == 1:
        ids = conversation.turns[0]
        completions.append(await _ask(target, words.text(ids) if target.send_text else ids, output_len))
        return len(ids)
    history, num_sent = "", 0
    for turn in conversation.turns:
        history += words.text(turn)
        completion = await _ask(target, history, output_len)
        completions.append(completion)
        num_sent += completion.num_prompt_tokens or len(words.encode(history))
        history += completion.text
    return num_sent


async def _ask(target: Target, prompt: list[int] | str, max_tokens: int) -> Completion:
    return await stream_completion(target.url, completion_body(target.model, prompt, max_tokens, target.extra), target.path)


async def flush(url: str) -> None:
    """POST /flush_cache. Raises RequestFailedError if the server does not do it."""
    status, body = await fetch(url, "POST", "/flush_cache")
    if status != 200:
        raise RequestFailedError(f"/flush_cache: HTTP {status}: {body[:300].decode(errors='replace')}")
