"""Offline batches in the structure of the workloads of the SGLang paper, with random tokens and lengths scaled down: the shape counts.

Pure and seeded. A batch is a list of prompts that are all there at once; what would depend on an answer (the next round of ReAct, a
branch of a tree of thought) is replayed with random tokens in the answer's place, so that every policy gets the same prompts.
"""

import random
from collections.abc import Callable

Ids = list[int]
Batch = list[Ids]

VOCAB = 30_000


class _Draw:
    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(f"{name}/{seed}")

    def ids(self, length: int) -> Ids:
        return [self.rng.randrange(2, VOCAB) for _ in range(length)]


def mmlu(draw: _Draw) -> Batch:
    """Subjects with a few-shot header each, and questions."""
    headers = [draw.ids(120) for _ in range(12)]
    return [header + draw.ids(20) for header in headers for _ in range(16)]


def hellaswag(draw: _Draw) -> Batch:
    """One header; per question four endings: two levels."""
    header = draw.ids(340)
    questions = [header + draw.ids(10) for _ in range(40)]
    return [question + draw.ids(4) for question in questions for _ in range(4)]


def react(draw: _Draw) -> Batch:
    """A template, a question, and rounds that each append."""
    template = draw.ids(150)
    batch = []
    for _ in range(24):
        history = template + draw.ids(5)
        for _ in range(6):
            batch.append(history)
            history = history + draw.ids(20)
    return batch


def generative_agents(draw: _Draw) -> Batch:
    """Five templates: one puts the persona first, one has a one-line header, three begin with a long task header."""
    personas = [draw.ids(40) for _ in range(12)]
    line = draw.ids(4)
    tasks = [draw.ids(90) for _ in range(3)]
    batch = []
    for _ in range(160):
        persona, kind = draw.rng.choice(personas), draw.rng.randrange(5)
        start = persona + draw.ids(10) if kind == 0 else line if kind == 1 else tasks[kind - 2] + persona
        batch.append(start + draw.ids(15))
    return batch


def tree_of_thought(draw: _Draw) -> Batch:
    """Two branches, four levels: thirty prompts a question."""
    header = draw.ids(60)

    def grow(prompt: Ids, level: int) -> Batch:
        if level == 4:
            return []
        return [one for _ in range(2) for one in ([prompt, *grow(prompt + draw.ids(20), level + 1)])]

    return [one for _ in range(6) for one in grow(header + draw.ids(12), 0)]


def skeleton_of_thought(draw: _Draw) -> Batch:
    """Five short turns in one growing prompt, five expansions below a shared header."""
    header, expand = draw.ids(30), draw.ids(80)
    batch = []
    for _ in range(16):
        question = draw.ids(10)
        history = header + question
        for _ in range(5):
            batch += [history, expand + question + draw.ids(6)]
            history = history + draw.ids(8)
    return batch


def llm_judge(draw: _Draw) -> Batch:
    """A header, an article, six dimensions, then a join."""
    header = draw.ids(20)
    batch = []
    for _ in range(24):
        article = header + draw.ids(100)
        batch += [article + draw.ids(10) for _ in range(6)] + [article + draw.ids(60)]
    return batch


def multi_turn(draw: _Draw) -> Batch:
    """Chats of four turns."""
    batch = []
    for _ in range(40):
        history: Ids = []
        for _ in range(4):
            history = history + draw.ids(40)
            batch.append(history)
            history = history + draw.ids(6)
    return batch


def dspy_rag(draw: _Draw) -> Batch:
    """Instruction and demonstrations, then passages, of which some come back, and a question."""
    head = draw.ids(60)
    passages = [draw.ids(50) for _ in range(30)]
    return [head + draw.rng.choice(passages) + draw.rng.choice(passages) + draw.ids(10) for _ in range(120)]


def shared_prefix(draw: _Draw) -> Batch:
    """Groups of prompts, as in SGLang's generated-shared-prefix."""
    heads = [draw.ids(128) for _ in range(24)]
    return [head + draw.ids(8) for head in heads for _ in range(8)]


_WORKLOADS: dict[str, Callable[[_Draw], Batch]] = {
    "mmlu": mmlu,
    "hellaswag": hellaswag,
    "react": react,
    "generative-agents": generative_agents,
    "tree-of-thought": tree_of_thought,
    "skeleton-of-thought": skeleton_of_thought,
    "llm-judge": llm_judge,
    "multi-turn": multi_turn,
    "dspy-rag": dspy_rag,
    "shared-prefix": shared_prefix,
}
PAPER_WORKLOADS = tuple(_WORKLOADS)


def make_batch(name: str, seed: int = 0) -> Batch:
    """All prompts, jumbled: each up to a third of the batch behind its place. ValueError for a name not in PAPER_WORKLOADS."""
    if name not in _WORKLOADS:
        raise ValueError(f"workload: expected one of {', '.join(PAPER_WORKLOADS)}, got {name!r}")
    draw = _Draw(name, seed)
    batch = _WORKLOADS[name](draw)
    window = len(batch) / 3
    return [prompt for _, prompt in sorted((index + draw.rng.random() * window, prompt) for index, prompt in enumerate(batch))]


def depth_first(batch: Batch) -> Batch:
    """The best order for a cache that holds the longest prompt: down the radix tree of the batch, one branch after the other."""
    return sorted(batch)


def ideal_hit_tokens(batch: Batch) -> int:
    """Tokens that need not be computed if each distinct prefix is computed once, one token of every prompt excepted."""
    hits = 0
    before: Ids = []
    for prompt in depth_first(batch):
        common = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), min(len(prompt), len(before)))
        hits += min(common, len(prompt) - 1)
        before = prompt
    return hits
