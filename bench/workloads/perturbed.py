"""Prompts that mean the same and do not begin the same: what breaks re-use in practice, each with the same change moved to the end.

Real text through the real tokenizer. A prompt is change + document + question, or document + change + question; a group's document is
its own, and no two prompts of a group have the same change.
"""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from bench.workloads.draw import Draw
from bench.workloads.options import option
from bench.workloads.workload import Ids, WorkloadRequest

MAX_PROMPTS = 64  # 2^6 ways to write the six letters of _ACCENTED


def _timestamp(draw: Draw, index: int) -> str:
    return f"Current time: {index % 60:02d}:{draw.rng.randrange(60):02d}:{draw.rng.randrange(60):02d}.{draw.rng.randrange(10**6):06d}"


def _request_id(draw: Draw, index: int) -> str:
    return f"Request {draw.rng.getrandbits(64):016x}{index:04x}"


def _rotated(draw: Draw, items: list[str], index: int) -> list[str]:
    """Another item first each time, the rest in any order; the whole unlike any other as long as indices differ by less than the items."""
    first = items[index % len(items)]
    rest = [item for item in items if item != first]
    draw.rng.shuffle(rest)
    return [first, *rest]


_TOOLS = ("search", "read", "write", "list", "move", "delete", "rename", "copy", "open", "close")
_KEYS = ("language", "city", "tone", "audience", "format", "length", "currency", "units", "timezone", "level")


def _tool_order(draw: Draw, index: int) -> str:
    tools = [{"name": name, "parameters": {"path": "string"}} for name in _rotated(draw, list(_TOOLS), index)]
    return f"Tools: {json.dumps(tools)}"


def _json_key_order(draw: Draw, index: int) -> str:
    return f"Settings: {json.dumps({key: f'any {key}' for key in _rotated(draw, list(_KEYS), index)})}"


def _blank(draw: Draw, index: int) -> str:
    return f"You are{' ' * (index + 1)}a careful assistant."


def _newline(draw: Draw, index: int) -> str:
    return "\n" * index + "You are a careful assistant."


_ACCENTED = "é à ü ñ ô ç"


def _unicode_form(draw: Draw, index: int) -> str:
    """Each accented letter whole or as a letter and a mark: the same text on the screen."""
    letters = _ACCENTED.split(" ")
    forms = [unicodedata.normalize("NFD" if index >> bit & 1 else "NFC", letter) for bit, letter in enumerate(letters)]
    return f"{' '.join(forms)}: keep these letters as they are."


CHANGES: dict[str, Callable[[Draw, int], str]] = {
    "timestamp": _timestamp,
    "request-id": _request_id,
    "tool-order": _tool_order,
    "json-key-order": _json_key_order,
    "blank": _blank,
    "newline": _newline,
    "unicode": _unicode_form,
}
PLACES = ("front", "end")


@dataclass(frozen=True, slots=True)
class Perturbed:
    """Groups are named change/place, e.g. timestamp/front."""

    changes: str = option(",".join(CHANGES), "which changes, comma-separated")
    places: str = option(",".join(PLACES), "where the change stands, comma-separated")
    prompts_per_group: int = option(8, "prompts with the same document", at_most=MAX_PROMPTS)
    document_len: int = option(512, "tokens of a group's document")
    question_len: int = option(32, "tokens of a prompt's own question")
    output_len: int = option(16, "tokens of an answer")
    ordered: bool = option(False, "keep the groups together, in place of a random order")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"Same meaning, other tokens ({self.changes}; {self.places}): groups of {self.prompts_per_group} prompts with a document of "
            f"{self.document_len} tokens and {self.question_len} of their own, {self.output_len} out."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        changes, places = _names("changes", self.changes, tuple(CHANGES)), _names("places", self.places, PLACES)
        documents = draw.strangers(len(changes) * len(places), self.document_len)
        requests = []
        for change in changes:
            texts = _padded(draw, change, self.prompts_per_group)
            for place in places:
                requests += self._group(draw, f"{change}/{place}", texts, documents.pop(0))
        if not self.ordered:
            draw.rng.shuffle(requests)
        return requests

    def _group(self, draw: Draw, group: str, changes: list[Ids], document: Ids) -> list[WorkloadRequest]:
        requests = []
        for index, (change, question) in enumerate(zip(changes, draw.strangers(len(changes), self.question_len))):
            ids = change + document + question if group.endswith("/front") else document + change + question
            if draw.words.encode(draw.words.text(ids)) != ids:
                raise ValueError(f"workload perturbed: {group}: expected a tokenizer that cuts text at blanks between words, got another")
            requests.append(WorkloadRequest(f"{group}/{index}", (ids,), self.output_len, group))
        return requests


def _names(option_name: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"workload perturbed: {option_name}: expected {', '.join(known)}, got {name!r}")
    return list(dict.fromkeys(names))


def _padded(draw: Draw, change: str, count: int) -> list[Ids]:
    """`count` versions of a change, each on a line of its own, all as long as the longest and at least one word, so that only the place
    of the change differs between groups, never a length."""
    versions = [draw.words.encode(f"\n{CHANGES[change](draw, index)}") for index in range(count)]
    longest = 1 + max(map(len, versions))
    filler = draw.ids(longest)
    if len(set(map(tuple, versions))) < count:
        raise ValueError(f"workload perturbed: {change}: expected {count} versions that differ to this tokenizer, got fewer")
    return [version + filler[: longest - len(version)] for version in versions]
