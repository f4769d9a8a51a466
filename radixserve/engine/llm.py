"""LLM: an engine in this very process, for offline use and tests."""

import itertools
import numbers
import secrets
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig
from radixserve.core import BASE_NAMESPACE, FinishReason, Namespace, Request, RequestOutput, SamplingParams, token_array
from radixserve.engine.engine import Engine
from radixserve.engine.text import OutputText
from radixserve.errors import InvalidRequestError, shown
from radixserve.tokenizer import Tokenizer

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
        self._close = weakref.finalize(self, self.engine.close)
        self.tokenizer = Tokenizer.from_directory(Path(self.engine.info.model_path))
        self._num_requests = itertools.count()
        self._open_answers: dict[str, _Answer] = {}  # of all calls that are under way, by request id
        self._is_stepping = False

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
        each = _one_each(sampling, len(batch))
        answers = self._start([self._request(prompt, params, namespace) for prompt, params in zip(batch, each)])
        try:
            with _progress_bar(len(answers), show_progress) as advance:
                num_ended = 0
                while num_ended < len(answers):
                    self._step()
                    before, num_ended = num_ended, sum(answer.is_ended for answer in answers)
                    advance(num_ended - before)
        finally:
            self._drop(answers)
        return [answer.completion() for answer in answers]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one prompt, piece by piece as it is computed. Other calls may run before it is read to its end."""
        (params,) = _one_each(sampling, 1)
        answers = self._start([self._request(prompt, params, BASE_NAMESPACE)])
        (answer,) = answers
        try:
            while not answer.is_ended:
                self._step()
                if text := answer.take_new_text():
                    yield text
            # what came while another call stepped the engine
            if text := answer.take_new_text():
                yield text
        finally:
            self._drop(answers)

    def close(self) -> None:
        """No more calls will come: a profile (profile_steps) that waits for more steps tells what it has, on standard error.

        Happens by itself when the LLM is gone, or the process ends.
        """
        self._close()

    def _request(self, prompt: Prompt, sampling: SamplingParams, namespace: Namespace) -> Request:
        sampling = sampling.validate()
        if not isinstance(namespace, Namespace) or not all(isinstance(part, str) for part in namespace):
            raise InvalidRequestError(f"namespace: expected a Namespace of strings, got {shown(namespace)}")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _as_ids(prompt)
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
        prompt_ids = token_array(ids, self.engine.info.vocab_size)
        return Request(f"llm-{next(self._num_requests)}", prompt_ids, sampling, seed % 2**64, namespace=namespace)

    def _start(self, requests: "list[Request]") -> "list[_Answer]":
        """Hand requests to the engine: all, or none when one is refused."""
        answers: list[_Answer] = []
        try:
            for request in requests:
                self.engine.add(request)
                answers.append(_Answer(self, request))
                self._open_answers[request.request_id] = answers[-1]
        except BaseException:
            self._drop(answers)
            raise
        return answers

    def _step(self) -> None:
        """One step of the engine, whose news go to whom they belong, whichever call made the step."""
        if not self.engine.has_work and self._open_answers:
            raise RuntimeError("the engine has lost requests of this LLM: was it stepped by somebody else?")
        self._is_stepping = True
        try:
            with interrupt_afterwards():
                outputs = self.engine.step()
        except Exception:
            self._open_answers.clear()  # a step that was torn leaves an engine that cannot go on
            raise
        finally:
            self._is_stepping = False
        for output in outputs:
            answer = self._open_answers.get(output.request_id)
            if answer is not None:
                answer.take(output)
                if output.is_final:
                    del self._open_answers[output.request_id]

    def _drop(self, answers: "list[_Answer]") -> None:
        """Nothing of these stays in the engine; what others asked for goes on."""
        left = [answer.request.request_id for answer in answers if answer.request.request_id in self._open_answers]
        for request_id in left:
            self.engine.abort(request_id)
        # a generator may be collected in the middle of a step: then the next one takes the marks up
        while not self._is_stepping and any(request_id in self._open_answers for request_id in left):
            self._step()


class _Answer:
    """One request and what has come of it."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self.request = request
        self._engine = llm.engine
        self._output_text = OutputText(llm.tokenizer, request)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._num_taken = 0  # pieces of _text that were taken
        self._finish_reason: FinishReason | None = None
        self._final: RequestOutput | None = None

    @property
    def is_ended(self) -> bool:
        """The engine has given its last output: a request that a stop string ended may still be there before."""
        return self._final is not None

    def take(self, output: RequestOutput) -> None:
        self._final = output if output.is_final else None
        if self._finish_reason is not None:
            return
        self._token_ids.extend(output.token_ids)
        news = self._output_text.push(output)
        self._text.append(news.text)
        self._finish_reason = news.finish_reason
        del self._token_ids[news.num_tokens :]
        if news.must_finish:
            self._engine.finish(self.request.request_id, news.num_tokens)

    def take_new_text(self) -> str:
        text = "".join(self._text[self._num_taken :])
        self._num_taken = len(self._text)
        return text

    def completion(self) -> Completion:
        assert self._final is not None and self._finish_reason is not None
        text, ids = "".join(self._text), tuple(self._token_ids)
        return Completion(text, ids, self._finish_reason, self._final.num_prompt_tokens, self._final.num_cached_tokens)


def engine_config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from flat keywords. InvalidRequestError names one that no config has."""
    parts: dict[type, dict[str, Any]] = {EngineConfig: {"model_path": model}, CacheConfig: {}, SchedulerConfig: {}}
    for name, value in options.items():
        owner = next((part for part in parts if name in part.__dataclass_fields__ and name not in ("cache", "scheduler")), None)  # type: ignore[attr-defined]
        if owner is None:
            raise InvalidRequestError(f"{name}: expected a field of EngineConfig, CacheConfig or SchedulerConfig")
        parts[owner][name] = value
    return EngineConfig(**parts[EngineConfig], cache=CacheConfig(**parts[CacheConfig]), scheduler=SchedulerConfig(**parts[SchedulerConfig]))


def _as_batch(prompts: Any) -> list[Any]:
    """A text or a flat list of integers is one prompt; anything else is a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | dict):
        raise InvalidRequestError(f"prompts: expected a text, token ids, or a list of those, got {shown(prompts)}", param="prompt")
    items = list(prompts)
    return [items] if items and all(isinstance(item, numbers.Integral) for item in items) else items


def _as_ids(prompt: Any) -> list[Any]:
    """Token ids as plain integers, where they are integers of some kind (numpy's)."""
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | dict):
        raise InvalidRequestError(f"prompt: expected a text or a list of token ids, got {shown(prompt)}", param="prompt")
    integral: Any = numbers.Integral
    return [int(item) if isinstance(item, integral) and not isinstance(item, bool) else item for item in prompt]


def _one_each(sampling: Any, num_prompts: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * num_prompts
    if not isinstance(sampling, Sequence) or not all(isinstance(item, SamplingParams) for item in sampling):
        raise InvalidRequestError(f"sampling: expected SamplingParams, or one for each prompt, got {shown(sampling)}")
    if len(sampling) != num_prompts:
        raise InvalidRequestError(f"sampling: expected one for each of {num_prompts} prompts, got {len(sampling)}")
    return list(sampling)


@contextmanager
def _progress_bar(total: int, is_shown: bool | None) -> Iterator[Callable[[int], object]]:
    """A bar on standard error that counts finished requests; None shows it where that is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc="Completions", unit="prompt", disable=None if is_shown is None else not is_shown) as bar:
        yield bar.update


@contextmanager
def interrupt_afterwards() -> Iterator[None]:
    """Ctrl-C (or a notebook's stop button) waits for the end of the block: a step that is torn in the middle leaves an engine of no use."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked and callable(before):
        before(*asked[0])
