"""What a load is: requests in an order, some of which go on from the answers of others, and how much of them a tree can re-use at best.

Pure data: no tokenizer at work, no clock, no net.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.words import Vocabulary
from bench.workloads.ideal import ideal_cached_lens

Ids = list[int]


@dataclass(frozen=True, slots=True)
class AnswerOf:
    """In a prompt: the whole answer of another request stands here."""

    request_id: str


Part = Ids | AnswerOf


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request. Its prompt is `parts`, joined; `after` names requests that must be answered first though their answers are no part.

    arrival_s: seconds after the start, where the load comes from a record of real arrivals. turn counts from 0 within a conversation or
    a program. routing_key goes out as a header for routers.
    """

    id: str
    parts: tuple[Part, ...]
    output_len: int
    group: str
    arrival_s: float | None = None
    turn: int = 0
    after: tuple[str, ...] = ()
    routing_key: str | None = None

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Requests that must be answered before this one can be sent, each once."""
        return tuple(dict.fromkeys([*self.after, *(part.request_id for part in self.parts if isinstance(part, AnswerOf))]))

    def prompt(self, answers: Mapping[str, Sequence[int]]) -> Ids:
        """The prompt's ids, given the answers of all requests that it depends on."""
        return [token for part in self.parts for token in (answers[part.request_id] if isinstance(part, AnswerOf) else part)]


@dataclass(frozen=True, slots=True)
class Workload:
    """One load, complete; made by Workload.of. Every request comes after those that it depends on.

    prompt_lens and ideal_cached_lens are in tokens, one per request. Ideal: page size 1, a pool without end, one request after the other in
    this order, every answer output_len tokens long and like no other (the last one's K and V are never computed, so that a next turn
    re-uses all but that one). concurrency is the one that the load was made for, in a closed loop.
    """

    name: str
    description: str
    requests: tuple[WorkloadRequest, ...]
    prompt_lens: tuple[int, ...]
    ideal_cached_lens: tuple[int, ...]
    concurrency: int
    words: Vocabulary = field(repr=False, compare=False)

    @classmethod
    def of(cls, name: str, description: str, requests: Iterable[WorkloadRequest], words: Vocabulary, concurrency: int = 8) -> "Workload":
        """Raises ValueError unless there are requests, each with its own id, a prompt, and after all that it depends on."""
        ordered = tuple(requests)
        if not ordered:
            raise ValueError(f"workload {name}: expected at least one request, got none")
        prompts = list(stand_in_prompts(ordered))
        ideal = ideal_cached_lens(prompts, [len(_stand_in_answer(i, request)) - 1 for i, request in enumerate(ordered)])
        return cls(name, description, ordered, tuple(map(len, prompts)), tuple(ideal), concurrency, words)

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests, answers in the history of later turns included."""
        return sum(self.prompt_lens)

    @property
    def ideal_hit_tokens(self) -> int:
        return sum(self.ideal_cached_lens)

    @property
    def ideal_hit_rate(self) -> float:
        """Share of the prompt tokens that are re-used at best, 0 to 1."""
        return self.ideal_hit_tokens / self.prompt_tokens

    @property
    def ideal_by_group(self) -> dict[str, float]:
        """The ideal hit rate of each group's requests, in order of first appearance."""
        sums: dict[str, tuple[int, int]] = {}
        for request, prompt_len, cached_len in zip(self.requests, self.prompt_lens, self.ideal_cached_lens):
            total, cached = sums.get(request.group, (0, 0))
            sums[request.group] = (total + prompt_len, cached + cached_len)
        return {group: cached / total for group, (total, cached) in sums.items()}

    @property
    def is_staged(self) -> bool:
        """Whether some requests wait for others."""
        return any(request.depends_on for request in self.requests)


def _stand_in_answer(index: int, request: WorkloadRequest) -> Ids:
    # below 0, so that it is no token, and no other request's answer
    return [-1 - index] * request.output_len


def stand_in_prompts(requests: Sequence[WorkloadRequest]) -> Iterator[Ids]:
    """The prompts in order, each answer in them replaced by as many negative numbers that stand for it alone. Raises ValueError."""
    answers: dict[str, Ids] = {}
    for index, request in enumerate(requests):
        missing = [one for one in request.depends_on if one not in answers]
        if missing:
            raise ValueError(f"request {request.id}: expected to come after {missing[0]}, which it depends on")
        if request.id in answers:
            raise ValueError(f"request {request.id}: expected ids that differ, got it twice")
        if request.output_len < 1:
            raise ValueError(f"request {request.id}: output_len: expected at least 1, got {request.output_len}")
        prompt = request.prompt(answers)
        if not prompt:
            raise ValueError(f"request {request.id}: expected a prompt of at least one token, got none")
        answers[request.id] = _stand_in_answer(index, request)
        yield prompt
