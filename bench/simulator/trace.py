"""Traces: who asks when, for how much, and which blocks of prompts are equal. Reads Mooncake's JSONL, our own JSONL of token ids, and
TraceLab's CSV and JSONL of sessions (tracelab.py).

Mooncake   {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [one per 512 tokens, the last may be partial]}
           A block becomes its id, 512 times: prompts have their true lengths, and pages of 512 tokens are equal exactly where ids are.
our own    {"timestamp": ms, "token_ids": [...], "output_length": m} or "output_ids": [...] in place of the length, so that a next turn
           can re-use the answer. Token ids are >= 0.
"""

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.simulator import tracelab
from radixserve.core import IntArray

MOONCAKE_BLOCK = 512


class TraceError(ValueError):
    """A line of a trace that cannot be what it should be; the message names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """block_ids[i] names the sequence up to token (i + 1) * page size: equal ids, equal beginnings. The sequence is the prompt (whose last
    block may be partial), and the answer less its last token where output_ids says it; then only whole blocks are named."""

    arrival_s: float
    prompt_len: int
    output_len: int
    block_ids: IntArray
    prompt_ids: IntArray | None = None  # None: each block is its id, page-size times
    output_ids: IntArray | None = None  # None: tokens that nobody else has


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and the page size in which their blocks are counted."""

    name: str
    page_size: int
    requests: tuple[TraceRequest, ...]

    @property
    def span_s(self) -> float:
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def num_block_ids(self) -> int:
        """One more than the largest block id."""
        return 1 + max(max(request.block_ids, default=0) for request in self.requests)

    def prompt(self, index: int, block_ids: IntArray | None = None) -> IntArray:
        """The prompt of request `index`; other block ids of equal number may stand in for its own."""
        request = self.requests[index]
        if request.prompt_ids is not None:
            return request.prompt_ids[:]
        ids = np.frombuffer(request.block_ids if block_ids is None else block_ids, dtype=np.int32)
        tokens = array("i")
        tokens.frombytes(np.repeat(ids, self.page_size)[: request.prompt_len].tobytes())
        return tokens


def load_trace(path: Path, page_size: int | None = None, limit: int | None = None) -> Trace:
    """Read a trace of any kind; the first `limit` lines where given.

    page_size: of Mooncake's blocks (512, and nothing else); of a trace of token ids whatever is to be tried (default 1).
    Raises TraceError; TraceLabError for a file of TraceLab's.
    """
    if path.suffix == ".csv":
        rounds = list(islice(tracelab.with_tokens(tracelab.read_csv(path)), limit))
        if not rounds:
            raise TraceError(f"{path}: expected at least one round, got none")
        requests = _of_token_ids(path, rounds, page_size or 1)
        return Trace(path.stem, page_size or 1, tuple(sorted(requests, key=lambda request: request.arrival_s)))
    with path.open(encoding="utf-8") as file:
        lines = [line for number, line in enumerate(file) if limit is None or number < limit]
    rows = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise TraceError(f"{path}: expected at least one request, got none")
    if "hash_ids" in rows[0]:
        if page_size not in (None, MOONCAKE_BLOCK):
            raise TraceError(f"{path}: blocks of this trace are {MOONCAKE_BLOCK} tokens, a page of {page_size} cannot be told from them")
        requests = [_of_hash_ids(path, number, row) for number, row in enumerate(rows, 1)]
        page_size = MOONCAKE_BLOCK
    else:
        page_size = page_size or 1
        if tracelab.JSON_MARK in rows[0]:
            rows = list(tracelab.with_tokens(tracelab.of_json(path, rows)))
        requests = _of_token_ids(path, rows, page_size)
    return Trace(path.stem, page_size, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}") from error
    if not isinstance(row, dict) or not {"hash_ids", "token_ids", tracelab.JSON_MARK} & row.keys():
        raise TraceError(f"{path}, line {number}: expected an object with hash_ids, token_ids or {tracelab.JSON_MARK}, got {line[:40]!r}")
    return row


def _int(path: Path, number: int, row: dict[str, Any], name: str, low: int) -> int:
    value = row.get(name)
    if type(value) is not int or value < low:
        raise TraceError(f"{path}, line {number}: {name}: expected an integer of at least {low}, got {value!r}")
    return value


def _ids(path: Path, number: int, row: dict[str, Any], name: str) -> IntArray:
    values = row.get(name)
    if not isinstance(values, list) or not values or not all(type(one) is int and 0 <= one < 2**31 - 1 for one in values):
        raise TraceError(f"{path}, line {number}: {name}: expected a list of integers from 0 to 2^31 - 2, got {str(values)[:40]}")
    return array("i", values)


def _of_hash_ids(path: Path, number: int, row: dict[str, Any]) -> TraceRequest:
    block_ids, prompt_len = _ids(path, number, row, "hash_ids"), _int(path, number, row, "input_length", 1)
    if len(block_ids) != -(-prompt_len // MOONCAKE_BLOCK):
        raise TraceError(f"{path}, line {number}: expected one hash id per {MOONCAKE_BLOCK} tokens of {prompt_len}, got {len(block_ids)}")
    arrival_s = _int(path, number, row, "timestamp", 0) / 1000
    return TraceRequest(arrival_s, prompt_len, _int(path, number, row, "output_length", 1), block_ids)


def _of_token_ids(path: Path, rows: Iterable[dict[str, Any]], page_size: int) -> list[TraceRequest]:
    chains: dict[tuple[int, bytes], int] = {}  # (id of the block before, tokens) -> id
    requests = []
    for number, row in enumerate(rows, 1):
        prompt_ids = _ids(path, number, row, "token_ids")
        output_ids = _ids(path, number, row, "output_ids") if "output_ids" in row else None
        output_len = len(output_ids) if output_ids is not None else _int(path, number, row, "output_length", 1)
        block_ids, before = array("i"), -1
        sequence = prompt_ids + output_ids[:-1] if output_ids is not None else prompt_ids
        for start in range(0, len(sequence) - page_size + 1, page_size):
            before = chains.setdefault((before, sequence[start : start + page_size].tobytes()), len(chains))
            block_ids.append(before)
        arrival_s = _int(path, number, row, "timestamp", 0) / 1000
        requests.append(TraceRequest(arrival_s, len(prompt_ids), output_len, block_ids, prompt_ids, output_ids))
    return requests
