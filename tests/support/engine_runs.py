"""Requests through an Engine in this process, step by step, with all that it said of each; and how two such runs may differ."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from radixserve.core import Request, RequestOutput, SamplingParams, TokenLogprob
from radixserve.engine.engine import Engine
from radixserve.engine.llm import engine_config

NEAR_TIE = 1e-4  # logits may be so close that float32 rounding decides


@dataclass(slots=True)
class Answer:
    """What came of one request, in order."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    final: RequestOutput | None = None

    def take(self, output: RequestOutput) -> None:
        assert self.final is None, f"{output.request_id}: expected nothing after the final output"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        if output.is_final:
            assert output.num_output_tokens == len(self.token_ids)
            self.final = output


def tiny_engine(model_dir: Path, **options: object) -> Engine:
    """float32 on the CPU, every page recounted after every step."""
    defaults: dict[str, object] = {"dtype": "float32", "device": "cpu", "check_account_every_step": True}
    return Engine.build(engine_config(str(model_dir), defaults | options))


def make_request(name: str, prompt: Sequence[int], seed: int = 0, **sampling: object) -> Request:
    return Request(name, array("i", prompt), SamplingParams(**sampling).validate(), seed)  # type: ignore[arg-type]


def run(engine: Engine, requests: Iterable[Request], before_step: Callable[[], None] = lambda: None) -> dict[str, Answer]:
    """All at once, to the end."""
    answers: dict[str, Answer] = {}
    for one in requests:
        engine.add(one)
        answers[one.request_id] = Answer()
    while engine.has_work:
        before_step()
        for output in engine.step():
            answers[output.request_id].take(output)
    assert all(answer.final is not None for answer in answers.values())
    return answers


def is_equal_up_to_a_near_tie(answer: Answer, calm: Answer) -> bool:
    """True if the tokens are equal; False if they part where two likeliest tokens of the calm run were as good as equal.

    Both greedy, with logprobs=2. AssertionError if they part anywhere else.
    """
    if answer.token_ids == calm.token_ids:
        return True
    place = next(i for i, (one, other) in enumerate(zip(answer.token_ids, calm.token_ids)) if one != other)
    (_, best), (_, second) = calm.logprobs[place].top
    assert best - second < NEAR_TIE, f"output {place} differs, and the calm run's best two were {best - second:.6f} apart"
    return False
