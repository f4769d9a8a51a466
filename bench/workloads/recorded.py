"""Loads from files: Mooncake's traces (who shares which blocks, and when), and conversations in ShareGPT's format."""

import json
import random
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.simulator.trace import MOONCAKE_BLOCK, load_trace
from bench.workloads.basic import conversation
from bench.workloads.draw import Draw
from bench.workloads.options import option
from bench.workloads.workload import Ids, WorkloadRequest

_SIDES = {"human": "person", "user": "person", "system": "system"} | dict.fromkeys(
    ("gpt", "chatgpt", "assistant", "model", "bing", "bard"), "model"
)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace in Mooncake's JSONL. Each block is random words of its own, so equal blocks are equal prompts; arrivals are the trace's."""

    path: str = option("", "the JSONL file")
    num_requests: int = option(100, "lines at most, from the first")
    block_len: int = option(MOONCAKE_BLOCK, "tokens of a block: below 512, prompts are shorter in proportion", at_most=MOONCAKE_BLOCK)
    time_scale: float = option(1.0, "2.0 lets requests come half as fast", at_least=0.0)
    output_scale: float = option(1.0, "answers are so much longer or shorter; at least one token", at_least=0.0)
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"The first {self.num_requests} requests at most of {Path(self.path).name}, {self.block_len} tokens for a block of "
            f"{MOONCAKE_BLOCK}, time x {self.time_scale:g}, answers x {self.output_scale:g}."
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
    """Conversations of people: [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]

    What a conversation of such files may be is in _pairs.
    """

    path: str = option("", "the file: a JSON list, or JSON lines")
    num_chats: int = option(32, "conversations at most, drawn from those that fit and are the same tokens as text and as ids")
    max_turns: int = option(4, "user turns of a conversation at most; 1 sends the first alone")
    max_len: int = option(2048, "tokens of a conversation at most, the answers included; later turns are left out, longer ones too")
    output_len: int = option(0, "tokens of every answer; 0: as the recorded one, and a question without one is not asked", at_least=0)
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        file = Path(self.path).name
        return f"Up to {self.num_chats} conversations of {file}, at most {self.max_turns} turns and {self.max_len} tokens each."

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        path = _existing(self.path, "sharegpt")
        chats = _read_chats(path)
        draw.rng.shuffle(chats)
        requests: list[WorkloadRequest] = []
        num_taken = 0
        for chat in chats:
            if num_taken == self.num_chats:
                break
            turns, output_lens = self._fitting(draw, chat)
            if turns:
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
            if ids is None or not _is_text(answer) or not (answer or self.output_len):
                break
            output_len = self.output_len or max(1, len(draw.words.encode(answer)))
            total += len(ids) + output_len
            if not ids or total > self.max_len:
                break
            turns.append(ids)
            output_lens.append(output_len)
        return turns, output_lens


def _is_text(text: str) -> bool:
    """Whether it is Unicode; JSON can hold half of a pair of surrogates, which no tokenizer takes and no wire carries."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def settled(draw: Draw, text: str) -> Ids | None:
    """Ids whose text encodes to them again, so that a prompt has the same length whether ids or text are sent; None if there are none."""
    if not _is_text(text):
        return None
    ids = draw.words.encode(text)
    for _ in range(4):
        again = draw.words.encode(draw.words.text(ids))
        if again == ids:
            return ids
        ids = again
    return None


def _existing(path: str, name: str) -> Path:
    if not Path(path).is_file():
        raise ValueError(f"workload {name}: path: expected a file, got {path!r}")
    return Path(path)


def _read_chats(path: Path) -> list[list[tuple[str, str]]]:
    """Pairs of question and answer of each conversation that has any. Raises ValueError for another format."""
    entries = _read_entries(path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"workload sharegpt: {path}: expected a list of objects, got {type(entries).__name__}")
    if entries and not any({"conversations", "conversation"} & entry.keys() for entry in entries):
        raise ValueError(f"workload sharegpt: {path}: expected objects with conversations, got one of {', '.join(entries[0]) or 'nothing'}")
    chats = enumerate(entry.get("conversations", entry.get("conversation", [])) for entry in entries)
    return [pairs for index, turns in chats if (pairs := _pairs(f"{path}, entry {index}", turns))]


def _read_entries(path: Path) -> Any:
    """A JSON document, or one on each line."""
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            entries = [json.loads(line) for line in lines]
        except ValueError:
            raise ValueError(f"workload sharegpt: {path}: expected JSON, or JSON lines: {error}") from None
        return entries


def _pairs(where: str, turns: Any) -> list[tuple[str, str]]:
    """Questions and answers in turn, from the first that a person asked.

    Files of this format are cut and cleaned by many hands. A system's words at the start come in front of the first question, as they would
    in a prompt; an answer at the start, whose question is in another entry, is left out. The conversation ends where two turns of one side
    follow each other, at a turn of anybody else (a tool's call or result, a later system's), and at a question without text. An answer is
    "" where there is none, as in files that hold questions alone.
    """
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f'workload sharegpt: {where}: expected conversations of {{"from": ..., "value": text}}, got {str(turns)[:60]}')
    sides = [_side(where, turn) for turn in turns]
    system = ""
    if sides and sides[0][0] == "system":
        system = f"{sides[0][1]}\n" if sides[0][1] else ""
        del sides[0]
    if sides and sides[0][0] == "model":
        del sides[0]
    pairs: list[tuple[str, str]] = []
    for (asks, question), (answers, answer) in zip_longest(sides[::2], sides[1::2], fillvalue=("model", "")):
        if (asks, answers) != ("person", "model") or not question:
            break
        pairs.append((question if pairs else f"{system}{question}", answer))
    return pairs


def _side(where: str, turn: dict[str, Any]) -> tuple[str, str]:
    """Who speaks (person, model, system, or another's own name), and the text: "" for null and for blanks alone."""
    names = [name for name in ("from", "role") if name in turn]
    texts = [name for name in ("value", "content") if name in turn]
    text = turn[texts[0]] if texts else ...
    if not names or not isinstance(turn[names[0]], str) or not (text is None or isinstance(text, str)):
        raise ValueError(f'workload sharegpt: {where}: expected conversations of {{"from": ..., "value": text}}, got {str(turn)[:60]}')
    return _SIDES.get(turn[names[0]].lower(), turn[names[0]]), text if text and text.strip() else ""
