"""The load generator against the real server with a tiny model: what it adds up is what the server counted, and the ideal is reached."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.load import ClosedLoop, OpenLoop, RunResult, Target, flush, run
from bench.metrics import growth
from bench.words import Words
from bench.workloads import make_workload
from tests.support.real_server import real_server

# around a message two special tokens, and two more that ask for the answer
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><|im_start|>{% endif %}"
)


@pytest.fixture(scope="module")
def url(words_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model_dir = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(words_model_dir, model_dir)
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    flags = ["--dtype", "float32", "--max-total-tokens", "20000", "--check-account-every-step"]
    with real_server("--model-path", str(model_dir), *flags) as address:
        yield address


def check_sums(done: RunResult) -> None:
    """The cached and prompt tokens that the client adds up are the differences of the server's counters."""
    assert not done.errors
    assert done.cached_tokens == growth(done.metrics_before, done.metrics_after, "sglang:cached_tokens_total")
    prompt_tokens = sum(record.prompt_tokens or 0 for record in done.records)
    assert prompt_tokens == growth(done.metrics_before, done.metrics_after, "sglang:prompt_tokens_total")
    output_tokens = sum(record.output_tokens for record in done.records)
    assert output_tokens == growth(done.metrics_before, done.metrics_after, "sglang:generation_tokens_total")


WORKLOADS: dict[str, dict[str, Any]] = {
    "shared-prefix": {"num_groups": 3, "prompts_per_group": 4, "system_prompt_len": 60, "question_len": 6, "output_len": 5, "num_turns": 2},
    "perturbed": {"document_len": 100, "question_len": 5, "prompts_per_group": 3, "output_len": 2, "changes": "timestamp,newline,unicode"},
    "tree-of-thought": {"num_questions": 2, "num_levels": 3, "question_len": 20, "step_len": 4, "output_len": 6},
    "llm-judge": {"num_articles": 2, "header_len": 10, "article_len": 60, "dimension_len": 4, "output_len": 8},
}


@pytest.mark.parametrize("name", WORKLOADS)
async def test_one_after_the_other_the_ideal_is_reached_to_the_token(name: str, url: str, words_model_dir: Path) -> None:
    workload = make_workload(name, Words(words_model_dir), 1, **WORKLOADS[name])
    await flush(url)
    done = await run(workload, Target(url), ClosedLoop(1))
    check_sums(done)
    assert [record.prompt_tokens for record in done.records] == list(workload.prompt_lens)
    assert [record.output_tokens for record in done.records] == [request.output_len for request in workload.requests]
    assert [len(record.token_times_s) for record in done.records] == [request.output_len for request in workload.requests]
    assert done.cached_tokens == workload.ideal_hit_tokens


async def test_text_is_as_many_tokens_as_ids(url: str, words_model_dir: Path) -> None:
    workload = make_workload("perturbed", Words(words_model_dir), 2, **WORKLOADS["perturbed"])
    await flush(url)
    done = await run(workload, Target(url, send_text=True), ClosedLoop(1))
    check_sums(done)
    assert [record.prompt_tokens for record in done.records] == list(workload.prompt_lens)
    assert done.cached_tokens == workload.ideal_hit_tokens


@pytest.mark.parametrize("mode", [ClosedLoop(6), OpenLoop(200.0)])
async def test_sums_are_the_servers_under_load(mode: ClosedLoop | OpenLoop, url: str, words_model_dir: Path) -> None:
    """BENCH-03: counted as the server sees them, for conversations too."""
    workload = make_workload("shared-prefix", Words(words_model_dir), 3, **WORKLOADS["shared-prefix"])
    await flush(url)
    done = await run(workload, Target(url), mode)
    check_sums(done)
    assert done.cached_tokens is not None
    assert 0 < done.cached_tokens <= workload.ideal_hit_tokens


async def test_a_chat_is_what_the_server_counts_template_and_all(url: str, words_model_dir: Path) -> None:
    """Prompts of one group: the template's first token, then the shared words, are re-used; its others come behind what differs."""
    workload = make_workload(
        "shared-prefix", Words(words_model_dir), 4, num_groups=1, prompts_per_group=4, system_prompt_len=60, question_len=6, output_len=5
    )
    await flush(url)
    done = await run(workload, Target(url, path="/v1/chat/completions"), ClosedLoop(1))
    check_sums(done)
    assert [(record.prompt_tokens, record.prompt_len) for record in done.records] == [(66 + 4, None)] * 4
    assert [(record.output_tokens, len(record.token_times_s)) for record in done.records] == [(5, 5)] * 4
    assert [record.cached_tokens for record in done.records] == [0, 61, 61, 61]
    assert done.ideal_hit_rate is None


@pytest.mark.parametrize("mode", [ClosedLoop(3), OpenLoop(200.0)])
async def test_conversations_as_chats_re_use_the_turns_before(mode: ClosedLoop | OpenLoop, url: str, words_model_dir: Path) -> None:
    workload = make_workload(
        "multi-turn-short", Words(words_model_dir), 5, num_chats=3, num_turns=3, min_first_len=30, max_first_len=40, min_turn_len=6,
        max_turn_len=12,
    )  # fmt: skip
    await flush(url)
    done = await run(workload, Target(url, path="/v1/chat/completions"), mode)
    check_sums(done)
    before = {record.id: record for record in done.records}
    for request, record in zip(workload.requests, done.records):
        if request.turn:
            # at least the turn before, up to where the template asked for its answer, of which the second token differs from now on
            assert (record.cached_tokens or 0) >= (before[request.depends_on[-1]].prompt_tokens or 0) - 1
