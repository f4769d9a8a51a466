"""LLM: an engine in this very process, for offline use and tests."""

import itertools
import secrets
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig
from radixserve.core import BASE_NAMESPACE, FinishReason, Namespace, Request, RequestOutput, SamplingParams
from radixserve.engine.engine import Engine
from radixserve.errors import InvalidRequestError
from radixserve.tokenizer import Detokenizer, Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int


class LLM:
    """LLM(model).generate(prompts, SamplingParams(...)).

    model: None for the default model, else what --model-path takes. Further keywords are fields of EngineConfig, CacheConfig and
    SchedulerConfig: LLM(page_size=16, disable_radix_cache=True). ModelError and ConfigError say what cannot be.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._set_up(engine_config(model, options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        llm = cls.__new__(cls)
        llm._set_up(config)
        return llm

    def _set_up(self, config: EngineConfig) -> None:
        self.engine = Engine.build(config)
        self.tokenizer = Tokenizer.from_directory(Path(self.engine.info.model_path))
        self._num_requests = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace = BASE_NAMESPACE,
        show_progress: bool | None = None,
    ) -> list[Completion]:
        """One Completion per prompt, in order. A prompt is a text or a list of token ids; sampling is one for all, or one each.

        show_progress: a bar on standard error; by default where that is a terminal.
        InvalidRequestError, before anything runs, for a prompt or a parameter that cannot be served.
        """
        batch = _as_batch(prompts)
        if isinstance(sampling, Sequence):
            if len(sampling) != len(batch):
                raise InvalidRequestError(f"sampling: expected one for each of {len(batch)} prompts, got {len(sampling)}")
            each = list(sampling)
        else:
            each = [sampling or SamplingParams()] * len(batch)
        answers = [_Answer(self, self._request(prompt, params, namespace)) for prompt, params in zip(batch, each)]
        for _ in self._run(answers, show_progress):
            pass
        return [answer.completion() for answer in answers]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one prompt, piece by piece as it is computed."""
        answer = _Answer(self, self._request(prompt, sampling or SamplingParams(), BASE_NAMESPACE))
        yield from self._run([answer], False)

    def _request(self, prompt: Prompt, sampling: SamplingParams, namespace: Namespace) -> Request:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        return Request(f"llm-{next(self._num_requests)}", array("i", ids), sampling, seed % 2**64, namespace=namespace)

    def _run(self, answers: "list[_Answer]", show_progress: bool | None) -> Iterator[str]:
        by_id = {answer.request.request_id: answer for answer in answers}
        try:
            for answer in answers:
                self.engine.add(answer.request)
            with _progress_bar(len(answers), show_progress) as advance:
                while by_id:
                    for output in self.engine.step():
                        if output.request_id in by_id:
                            yield by_id[output.request_id].take(output)
                            if output.is_final:
                                del by_id[output.request_id]
                                advance()
        finally:
            # refused half-way, or the caller stopped reading: nothing of this call stays in the engine
            for request_id in by_id:
                self.engine.abort(request_id)
            while by_id and self.engine.has_work:
                self.engine.step()


class _Answer:
    """One request and what has come of it."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self.request = request
        self._engine = llm.engine
        self._detokenizer = Detokenizer(llm.tokenizer, request.prompt_ids, request.sampling.stop)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._is_stopped = False
        self._final: RequestOutput | None = None

    def take(self, output: RequestOutput) -> str:
        """The text that this output adds."""
        self._final = output if output.is_final else None
        if self._is_stopped:
            return ""
        self._token_ids.extend(output.token_ids)
        piece = self._detokenizer.push(output.token_ids)
        text = piece.text
        if piece.matched_stop is not None:
            self._is_stopped = True
            del self._token_ids[piece.num_tokens :]
            self._engine.finish(self.request.request_id, piece.num_tokens)
        elif output.is_final:
            text += self._detokenizer.finish()
        self._text.append(text)
        return text

    def completion(self) -> Completion:
        assert self._final is not None and self._final.finish_reason is not None
        reason = FinishReason.STOP if self._is_stopped else self._final.finish_reason
        return Completion("".join(self._text), tuple(self._token_ids), reason, self._final.num_prompt_tokens, self._final.num_cached_tokens)


def engine_config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from flat keywords. InvalidRequestError names one that no config has."""
    parts: dict[type, dict[str, Any]] = {EngineConfig: {"model_path": model}, CacheConfig: {}, SchedulerConfig: {}}
    for name, value in options.items():
        owner = next((part for part in parts if name in part.__dataclass_fields__ and name not in ("cache", "scheduler")), None)  # type: ignore[attr-defined]
        if owner is None:
            raise InvalidRequestError(f"{name}: expected a field of EngineConfig, CacheConfig or SchedulerConfig")
        parts[owner][name] = value
    return EngineConfig(**parts[EngineConfig], cache=CacheConfig(**parts[CacheConfig]), scheduler=SchedulerConfig(**parts[SchedulerConfig]))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


@contextmanager
def _progress_bar(total: int, is_shown: bool | None) -> Iterator[Callable[[], object]]:
    """A bar on standard error that counts finished requests; None shows it where that is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc="Completions", unit="prompt", disable=None if is_shown is None else not is_shown) as bar:
        yield lambda: bar.update()
