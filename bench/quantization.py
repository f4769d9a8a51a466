"""What 8-bit weights cost in accuracy and save in time: python -m bench.quantization [--only accuracy|time]

Two engines in this process, with and without --quantization int8. Accuracy: perplexity on this project's own pages and on text that
the model without it wrote; how often the likeliest next token is the same one; how far greedy answers go together. Time: steps in turn, as
ratios.
"""

import argparse
import math
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.hardware import describe_hardware
from bench.words import find_model_dir
from radixserve.core import Request, SamplingParams, TokenLogprob
from radixserve.engine.engine import Engine
from radixserve.engine.llm import engine_config
from radixserve.models import load_decoder, load_model_config
from radixserve.tokenizer import Tokenizer

PAGES = ("README.md", "docs/architecture.md", "docs/http.md")
BEGINNINGS = (
    "The history of the lighthouse begins",
    "To bake a loaf of bread, first",
    "In the garden behind the old school, the children",
    "A prime number is",
    "def fibonacci(n):",
    "The causes of the French Revolution were",
    "Dear Anna, thank you for your letter. I",
    "Water boils at a lower temperature on a mountain because",
    "The most important thing about writing tests is",
    "Once there was a king who could not sleep. Every night he",
    "The difference between a virus and a bacterium is",
    "Photosynthesis is the process by which",
    "List three reasons to learn a second language:\n1.",
    "The train left the station at noon, and",
    "An operating system manages",
    "Economists say that inflation",
)
PIECE = 512  # tokens that are scored at once


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    prompt: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the tokens of some texts but the first of each piece."""

    nats: tuple[float, ...]
    likeliest: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(statistics.fmean(self.nats))


def run(engine: Engine, prompts: Iterable[Sequence[int]], **sampling: object) -> list[Answer]:
    """All at once, to the end, in order."""
    answers: dict[str, Answer] = {}
    for number, prompt in enumerate(prompts):
        name = str(number)
        engine.add(Request(name, array("i", prompt), SamplingParams(**sampling).validate(), seed=number))  # type: ignore[arg-type]
        answers[name] = Answer()
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].token_ids.extend(output.token_ids)
            answers[output.request_id].prompt.extend(output.prompt_logprobs)
    return list(answers.values())


def score(engine: Engine, texts: Iterable[Sequence[int]]) -> Scores:
    pieces = [text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)]
    shown = [one for answer in run(engine, pieces, max_tokens=1, prompt_logprobs=1) for one in answer.prompt]
    return Scores(tuple(-one.logprob for one in shown), tuple(one.top[0][0] for one in shown))


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def accuracy(plain: Engine, other: Engine, name_of_other: str, tokenizer: Tokenizer, num_written: int, num_greedy: int) -> None:
    prompts = [tokenizer.encode(text) for text in BEGINNINGS]
    written = run(plain, prompts, max_tokens=num_written, temperature=1.0, ignore_eos=True)
    own_text = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, written, strict=True)]
    pages = [tokenizer.encode(Path(page).read_text(encoding="utf-8")) for page in PAGES]
    print(f"| text | tokens | perplexity | with {name_of_other} | change | same likeliest token |\n|---|---|---|---|---|---|")
    for name, texts in (("written by the model, temperature 1", own_text), ("pages of this project", pages)):
        before, after = score(plain, texts), score(other, texts)
        same = statistics.fmean(a == b for a, b in zip(before.likeliest, after.likeliest, strict=True))
        old, new = before.perplexity, after.perplexity
        print(f"| {name} | {len(before.nats)} | {old:.3f} | {new:.3f} | {new / old - 1:+.2%} | {same:.2%} |", flush=True)
    greedy = [[a.token_ids for a in run(e, prompts, max_tokens=num_greedy, temperature=0.0, ignore_eos=True)] for e in (plain, other)]
    together = [common_length(a, b) for a, b in zip(*greedy, strict=True)]
    whole = sum(length == num_greedy for length in together)
    print(
        f"greedy, {len(prompts)} prompts x {num_greedy} tokens: {whole} answers are equal to the end; the same token up to number "
        f"{statistics.median(together):.0f} in the median, {min(together)} at the least"
    )


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def time_of_decode(engine: Engine, num_rows: int, num_steps: int, rng: random.Random) -> float:
    """Seconds of one step of `num_rows` rows with some 64 tokens before them."""
    for number in range(num_rows):
        prompt = array("i", [rng.randrange(engine.info.vocab_size) for _ in range(64)])
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=num_steps + 8, temperature=0.0, ignore_eos=True).validate(), 0))
    for _ in range(4):  # the prompts, and a little way on
        engine.step()
    times = [seconds(engine.step) for _ in range(num_steps)]
    while engine.has_work:
        engine.step()
    return statistics.median(times)


def time_of_prefill(engine: Engine, num_tokens: int, rng: random.Random) -> float:
    prompt = [rng.randrange(engine.info.vocab_size) for _ in range(num_tokens)]
    return seconds(lambda: run(engine, [prompt], max_tokens=1))


def times(plain: Engine, other: Engine, name_of_other: str, repeats: int) -> None:
    """Both in turn; ratios are medians of pairs."""
    rng = random.Random(1)
    loads: list[tuple[str, Callable[[Engine], float]]] = [
        *((f"decode, {rows} rows", lambda e, rows=rows: time_of_decode(e, rows, 24, rng)) for rows in (1, 2, 4, 8, 16)),
        *((f"prompt of {n} tokens", lambda e, n=n: time_of_prefill(e, n, rng)) for n in (32, 128, 512)),
    ]
    print(f"| step | ms | ms with {name_of_other} | {name_of_other} / without |\n|---|---|---|---|")
    for name, measure in loads:
        pairs = [(measure(plain), measure(other)) for _ in range(repeats + 1)][1:]
        before, after = (statistics.median(values) * 1e3 for values in zip(*pairs, strict=True))
        ratios = sorted(b / a for a, b in pairs)
        line = f"| {name} | {before:.1f} | {after:.1f} | {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |"
        print(line, flush=True)


def weight_bytes(directory: Path, dtype: str, quantization: str) -> int:
    decoder = load_decoder(
        load_model_config(directory), directory, dtype=getattr(torch, dtype), device=torch.device("cpu"), quantization=quantization
    )
    return decoder.size_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantization", description=__doc__)
    parser.add_argument("--model-dir", type=Path, help="default: the default model")
    parser.add_argument("--only", choices=("accuracy", "time"), help="default: both")
    parser.add_argument("--against", choices=("int8", "float32"), default="int8", help="float32: what another rounding alone changes")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of each time")
    parser.add_argument("--written", type=int, default=256, help="tokens that the model writes on each of 16 beginnings")
    parser.add_argument("--greedy", type=int, default=64, help="tokens of each greedy answer")
    options = parser.parse_args()
    directory = find_model_dir(options.model_dir)
    settings = {"device": "cpu", "linear_backend": "native", "max_total_tokens": 16384, "disable_radix_cache": True}
    changed = {"quantization": "int8"} if options.against == "int8" else {"dtype": "float32"}
    plain, other = (Engine.build(engine_config(str(directory), settings | changes)) for changes in ({}, changed))
    print(describe_hardware())
    sizes = [weight_bytes(directory, engine.info.dtype, engine.info.quantization) / 1e6 for engine in (plain, other)]
    print(f"{plain.info.model_name} in {plain.info.dtype}: weights {sizes[0]:.0f} MB, with {options.against} {sizes[1]:.0f} MB")
    if options.only != "time":
        accuracy(plain, other, options.against, Tokenizer.from_directory(directory), options.written, options.greedy)
    if options.only != "accuracy":
        times(plain, other, options.against, options.repeats)


if __name__ == "__main__":
    main()
