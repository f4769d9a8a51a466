"""Offline batches in the structure of the workloads of the SGLang paper, with lengths scaled down: the shape counts.

A batch is a list of prompts that are all there at once; what would depend on an answer (the next round of ReAct, a branch of a tree of
thought) is replayed with random tokens in the answer's place, so that every policy gets the same prompts.
"""

from collections.abc import Sequence

from bench.workloads.basic import MultiTurn, SharedPrefix
from bench.workloads.draw import Draw, Kind
from bench.workloads.programs import FewShot, GenerativeAgents, HellaSwag, LlmJudge, Rag, ReAct, SkeletonOfThought, TreeOfThought
from bench.workloads.workload import Ids

Batch = list[Ids]

VOCAB = 30_000


class Numbers:
    """A vocabulary without a model: tokens 2 to VOCAB - 1, written as decimal numbers."""

    ids: Sequence[int] = range(2, VOCAB)

    def text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def encode(self, text: str) -> list[int]:
        return list(map(int, text.split()))


_WORKLOADS: dict[str, Kind] = {
    "mmlu": FewShot(12, 16, header_len=120, question_len=20, ordered=True),
    "hellaswag": HellaSwag(40, 4, header_len=340, question_len=10, ending_len=4),
    "react": ReAct(24, 6, template_len=150, question_len=5, round_len=20, output_len=6),
    "generative-agents": GenerativeAgents(160, 12, persona_len=40, line_len=4, task_len=90, own_len=15),
    "tree-of-thought": TreeOfThought(6, question_len=72, step_len=4, output_len=16),
    "skeleton-of-thought": SkeletonOfThought(
        16, header_len=30, question_len=10, point_len=2, point_output_len=6, expand_header_len=80, expand_output_len=26
    ),
    "llm-judge": LlmJudge(24, header_len=20, article_len=100, dimension_len=10, output_len=10),
    "multi-turn": MultiTurn(40, 4, 40, 40, 40, 40, 6, 6),
    "dspy-rag": Rag(120, header_len=60, num_passages=30, passages_per_question=2, passage_len=50, question_len=10),
    "shared-prefix": SharedPrefix(24, 8, system_prompt_len=128, question_len=8, ordered=True),
}
PAPER_WORKLOADS = tuple(_WORKLOADS)


def make_batch(name: str, seed: int = 0) -> Batch:
    """All prompts, jumbled: each up to a third of the batch behind its place. ValueError for a name not in PAPER_WORKLOADS."""
    if name not in _WORKLOADS:
        raise ValueError(f"workload: expected one of {', '.join(PAPER_WORKLOADS)}, got {name!r}")
    draw = Draw(Numbers(), f"{name}/{seed}")
    requests = _WORKLOADS[name].requests(draw)
    answers = {request.id: draw.ids(request.output_len) for request in requests}
    batch = [request.prompt(answers) for request in requests]
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
