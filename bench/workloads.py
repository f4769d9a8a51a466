"""The loads: seeded prompts with exact token counts, each knowing how many tokens an ideal tree would re-use.

Pure: no tokenizer, no clock, no net. A load is a list of conversations; most have one turn. The next prompt of a conversation is everything
so far (prompts and answers) plus its next turn.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user says, turn by turn, in token ids. The first request sends turns[0]."""

    turns: tuple[Ids, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """One load, complete. It is run as a closed loop: `concurrency` workers, each taking the next conversation when its own is done.

    ideal_hit_tokens: prompt tokens that a tree re-uses at page size 1 with a pool without end when the requests come one after another and
    each answer has output_len tokens (the last one's K and V are never computed, so a next turn re-uses all but that one).
    """

    name: str
    conversations: tuple[Conversation, ...]
    output_len: int
    concurrency: int
    ideal_hit_tokens: int

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests, answers in the history of later turns included."""
        return sum(length for conversation in self.conversations for length in _prompt_lens(conversation.turns, self.output_len))

    @property
    def is_multi_turn(self) -> bool:
        return any(len(conversation.turns) > 1 for conversation in self.conversations)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of prompts with a common beginning; names as in SGLang's generated-shared-prefix. Lengths in tokens."""

    num_groups: int = 8
    prompts_per_group: int = 8
    system_prompt_len: int = 1024
    question_len: int = 64
    output_len: int = 32
    concurrency: int = 8

    def __post_init__(self) -> None:
        for name in ("num_groups", "prompts_per_group", "question_len", "output_len", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.system_prompt_len < 0:
            raise ValueError(f"system_prompt_len: expected at least 0, got {self.system_prompt_len}")


class _Words:
    """Draws from the vocabulary. Sequences that ought to be strangers begin with different tokens, so that none is re-used by chance."""

    def __init__(self, word_ids: Sequence[int], rng: random.Random) -> None:
        self._word_ids = word_ids
        self._rng = rng

    def draw(self, length: int, taken: set[int] | None = None) -> Ids:
        """`length` random ids; the first is not in `taken` and is added to it."""
        ids = [self._rng.choice(self._word_ids) for _ in range(length)]
        if taken is not None and ids:
            if len(taken) >= len(self._word_ids):
                raise ValueError(f"expected more distinct words than sequences that must differ, got {len(self._word_ids)} words")
            while ids[0] in taken:
                # the next word, not another draw: all other ids stay as they would have been
                ids[0] = self._word_ids[(self._word_ids.index(ids[0]) + 1) % len(self._word_ids)]
            taken.add(ids[0])
        return ids

    def strangers(self, count: int, length: int) -> list[Ids]:
        taken: set[int] = set()
        return [self.draw(length, taken) for _ in range(count)]


def _single_turns(prompts: Sequence[Ids]) -> tuple[Conversation, ...]:
    return tuple(Conversation((prompt,)) for prompt in prompts)


def _prompt_lens(turns: Sequence[Ids], output_len: int) -> Iterator[int]:
    history_len = 0
    for turn in turns:
        yield history_len + len(turn)
        history_len += len(turn) + output_len


def shared_prefix(word_ids: Sequence[int], seed: int, shape: SharedPrefix, name: str = "shared-prefix") -> Workload:
    """Groups x prompts in random order. Ideal: all but the first prompt of a group re-use the shared part."""
    rng = random.Random(f"{name}/{seed}")
    words = _Words(word_ids, rng)
    prompts = [
        beginning + question
        for beginning in words.strangers(shape.num_groups, shape.system_prompt_len)
        for question in words.strangers(shape.prompts_per_group, shape.question_len)
    ]
    rng.shuffle(prompts)
    ideal = shape.num_groups * (shape.prompts_per_group - 1) * shape.system_prompt_len
    return Workload(name, _single_turns(prompts), shape.output_len, shape.concurrency, ideal)


def _load_a(word_ids: Sequence[int], seed: int) -> Workload:
    """8 groups x 8 prompts, 1024 shared + 64 own, 32 out, 8 at a time."""
    return shared_prefix(word_ids, seed, SharedPrefix(), name="A")


def _load_b(word_ids: Sequence[int], seed: int) -> Workload:
    """Nothing shared: 32 prompts of 512, 64 out, 8 at a time."""
    words = _Words(word_ids, random.Random(f"B/{seed}"))
    return Workload("B", _single_turns(words.strangers(32, 512)), output_len=64, concurrency=8, ideal_hit_tokens=0)


def _load_c(word_ids: Sequence[int], seed: int) -> Workload:
    """Mostly decode: 16 prompts of 64, 256 out, 16 at a time."""
    words = _Words(word_ids, random.Random(f"C/{seed}"))
    return Workload("C", _single_turns(words.strangers(16, 64)), output_len=256, concurrency=16, ideal_hit_tokens=0)


def _load_d(word_ids: Sequence[int], seed: int) -> Workload:
    """8 conversations of 5 turns: 512 first, 64 more each turn, 64 out, 8 at a time."""
    num_conversations, num_turns, first_len, turn_len, output_len = 8, 5, 512, 64, 64
    words = _Words(word_ids, random.Random(f"D/{seed}"))
    taken: set[int] = set()
    conversations = tuple(
        Conversation((words.draw(first_len, taken), *(words.draw(turn_len) for _ in range(num_turns - 1))))
        for _ in range(num_conversations)
    )
    # turn t > 0 re-uses the previous prompt and all of its answer but the last token
    per_conversation = sum(first_len + (t - 1) * (turn_len + output_len) + output_len - 1 for t in range(1, num_turns))
    return Workload("D", conversations, output_len, concurrency=8, ideal_hit_tokens=num_conversations * per_conversation)


def _load_e(word_ids: Sequence[int], seed: int) -> Workload:
    """One stream: 512 in, 128 out."""
    words = _Words(word_ids, random.Random(f"E/{seed}"))
    return Workload("E", _single_turns([words.draw(512)]), output_len=128, concurrency=1, ideal_hit_tokens=0)


def _load_f(word_ids: Sequence[int], seed: int) -> Workload:
    """One document of 7000, 16 questions of 32, 32 out, 8 at a time."""
    words = _Words(word_ids, random.Random(f"F/{seed}"))
    document = words.draw(7000)
    prompts = [document + question for question in words.strangers(16, 32)]
    return Workload("F", _single_turns(prompts), output_len=32, concurrency=8, ideal_hit_tokens=15 * 7000)


_LOADS: dict[str, Callable[[Sequence[int], int], Workload]] = {
    "A": _load_a,
    "B": _load_b,
    "C": _load_c,
    "D": _load_d,
    "E": _load_e,
    "F": _load_f,
}
LOAD_NAMES = tuple(_LOADS)


def make_load(name: str, word_ids: Sequence[int], seed: int) -> Workload:
    """Load A to F. Equal (name, word_ids, seed) give equal prompts; another seed gives prompts that are new to the server.

    Raises ValueError for another name.
    """
    if name not in _LOADS:
        raise ValueError(f"load: expected one of {', '.join(LOAD_NAMES)}, got {name!r}")
    return _LOADS[name](word_ids, seed)


def warm_up(word_ids: Sequence[int], seed: int) -> Workload:
    """8 prompts of 300, 16 out, 8 at a time: lets a server finish its lazy work before the clock runs."""
    words = _Words(word_ids, random.Random(f"W/{seed}"))
    return Workload("W", _single_turns(words.strangers(8, 300)), output_len=16, concurrency=8, ideal_hit_tokens=0)
