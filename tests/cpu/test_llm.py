"""LLM: several calls at once on one engine, the same text as over HTTP, and clear errors for what is no prompt and no setting."""

import random
import signal
import time
from array import array
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from radixserve import LLM, Completion, FinishReason, Namespace, SamplingParams, cli
from radixserve.core import Request, ScheduledBatch, StepOutput
from radixserve.engine.client import AsyncEngine
from radixserve.engine.text import OutputText
from radixserve.errors import ContextLengthError, InvalidRequestError, UnsupportedFieldError
from radixserve.server.generation import Generation
from radixserve.server.latency import LatencyMetrics
from tests.support.thread_link import ThreadLink

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = ["the quick brown fox", "user: hello there", "0123456789", "and and and of of"]


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str, bool], Path]) -> LLM:
    return LLM(str(tiny_model("llama", True)), dtype="float32", device="cpu", max_total_tokens=2048)


@pytest.fixture
def alone(llm: LLM) -> list[Completion]:
    return [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.has_work
    llm.engine.check_idle()
    assert llm.engine.stats().num_running == 0


def test_two_streams_side_by_side(llm: LLM, alone: list[Completion]) -> None:
    pairs = list(zip_longest(llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY), fillvalue=""))
    assert ["".join(pieces) for pieces in zip(*pairs)] == [alone[0].text, alone[1].text]
    assert len(pairs) > 5  # they really ran side by side
    assert_idle(llm)


def test_a_half_read_stream_waits_for_another_call(llm: LLM, alone: list[Completion]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = [next(stream), next(stream)]
    others = llm.generate(PROMPTS[1:3], GREEDY)
    assert [other.text for other in others] == [alone[1].text, alone[2].text]
    assert [other.token_ids for other in others] == [alone[1].token_ids, alone[2].token_ids]
    assert "".join(chain(first, stream)) == alone[0].text
    assert_idle(llm)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_stream_that_is_left_takes_only_itself_away(llm: LLM, alone: list[Completion], is_closed: bool) -> None:
    kept, left = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    pieces = [next(kept), next(left), next(kept)]
    aborted_before = llm.engine.stats().aborted_total
    if is_closed:
        left.close()  # type: ignore[attr-defined]
    else:
        del left
    assert llm.engine.stats().aborted_total == aborted_before + 1
    assert llm.engine.stats().num_running == 1
    assert "".join([pieces[0], pieces[2], *kept]) == alone[0].text
    assert_idle(llm)


def test_a_refusal_half_way_leaves_nothing_and_disturbs_nobody(llm: LLM, alone: list[Completion]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    with pytest.raises(ContextLengthError):
        llm.generate([PROMPTS[1], "x" * 3000], GREEDY)
    assert llm.engine.stats().num_running + llm.engine.stats().num_waiting == 1
    assert first + "".join(stream) == alone[0].text
    assert_idle(llm)


def test_an_engine_that_lost_a_request_is_an_error_and_no_hang(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    while llm.engine.has_work:
        llm.engine.step()
    with pytest.raises(RuntimeError, match="stepped by somebody else"):
        list(stream)
    llm._open_answers.clear()
    assert_idle(llm)


async def over_http_code(llm: LLM, request: Request) -> tuple[str, int, str]:
    """(text, number of tokens, finish reason) by the very code that answers HTTP calls, over the same engine in a thread."""
    engine = await AsyncEngine.start(llm.engine.config, make_link=lambda: ThreadLink(llm.engine))
    latency = LatencyMetrics(CollectorRegistry(), "m")
    generation = Generation(engine, llm.tokenizer, [request], 1, latency, time.monotonic(), [True])
    deltas = [delta async for delta in generation.deltas()]
    await engine.stop()
    reason = deltas[-1].finish_reason
    assert reason is not None
    return "".join(delta.text for delta in deltas), generation.usage()["completion_tokens"], reason


CASES: dict[str, Callable[[Completion, LLM], SamplingParams]] = {
    "length": lambda plain, llm: GREEDY,
    "stop token": lambda plain, llm: SamplingParams(24, temperature=0.0, stop_token_ids=(plain.token_ids[7],), ignore_eos=True),
    "first token stops": lambda plain, llm: SamplingParams(24, temperature=0.0, stop_token_ids=(plain.token_ids[0],), ignore_eos=True),
    "stop string": lambda plain, llm: SamplingParams(24, temperature=0.0, stop=(plain.text[6:9],), ignore_eos=True),
    "stop string in the last token": lambda plain, llm: SamplingParams(24, temperature=0.0, stop=(plain.text[-1:],), ignore_eos=True),
    "both": lambda plain, llm: SamplingParams(
        24, temperature=0.0, stop=(plain.text[8:10],), stop_token_ids=(plain.token_ids[5],), ignore_eos=True
    ),
    "held back": lambda plain, llm: SamplingParams(24, temperature=0.0, stop=(plain.text[-2:] + "\x00",), ignore_eos=True),
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("case", CASES)
async def test_text_is_that_of_the_server(llm: LLM, case: str, prompt: str) -> None:
    (plain,) = llm.generate(prompt, GREEDY)
    sampling = CASES[case](plain, llm)
    (ours,) = llm.generate(prompt, sampling)
    theirs = await over_http_code(llm, Request("r", array("i", llm.tokenizer.encode(prompt)), sampling))
    assert theirs == (ours.text, len(ours.token_ids), ours.finish_reason)
    assert "".join(llm.stream(prompt, sampling)) == ours.text
    assert ours.token_ids == plain.token_ids[: len(ours.token_ids)]
    if case == "stop token":
        assert ours.finish_reason is FinishReason.STOP
        assert ours.text == llm.tokenizer.decode(list(ours.token_ids[:-1]))


def test_eos_is_no_text_here_either(llm: LLM) -> None:
    """One and the same class makes the text of both; this pins that an EOS that shows as text would not be shown."""
    from radixserve.core import RequestOutput

    visible = llm.tokenizer.encode("the")[-1]
    assert not llm.tokenizer.is_special(visible)
    text = OutputText(llm.tokenizer, Request("r", array("i", [5])))
    delta = text.push(RequestOutput("r", (visible, visible), 1, 0, 2, FinishReason.STOP, stop_token_id=visible))
    assert delta == (llm.tokenizer.decode([visible]), 2, FinishReason.STOP, False, visible)


BAD_PROMPTS: list[Any] = [
    [[2**40]],
    [[-1]],
    [[384]],
    [["x"]],
    [[1.5]],
    [[True]],
    [True],
    [[None]],
    [[[1]]],
    [[]],
    [""],
    [5.5],
    [None],
    [b"abc"],
    None,
    7,
    b"abc",
    {"prompt": "a"},
    [{"a": 1}],
    ["\ud800"],
]


@pytest.mark.parametrize("prompts", BAD_PROMPTS, ids=lambda value: ascii(value)[:40])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt.*expected.*got"):
        llm.generate(prompts, GREEDY)
    assert_idle(llm)


BAD_SAMPLING: list[tuple[str, Any]] = [
    ("max_tokens", "5"),
    ("max_tokens", 5.0),
    ("max_tokens", True),
    ("max_tokens", None),
    ("max_tokens", 10**5000),
    ("temperature", "hot"),
    ("temperature", False),
    ("temperature", None),
    ("temperature", [1]),
    ("temperature", 1j),
    ("top_p", "1"),
    ("top_k", 1.5),
    ("min_p", float("nan")),
    ("seed", "x"),
    ("seed", 1.5),
    ("seed", True),
    ("stop", "word"),
    ("stop", (1,)),
    ("stop", ("",)),
    ("stop", None),
    ("stop_token_ids", 5),
    ("stop_token_ids", ("x",)),
    ("stop_token_ids", (True,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (2**40,)),
    ("ignore_eos", "no"),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING, ids=lambda value: ascii(type(value))[:40])
def test_a_setting_of_the_wrong_type_is_refused(llm: LLM, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field}: expected .*, got ") as refused:
        llm.generate("a", SamplingParams(**{field: value}))
    assert refused.value.param == field
    with pytest.raises(InvalidRequestError):
        next(llm.stream("a", SamplingParams(**{field: value})))
    assert_idle(llm)


@pytest.mark.parametrize("sampling", [{"max_tokens": 5}, [None], [GREEDY, GREEDY], "greedy", 5])
def test_what_is_no_sampling_is_refused(llm: LLM, sampling: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling: expected"):
        llm.generate(["a"], sampling)


def test_numpy_integers_are_integers(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    sampling = SamplingParams(max_tokens=np.int32(24), temperature=np.float32(0.0), seed=np.int64(5), ignore_eos=True)  # type: ignore[arg-type]
    for prompts in (np.array(ids), [np.array(ids)], [[np.int32(item) for item in ids]], tuple(ids)):
        assert llm.generate(prompts, sampling)[0].text == llm.generate(PROMPTS[0], GREEDY)[0].text  # type: ignore[arg-type]


@pytest.mark.parametrize("namespace", ["salt", None, ("", "", ""), Namespace(cache_salt=5)])  # type: ignore[arg-type]
def test_what_is_no_namespace_is_refused(llm: LLM, namespace: Any) -> None:
    with pytest.raises(InvalidRequestError, match="namespace: expected"):
        llm.generate("a", GREEDY, namespace=namespace)


@pytest.mark.parametrize(("param", "fields"), [("adapter", {"namespace": Namespace(adapter="a")})])
def test_what_is_not_built_is_refused_by_name(llm: LLM, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFieldError, match=param) as refused:
        llm.engine.add(Request("r", array("i", [5]), **fields))
    assert refused.value.param == param
    assert_idle(llm)


def test_streams_in_random_order(llm: LLM, alone: list[Completion]) -> None:
    rng = random.Random(0)
    streams = {number: llm.stream(prompt, GREEDY) for number, prompt in enumerate(PROMPTS)}
    texts = [""] * len(PROMPTS)
    while streams:
        number = rng.choice(list(streams))
        piece = next(streams[number], None)
        if piece is None:
            del streams[number]
        else:
            texts[number] += piece
    assert texts == [answer.text for answer in alone]
    assert_idle(llm)


def test_an_interrupt_waits_for_the_end_of_the_step(tiny_model: Callable[[str, bool], Path]) -> None:
    """Ctrl-C, or a notebook's stop button, in the middle of a step: KeyboardInterrupt, and the LLM goes on afterwards."""
    llm = LLM(str(tiny_model("llama", True)), dtype="float32", device="cpu", max_total_tokens=256)
    expected = llm.generate([[5, 6, 7]], GREEDY)
    plain_execute = llm.engine._pipeline.runner.execute

    def interrupted(batch: ScheduledBatch) -> StepOutput:
        signal.raise_signal(signal.SIGINT)
        return plain_execute(batch)

    llm.engine._pipeline.runner.execute = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    finally:
        signal.signal(signal.SIGINT, before)
    llm.engine._pipeline.runner.execute = plain_execute  # type: ignore[method-assign]
    assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids == expected[0].token_ids
    assert not llm.engine.has_work


@pytest.mark.parametrize("ends_by", ["ctrl-c", "del"])
def test_a_profile_is_told_when_the_run_ends_early(
    tiny_model: Callable[[str, bool], Path], ends_by: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_model("llama", True))
    options: dict[str, object] = {"max_total_tokens": 512, "profile_steps": 500}
    if ends_by == "del":
        llm = LLM(model, device="cpu", **options)
        llm.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
        del llm
    else:
        step = LLM._step

        def interrupted(llm: LLM) -> None:
            step(llm)
            monkeypatch.setattr(LLM, "_step", step)
            raise KeyboardInterrupt

        monkeypatch.setattr(LLM, "_step", interrupted)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        assert cli.main(["generate", "a prompt", "--model-path", model, "--device=cpu", *flags]) == 130
    error = capsys.readouterr().err
    assert error.count("; the run ended after") == 1 and " of 500 steps" in error
