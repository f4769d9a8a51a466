"""Loads from files: Mooncake's traces (who shares which blocks, and when), and conversations in ShareGPT's format."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.simulator.trace import MOONCAKE_BLOCK, load_trace
from bench.workloads.basic import conversation
from bench.workloads.draw import Draw
from bench.workloads.options import option
from bench.workloads.workload import Ids, WorkloadRequest


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace in Mooncake's JSONL. Each block is random words of its own, so equal blocks are equal prompts; arrivals are the trace's."""

    path: str = option("", "the JSONL file")
    num_requests: int = option(100, "how many lines, from the first")
    block_len: int = option(MOONCAKE_BLOCK, "tokens of a block: below 512, prompts are shorter in proportion", at_most=MOONCAKE_BLOCK)
    time_scale: float = option(1.0, "2.0 lets requests come half as fast", at_least=0.0)
    output_scale: float = option(1.0, "answers are so much longer or shorter; at least one token", at_least=0.0)
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"The first {self.num_requests} requests of {Path(self.path).name}, {self.block_len} tokens for a block of {MOONCAKE_BLOCK}, "
            f"time x {self.time_scale:g}, answers x {self.output_scale:g}."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        trace = load_trace(_existing(self.path, "trace"), limit=self.num_requests)
        if any(request.prompt_ids is not None for request in trace.requests):
            raise ValueError(f"workload trace: {self.path}: expected lines with hash_ids, got token ids")
        start_s = trace.requests[0].arrival_s
        requests = []
        for index, request in enumerate(trace.requests):
            prompt_len = max(1, -(-request.prompt_len * self.block_len // MOONCAKE_BLOCK))
            ids = [token for block in request.block_ids for token in self._block(draw, block)][:prompt_len]
            output_len = max(1, round(request.output_len * self.output_scale))
            arrival_s = (request.arrival_s - start_s) * self.time_scale
            requests.append(WorkloadRequest(f"line{index}", (ids,), output_len, "trace", arrival_s))
        return requests

    def _block(self, draw: Draw, block: int) -> Ids:
        return random.Random(f"{draw.key}/{block}").choices(draw.words.ids, k=self.block_len)


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """Conversations of people: [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]"""

    path: str = option("", "the JSON file")
    num_chats: int = option(32, "conversations, drawn from those that fit")
    max_turns: int = option(4, "user turns of a conversation at most; 1 sends the first alone")
    max_len: int = option(2048, "tokens of a conversation at most, the answers included; later turns are left out, longer ones too")
    output_len: int = option(0, "tokens of every answer; 0: as long as the recorded one", at_least=0)
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return f"{self.num_chats} conversations of {Path(self.path).name}, at most {self.max_turns} turns and {self.max_len} tokens each."

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        path = _existing(self.path, "sharegpt")
        chats = _read_chats(path)
        draw.rng.shuffle(chats)
        requests: list[WorkloadRequest] = []
        num_taken = 0
        for chat in chats:
            turns, output_lens = self._fitting(draw, chat)
            if turns and num_taken < self.num_chats:
                requests += conversation(f"chat{num_taken}", turns, output_lens, "chats")
                num_taken += 1
        if not requests:
            raise ValueError(f"workload sharegpt: {path}: expected a conversation of at most {self.max_len} tokens, got none")
        return requests

    def _fitting(self, draw: Draw, chat: list[tuple[str, str]]) -> tuple[list[Ids], list[int]]:
        """As many whole turns from the start as the limits allow."""
        turns: list[Ids] = []
        output_lens: list[int] = []
        total = 0
        for question, answer in chat[: self.max_turns]:
            ids = settled(draw, f"\n{question}\n" if turns else f"{question}\n")
            output_len = self.output_len or max(1, len(draw.words.encode(answer)))
            total += len(ids) + output_len
            if not ids or total > self.max_len:
                break
            turns.append(ids)
            output_lens.append(output_len)
        return turns, output_lens


def settled(draw: Draw, text: str) -> Ids:
    """Ids whose text encodes to them again, so that a prompt has the same length whether ids or text are sent."""
    ids = draw.words.encode(text)
    for _ in range(4):
        again = draw.words.encode(draw.words.text(ids))
        if again == ids:
            return ids
        ids = again
    raise ValueError(f"workload sharegpt: expected text that encodes to the same tokens after it was decoded, got {text[:60]!r}")


def _existing(path: str, name: str) -> Path:
    if not Path(path).is_file():
        raise ValueError(f"workload {name}: path: expected a file, got {path!r}")
    return Path(path)


def _read_chats(path: Path) -> list[list[tuple[str, str]]]:
    """Pairs of question and answer of each conversation that begins with a person. Raises ValueError for another format."""
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"workload sharegpt: {path}: expected JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"workload sharegpt: {path}: expected a list of objects, got {type(entries).__name__}")
    return [pairs for entry in entries if (pairs := _pairs(path, entry.get("conversations", entry.get("conversation", []))))]


def _pairs(path: Path, turns: Any) -> list[tuple[str, str]]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in turns):
        raise ValueError(f'workload sharegpt: {path}: expected conversations of {{"from": ..., "value": text}}, got {str(turns)[:60]}')
    pairs = []
    for question, answer in zip(turns[::2], turns[1::2]):
        if question.get("from") not in ("human", "user") or answer.get("from") not in ("gpt", "chatgpt", "assistant", "bing", "bard"):
            break
        pairs.append((question["value"], answer["value"]))
    return pairs
