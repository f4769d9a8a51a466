"""Loads as chats: whose each part of a prompt is, and what a run over the chat route records."""

from pathlib import Path

import pytest

from bench.chat import chat_messages
from bench.load import ClosedLoop, OpenLoop, Target, run
from bench.metrics import growth
from bench.report import summarize
from bench.workloads import WORKLOADS, AnswerOf, Workload, WorkloadRequest, make_workload
from bench.workloads.workload import Part
from tests.support.bench_servers import RadixServer, WholeWords, serving
from tests.support.null_server import null_server

CHAT = "/v1/chat/completions"
MADE = [name for name in WORKLOADS if name not in ("trace", "sharegpt", "perturbed")]  # without files, of whole words


def said(load: Workload, request: WorkloadRequest) -> list[dict[str, str]]:
    def text_of(part: Part) -> str:
        return f" <{part.request_id}>" if isinstance(part, AnswerOf) else load.words.text(part)

    return chat_messages(request.parts, {one.id: one.parts for one in load.requests}, text_of)


def roles(load: Workload, request: WorkloadRequest) -> list[str]:
    return [message["role"] for message in said(load, request)]


@pytest.mark.parametrize("name", MADE)
def test_messages_are_the_prompt_with_user_and_assistant_in_turn(name: str) -> None:
    load = make_workload(name, WholeWords(), 1)
    for request in load.requests:
        messages = said(load, request)
        assert [message["role"] for message in messages] == [("user", "assistant")[index % 2] for index in range(len(messages))]
        assert messages[-1]["role"] == "user"
        whole = "".join(f" <{part.request_id}>" if isinstance(part, AnswerOf) else load.words.text(part) for part in request.parts)
        assert "".join(message["content"] for message in messages) == whole


@pytest.mark.parametrize("name", ["D", "multi-turn-long", "tree-of-thought"])
def test_a_next_turn_begins_with_the_messages_of_the_turn_before(name: str) -> None:
    """Else a server's prefix would end at the first of them."""
    load = make_workload(name, WholeWords(), 1)
    of = {request.id: said(load, request) for request in load.requests}
    followers = [request for request in load.requests if request.depends_on]
    assert followers
    for request in followers:
        before = of[request.depends_on[-1]]
        answer = {"role": "assistant", "content": f" <{request.depends_on[-1]}>"}
        assert of[request.id][:-1] == [*before, answer]


def test_an_answer_quoted_by_a_program_is_the_users() -> None:
    load = make_workload("skeleton-of-thought", WholeWords(), 1)
    long = next(request for request in load.requests if request.id == "q0.p1.long")
    assert roles(load, long) == ["user"]
    third = next(request for request in load.requests if request.id == "q0.p2")
    assert roles(load, third) == ["user", "assistant", "user", "assistant", "user"]
    score = next(request for request in make_workload("llm-judge", WholeWords(), 1).requests if request.id == "a0.score")
    # the first judgement answers the prompt as it stands; the others answered another one
    assert roles(make_workload("llm-judge", WholeWords(), 1), score) == ["user", "assistant", "user"]


@pytest.mark.parametrize("mode", [ClosedLoop(1), ClosedLoop(4), OpenLoop(500.0)])
async def test_conversations_as_chats(mode: ClosedLoop | OpenLoop, tmp_path: Path) -> None:
    """Prompt tokens are the server's: two of its template around each message and one at the end. Hits go to the end of an answer."""
    load, server = make_workload("multi-turn-short", WholeWords(), 1, num_chats=3, num_turns=3), RadixServer()
    async with serving(server.handle) as url:
        done = await run(load, Target(url, path=CHAT), mode)
    assert not done.errors
    for request, record, prompt_len in zip(load.requests, done.records, load.prompt_lens):
        assert record.prompt_len is None
        assert record.prompt_tokens == prompt_len + 2 * (2 * request.turn + 1) + 1
        assert record.output_tokens == len(record.token_times_s) == request.output_len
    assert done.cached_tokens == growth(done.metrics_before, done.metrics_after, "sglang:cached_tokens_total")
    if mode == ClosedLoop(1):
        later = [(record, before) for before, record in zip(done.records, done.records[1:]) if not record.id.endswith("t0")]
        # all of the turn before and its answer but the last token, which was never computed
        assert all(record.cached_tokens == before.prompt_tokens + before.output_tokens - 1 for record, before in later)
    assert done.ideal_hit_rate is None
    summary = summarize("fake", 1, done)
    assert summary.in_tok == summary.served_in_tok == sum(record.prompt_tokens or 0 for record in done.records)


async def test_chats_of_a_server_that_answers_at_once() -> None:
    load = make_workload("random", WholeWords(), 1, num_prompts=50, input_len=20, output_len=8)
    async with null_server(8) as url:
        done = await run(load, Target(url, path=CHAT), ClosedLoop(5))
    assert not done.errors
    assert {(record.prompt_tokens, record.output_tokens, len(record.token_times_s)) for record in done.records} == {(64, 8, 8)}
    assert done.overhead.cpu_per_request_s < 1 / 500
