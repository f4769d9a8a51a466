"""Reads TraceLab's CSV of agents' sessions: rounds that send what came before, less what was cut, and something new.

session_id[, arrival_time],round_idx,prefix_len,input_len,output_len,tool_wait_after_ms     arrival_time in ms

The loop is closed (send, wait for the answer, run the tool, send again), so when a round comes depends on the server. Here an answer takes
no time: a round comes when the tools of those before it are done. Tokens are invented, no two equal but where a round repeats a prefix.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = ("session_id", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")


class TraceLabError(ValueError):
    """A file or line that is not TraceLab's; the message names it."""


def read_rounds(path: Path) -> Iterator[dict[str, Any]]:
    """As the rows of our own JSONL: timestamp in ms, token_ids, output_ids. Raises TraceLabError."""
    said: dict[str, list[int]] = {}  # by session: the last prompt and its answer
    ready_ms: dict[str, int] = {}
    num_tokens = 0

    def new(count: int) -> list[int]:
        nonlocal num_tokens
        num_tokens += count
        return list(range(num_tokens - count, num_tokens))

    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            prefix_len, input_len, output_len, wait_ms, arrival_ms = (
                _count(path, number, row, name, default) for name, default in (*((name, None) for name in COLUMNS[2:]), ("arrival_time", 0))
            )
            session = row["session_id"]
            before = said.get(session, [])[:prefix_len]
            prompt = before + new(prefix_len - len(before) + input_len)
            answer = new(max(output_len, 1))
            at_ms = ready_ms.get(session, arrival_ms)
            said[session], ready_ms[session] = prompt + answer, at_ms + wait_ms
            yield {"timestamp": at_ms, "token_ids": prompt, "output_ids": answer}


def _count(path: Path, number: int, row: dict[str, Any], name: str, default: int | None) -> int:
    text = row.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdecimal():
        raise TraceLabError(f"{path}, line {number}: {name}: expected an integer of at least 0, got {text!r}")
    return int(text)
