"""Reads TraceLab's sessions of agents: rounds that send what came before, less what was cut, and something new.

CSV     session_id[, arrival_time],round_idx,prefix_len,input_len,output_len,tool_wait_after_ms     arrival_time in ms
        The loop is closed (send, wait for the answer, run the tool, send again), so when a round comes depends on the server. Here answers
        take no time: a round comes when the tools of those before it are done.
JSONL   {"session_id", "prefix_tokens", "newly_append_tokens", "output_tokens", "current_input_event_count": n, "timing_events": [...], ...}
        Recorded rounds, prefix_tokens of which the provider found in its cache. A round comes when the last of its n inputs did.

Tokens are invented, no two equal but where a round repeats a prefix.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

JSON_MARK = "prefix_tokens"  # what a line of the JSONL has, and no other kind of trace
CSV_LENGTHS = ("prefix_len", "input_len", "output_len")
JSON_LENGTHS = (JSON_MARK, "newly_append_tokens", "output_tokens")


class TraceLabError(ValueError):
    """A file or line that is not TraceLab's; the message names it."""


class Round(NamedTuple):
    """Lengths in tokens: the prompt is the first prefix_len of the session's last prompt and answer, then input_len new ones."""

    session_id: str
    at_ms: int
    prefix_len: int
    input_len: int
    output_len: int


def with_tokens(rounds: Iterable[Round]) -> Iterator[dict[str, Any]]:
    """As the rows of our own JSONL: timestamp in ms, token_ids, output_ids."""
    said: dict[str, list[int]] = {}  # by session: the last prompt and its answer
    num_tokens = 0

    def new(count: int) -> list[int]:
        nonlocal num_tokens
        num_tokens += count
        return list(range(num_tokens - count, num_tokens))

    for one in rounds:
        before = said.get(one.session_id, [])[: one.prefix_len]
        prompt = before + new(one.prefix_len - len(before) + one.input_len)
        answer = new(max(one.output_len, 1))
        said[one.session_id] = prompt + answer
        yield {"timestamp": one.at_ms, "token_ids": prompt, "output_ids": answer}


def read_csv(path: Path) -> Iterator[Round]:
    """Raises TraceLabError."""
    ready_ms: dict[str, int] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            lens = [_decimal(path, number, row, name) for name in CSV_LENGTHS]
            session_id, wait_ms = row["session_id"], _decimal(path, number, row, "tool_wait_after_ms")
            at_ms = ready_ms.get(session_id, _decimal(path, number, row, "arrival_time", "0"))
            ready_ms[session_id] = at_ms + wait_ms
            yield Round(session_id, at_ms, *lens)


def of_json(path: Path, rows: Iterable[dict[str, Any]]) -> list[Round]:
    """The rounds of a JSONL's rows, timed from the earliest on. Raises TraceLabError."""
    found = []
    for number, row in enumerate(rows, 1):
        num_inputs, *lens = (_count(path, number, row, name) for name in ("current_input_event_count", *JSON_LENGTHS))
        try:
            at = max(datetime.fromisoformat(event["timestamp"]) for event in row["timing_events"][:num_inputs])
            found.append((at, str(row["session_id"]), lens))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceLabError(f"{path}, line {number}: expected session_id and timed timing_events, got {error!r}") from error
    start = min(at for at, _, _ in found)
    return [Round(session_id, (at - start) // timedelta(milliseconds=1), *lens) for at, session_id, lens in found]


def _decimal(path: Path, number: int, row: dict[str, Any], name: str, default: str | None = None) -> int:
    text = row.get(name)
    text = default if text is None else text
    if text is None or not text.isascii() or not text.isdecimal():
        raise TraceLabError(f"{path}, line {number}: {name}: expected an integer of at least 0, got {text!r}")
    return int(text)


def _count(path: Path, number: int, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or value < 0:
        raise TraceLabError(f"{path}, line {number}: {name}: expected an integer of at least 0, got {value!r}")
    return value
