"""The loads: seeded prompts with exact token counts, each knowing how many tokens an ideal tree would re-use.

make_workload(name, words, seed, **options) makes any of WORKLOADS; what each is and takes: describe_workloads().
"""

from collections.abc import Iterator, Mapping

from bench.words import Vocabulary
from bench.workloads.basic import LOADS, WARM_UP, MultiTurn, Random, SharedPrefix
from bench.workloads.draw import Draw, Kind
from bench.workloads.options import describe_options, parse_option, with_options
from bench.workloads.perturbed import Perturbed
from bench.workloads.programs import FewShot, GenerativeAgents, HellaSwag, LlmJudge, Rag, ReAct, SkeletonOfThought, TreeOfThought
from bench.workloads.recorded import ShareGpt, TraceFile
from bench.workloads.workload import AnswerOf, Ids, Workload, WorkloadRequest

__all__ = [
    "LOAD_NAMES",
    "WORKLOADS",
    "AnswerOf",
    "Ids",
    "Workload",
    "WorkloadRequest",
    "describe_workloads",
    "make_workload",
    "parse_option",
    "warm_up",
]

_KINDS: dict[str, Kind] = {
    **LOADS,
    "random": Random(),
    "shared-prefix": SharedPrefix(),
    "perturbed": Perturbed(),
    "few-shot": FewShot(),
    "hellaswag": HellaSwag(),
    "react": ReAct(),
    "generative-agents": GenerativeAgents(),
    "tree-of-thought": TreeOfThought(),
    "skeleton-of-thought": SkeletonOfThought(),
    "llm-judge": LlmJudge(),
    "multi-turn-short": MultiTurn(),
    "multi-turn-long": MultiTurn(min_output_len=256, max_output_len=512),
    "rag": Rag(),
    "trace": TraceFile(),
    "sharegpt": ShareGpt(),
}
WORKLOADS = tuple(_KINDS)
LOAD_NAMES = tuple(LOADS)


def make_workload(name: str, words: Vocabulary, seed: int, **options: object) -> Workload:
    """Equal arguments give equal prompts; another seed gives prompts that are new to the server.

    Raises ValueError, with expected and got, for another name, or an option that does not fit.
    """
    return _make(name, words, f"{name}/{seed}", options)


def _make(name: str, words: Vocabulary, key: str, options: Mapping[str, object]) -> Workload:
    if name not in _KINDS:
        raise ValueError(f"workload: expected one of {', '.join(WORKLOADS)}, got {name!r}")
    kind = with_options(name, _KINDS[name], options)
    return Workload.of(name, kind.about, kind.requests(Draw(words, key)), words, kind.concurrency)


def warm_up(words: Vocabulary, seed: int) -> Workload:
    """8 prompts of 300, 16 out, 8 at a time: lets a server finish its lazy work before the clock runs."""
    return Workload.of("W", WARM_UP.about, WARM_UP.requests(Draw(words, f"W/{seed}")), words, WARM_UP.concurrency)


def describe_workloads() -> Iterator[str]:
    """Name and options of each, for a person."""
    for name, kind in _KINDS.items():
        if name in LOADS:
            yield f"{name}: {type(kind).__name__}: {kind.about}"
            continue
        yield f"{name}: {(type(kind).__doc__ or '').splitlines()[0]}"
        yield from (f"    {line}" for line in describe_options(kind))
