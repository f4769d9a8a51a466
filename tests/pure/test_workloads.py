"""The workloads of bench/: sizes as asked for to the token, in text too; equal by seed; ideal re-use as a real tree finds it."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from bench.words import Words
from bench.workloads import LOAD_NAMES, WORKLOADS, AnswerOf, Ids, Workload, WorkloadRequest, make_workload, parse_option, warm_up
from bench.workloads.ideal import ideal_cached_lens
from radixserve.core import BASE_NAMESPACE
from radixserve.tree.prefix_cache import PrefixCache
from tests.support.bench_servers import WholeWords
from tests.support.word_tokenizer import word_tokenizer

TRACE = [
    {"timestamp": 1000, "input_length": 1300, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 100, "hash_ids": [0, 3]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 1, "hash_ids": [0, 1, 2]},
]
CHATS = [
    {"id": "a", "conversations": [{"from": "human", "value": "bab beb"}, {"from": "gpt", "value": " bob dab"}] * 3},
    {"id": "b", "conversations": [{"from": "human", "value": "Naïve  🙂\n\nbaba"}, {"from": "gpt", "value": "babe!"}]},
    {"id": "c", "conversations": [{"from": "human", "value": " bab" * 500}, {"from": "gpt", "value": " beb"}]},
    {"id": "d", "conversations": [{"from": "system", "value": "bab"}, {"from": "human", "value": "beb"}]},
    {"id": "e", "conversations": []},
    {"id": "f", "conversations": [{"from": "human", "value": "half \ud83d of a pair"}, {"from": "gpt", "value": "bab"}]},
    {"id": "g", "conversations": [{"from": "human", "value": "bab"}, {"from": "gpt", "value": "\udc00"}]},
    {"id": "h"},
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    return word_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Options that make each workload small; the loads A to F have their own sizes."""
    directory = tmp_path_factory.mktemp("files")
    (directory / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    (directory / "chats.json").write_text(json.dumps(CHATS))
    short = {"min_first_len": 20, "max_first_len": 30, "min_turn_len": 5, "max_turn_len": 9, "num_chats": 6}
    return {
        "random": {"num_prompts": 20, "input_len": 40, "range_ratio": 0.5},
        "shared-prefix": {"num_groups": 4, "system_prompt_len": 50, "question_len": 7, "num_turns": 3, "group_distribution": "zipf"},
        "perturbed": {"document_len": 60, "question_len": 5},
        "few-shot": {"header_len": 40, "question_len": 6},
        "hellaswag": {"header_len": 40, "question_len": 6, "ending_len": 3},
        "generative-agents": {"persona_len": 20, "line_len": 3, "task_len": 30, "own_len": 6},
        "react": {"template_len": 60, "question_len": 5, "round_len": 9, "output_len": 4},
        "tree-of-thought": {"question_len": 10, "step_len": 3, "output_len": 8, "num_questions": 2},
        "skeleton-of-thought": {"header_len": 9, "expand_header_len": 30, "question_len": 5, "expand_output_len": 6},
        "llm-judge": {"header_len": 10, "article_len": 50, "dimension_len": 4, "output_len": 12},
        "multi-turn-short": short,
        "multi-turn-long": short | {"min_output_len": 10, "max_output_len": 20},
        "rag": {"header_len": 30, "passage_len": 8, "num_passages": 5},
        "trace": {"path": str(directory / "trace.jsonl"), "block_len": 64, "time_scale": 0.5, "output_scale": 0.1},
        "sharegpt": {"path": str(directory / "chats.json"), "max_len": 200},
    }


def answers_in_words(workload: Workload) -> dict[str, Ids]:
    """Answers as long as asked for, no two alike from their start."""
    ids = workload.words.ids
    return {
        request.id: [ids[index % len(ids)], ids[index // len(ids)], *[ids[-1]] * request.output_len][: request.output_len]
        for index, request in enumerate(workload.requests)
    }


def replay(workload: Workload) -> list[int]:
    """Cached tokens of each request in a real tree with room for all, one request after the other."""
    num_tokens = workload.prompt_tokens + sum(request.output_len for request in workload.requests)
    cache = PrefixCache(num_tokens)
    answers: dict[str, Ids] = {}
    cached = []
    for index, request in enumerate(workload.requests):
        prompt = array("i", request.prompt(answers))
        match = cache.match(BASE_NAMESPACE, prompt, len(prompt) - 1)
        cached.append(match.num_tokens)
        path = cache.lock(match, index)
        answers[request.id] = [10**6 + index] * request.output_len
        tokens = prompt + array("i", answers[request.id])
        cache.reserve(path, len(tokens) - 1, index)
        # a chunk is published as soon as it is computed, and the last sampled token never is
        cache.commit(path, tokens, len(prompt), index)
        cache.release(path, tokens, len(tokens) - 1, index)
    cache.check_account([])
    return cached


@pytest.mark.parametrize("name", WORKLOADS)
def test_ideal_hits_are_those_of_a_real_tree(name: str, words: Words, small: dict[str, dict[str, Any]]) -> None:
    workload = make_workload(name, words, 3, **small.get(name, {}))
    assert replay(workload) == list(workload.ideal_cached_lens)
    assert workload.ideal_hit_rate == sum(workload.ideal_cached_lens) / sum(workload.prompt_lens)
    assert 0 <= workload.ideal_hit_rate < 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_text_has_the_same_tokens(name: str, words: Words, small: dict[str, dict[str, Any]]) -> None:
    """Of the whole prompt, with answers in it, and of its parts one by one."""
    workload = make_workload(name, words, 3, **small.get(name, {}))
    answers = answers_in_words(workload)
    for request, prompt_len in zip(workload.requests, workload.prompt_lens):
        prompt = request.prompt(answers)
        assert len(prompt) == prompt_len
        assert words.encode(words.text(prompt)) == prompt
        parts = [answers[part.request_id] if isinstance(part, AnswerOf) else part for part in request.parts]
        assert words.encode("".join(map(words.text, parts))) == prompt


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_by_seed_and_new_by_another(name: str, words: Words, small: dict[str, dict[str, Any]]) -> None:
    workload, other = (make_workload(name, words, seed, **small.get(name, {})) for seed in (1, 2))
    assert make_workload(name, words, 1, **small.get(name, {})) == workload
    assert workload.name == name and workload.description.endswith(".")
    assert len({request.id for request in workload.requests}) == workload.num_requests
    if name not in ("sharegpt", "perturbed"):  # a file's words are the file's, and a changed line begins as it does
        answers = {request.id: [words.ids[0]] for request in (*workload.requests, *other.requests)}
        for one in workload.requests[:20]:
            assert all(one.prompt(answers)[:8] != two.prompt(answers)[:8] for two in other.requests[:20])


# name: prompts, prompt lengths, output lengths, concurrency, prompt tokens, ideal hits
LOADS = {
    "A": (64, {1088}, {32}, 8, 64 * 1088, 8 * 7 * 1024),
    "B": (32, {512}, {64}, 8, 32 * 512, 0),
    "C": (16, {64}, {256}, 16, 16 * 64, 0),
    "D": (40, {512, 640, 768, 896, 1024}, {64}, 8, 8 * (512 + 640 + 768 + 896 + 1024), 8 * (575 + 703 + 831 + 959)),
    "E": (1, {512}, {128}, 1, 512, 0),
    "F": (16, {7032}, {32}, 8, 16 * 7032, 15 * 7000),
}


@pytest.mark.parametrize("name", LOAD_NAMES)
def test_sizes_of_the_loads(name: str, words: Words) -> None:
    load = make_workload(name, words, seed=3)
    prompts, prompt_lens, output_lens, concurrency, prompt_tokens, hits = LOADS[name]
    assert (load.num_requests, set(load.prompt_lens)) == (prompts, prompt_lens)
    assert {request.output_len for request in load.requests} == output_lens
    assert (load.concurrency, load.prompt_tokens, load.ideal_hit_tokens) == (concurrency, prompt_tokens, hits)
    assert load.is_staged == (name == "D")


def test_the_papers_programs_have_their_shape(words: Words) -> None:
    """Requests, and the ideal hit rates that follow from the sizes by hand."""
    few_shot = make_workload("few-shot", words, 1, num_subjects=3, questions_per_subject=20)
    assert (few_shot.num_requests, set(few_shot.prompt_lens)) == (60, {700})
    assert few_shot.ideal_hit_tokens == 3 * 19 * 600
    react = make_workload("react", words, 1, num_questions=3)
    assert set(react.prompt_lens) == {1550 + 150 * turn for turn in range(6)}
    assert react.ideal_hit_tokens == 2 * 1500 + 3 * sum(1550 + 150 * turn for turn in range(5))
    tree = make_workload("tree-of-thought", words, 1, num_questions=2)
    assert tree.num_requests == 2 * 30
    assert tree.ideal_hit_rate == pytest.approx(0.955, abs=0.005)
    judge = make_workload("llm-judge", words, 1)
    assert (judge.num_requests, max(judge.prompt_lens)) == (8 * 7, 1100 + 6 * (30 + 256) + 30)
    assert judge.ideal_hit_tokens == 7 * 100 + 8 * (5 * 1100 + 1100 + 30 + 255)
    endings = make_workload("hellaswag", words, 1, num_questions=5)
    assert (set(endings.prompt_lens), endings.ideal_hit_tokens) == ({1770}, 4 * 1700 + 5 * 3 * 1750)
    agents = make_workload("generative-agents", words, 1)
    assert [request.depends_on for request in agents.requests] == [(), *((f"call{i}",) for i in range(63))]
    assert {request.group for request in agents.requests} == {"persona first", "short header", "long header"}
    skeleton = make_workload("skeleton-of-thought", words, 1, num_questions=2)
    assert {request.group for request in skeleton.requests} == {"points", "expansions"}
    assert all(len(request.depends_on) == 1 for request in skeleton.requests if request.group == "expansions")
    assert make_workload("multi-turn-short", words, 1).ideal_hit_rate == pytest.approx(0.60, abs=0.02)
    assert make_workload("multi-turn-long", words, 1).ideal_hit_rate == pytest.approx(0.75, abs=0.02)
    rag = make_workload("rag", words, 1, num_questions=10)
    assert (set(rag.prompt_lens), rag.ideal_hit_tokens >= 9 * 600) == ({600 + 3 * 120 + 20}, True)


@pytest.mark.parametrize("shared_len", [0, 1, 39, 40])
def test_overlap_is_what_was_asked_for(shared_len: int, words: Words) -> None:
    """BENCH-02: random tails share nothing by chance, and as much of the prompt is shared as was said."""
    options = {"num_groups": 3, "prompts_per_group": 20, "system_prompt_len": shared_len, "question_len": 41 - shared_len}
    load = make_workload("shared-prefix", words, 1, **options)
    assert set(load.prompt_lens) == {41}
    by_group: dict[str, list[Ids]] = {}
    for request in load.requests:
        by_group.setdefault(request.group, []).append(request.prompt({}))
    for prompts in by_group.values():
        assert len({tuple(prompt[:shared_len]) for prompt in prompts}) == 1
        assert len({prompt[shared_len] for prompt in prompts}) == 20
    if shared_len:
        assert load.ideal_hit_tokens == 3 * 19 * shared_len


def test_random_prompts_share_nothing(words: Words) -> None:
    load = make_workload("random", words, 1, num_prompts=300, input_len=50)
    assert load.ideal_hit_tokens == 0
    assert set(load.prompt_lens) == {50}


def test_knobs_of_shared_prefix(words: Words) -> None:
    def make(**options: object) -> Workload:
        return make_workload("shared-prefix", words, 1, system_prompt_len=20, question_len=10, **options)

    ordered = [request.group for request in make(ordered=True).requests]
    assert ordered == sorted(ordered) and [request.group for request in make().requests] != ordered
    zipf = [request.group for request in make(group_distribution="zipf", zipf_alpha=2.0, prompts_per_group=40).requests]
    counts = [zipf.count(f"g{rank}") for rank in range(8)]
    assert sum(counts) == 320 and counts[0] > 2 * counts[1] > 2 * counts[3] > 0
    turns = make(num_turns=3, num_groups=2, prompts_per_group=2)
    assert turns.num_requests == 12
    assert [request.turn for request in turns.requests] == [0, 1, 2] * 4
    assert turns.requests[2].depends_on == (turns.requests[0].id, turns.requests[1].id)
    assert set(turns.prompt_lens) == {30, 30 + 32 + 10, 72 + 32 + 10}
    assert {request.routing_key for request in make(send_routing_key=True).requests} == {f"g{rank}" for rank in range(8)}
    lens = make(range_ratio=0.5, prompts_per_group=30).prompt_lens
    assert 15 <= min(lens) < max(lens) <= 30


def test_a_change_in_front_costs_the_hits_and_at_the_end_it_does_not(words: Words) -> None:
    load = make_workload("perturbed", words, 1, document_len=400)
    rates = load.ideal_by_group
    assert len(rates) == 14
    for group, rate in rates.items():
        if group.endswith("/front"):
            assert rate < 0.05, group
        else:
            tokens = [prompt_len for request, prompt_len in zip(load.requests, load.prompt_lens) if request.group == group]
            assert len(set(tokens)) == 1
            assert 7 * 400 <= rate * sum(tokens) <= 7 * 400 + 0.05 * sum(tokens), group
    for change in {group.partition("/")[0] for group in rates}:
        lens = {prompt_len for request, prompt_len in zip(load.requests, load.prompt_lens) if request.group.startswith(f"{change}/")}
        assert len(lens) == 1, "front and end differ in the place of the change alone"


def test_a_trace_keeps_its_times_lengths_and_blocks(words: Words, small: dict[str, dict[str, Any]]) -> None:
    load = make_workload("trace", words, 1, **small["trace"])
    assert [request.arrival_s for request in load.requests] == [0.0, 0.25, 1.0, 1.0]
    assert [request.output_len for request in load.requests] == [1, 1, 10, 1]
    assert load.prompt_lens == (163, 128, 75, 192)
    assert load.ideal_cached_lens == (0, 127, 64, 163)
    full = make_workload("trace", words, 1, path=small["trace"]["path"], num_requests=2)
    assert full.prompt_lens == (1300, 1024)
    assert [request.output_len for request in full.requests] == [10, 3]


def test_conversations_of_a_file(words: Words, small: dict[str, dict[str, Any]]) -> None:
    load = make_workload("sharegpt", words, 1, **small["sharegpt"])
    assert load.num_requests == 4, "three turns and one; what is too long, or no pair, is left out"
    three = [request for request in load.requests if ".t" in request.id]
    assert [request.output_len for request in three] == [2, 2, 2]
    assert [words.text(part) for part in three[2].parts if not isinstance(part, AnswerOf)] == ["bab beb\n"] + ["\nbab beb\n"] * 2
    assert make_workload("sharegpt", words, 1, path=small["sharegpt"]["path"], max_turns=1, output_len=9).num_requests == 4


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"conversations": [{"from": "human", "value": 3}]}], "chats.json, entry 0: expected conversations of .*got .*3"),
        ([{"conversations": [{"from": "human"}]}], "chats.json, entry 0: expected conversations of .*got .*human"),
        ([{"conversations": [{"value": "x"}]}], "chats.json, entry 0: expected conversations of .*got .*value"),
        ([{"conversations": ["x"]}], "chats.json, entry 0: expected conversations of .*got .*x"),
        ([{"conversations": [{"from": "human", "value": None}]}], "expected a conversation of at most 2048 tokens, got none"),
        ([{"conversations": []}, {"conversations": None}], "chats.json, entry 1: expected conversations of .*got None"),
        ([{"messages": []}], "expected objects with conversations, got one of messages"),
        ({"a": 1}, "expected a list of objects, got dict"),
        ([], "expected a conversation of at most 2048 tokens, got none"),
    ],
)
def test_files_that_hold_no_conversations(entries: Any, message: str, words: Words, tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=message):
        make_workload("sharegpt", words, 1, path=str(tmp_path / "chats.json"))


def turns(text: str) -> list[dict[str, str | None]]:
    """Turns as a file has them: "human a" for one of a person that says a; "-" for null."""
    return [{"from": who, "value": None if said == "-" else said} for who, _, said in (one.partition(" ") for one in text.split(", "))]


@pytest.mark.parametrize(
    ("entry", "pairs"),
    [
        ({"conversations": turns("human bab, gpt beb, human bib, gpt bob")}, ["bab", "bib"]),
        ({"conversations": turns("user bab, assistant beb, user bib, assistant bob")}, ["bab", "bib"]),
        ({"conversation": [{"role": "user", "content": "bab"}, {"role": "assistant", "content": "beb"}]}, ["bab"]),
        ({"id": "x_2", "conversations": turns("gpt bab, human beb, chatgpt bib")}, ["beb"]),
        ({"conversations": turns("system bob, human bab, gpt beb, human bib, gpt bab")}, ["bob\nbab", "bib"]),
        ({"conversations": turns("system -, human bab, gpt beb")}, ["bab"]),
        ({"conversations": turns("system bob, gpt bib, human bab, gpt beb")}, ["bob\nbab"]),
        ({"conversations": turns("human bab, gpt beb, human bib")}, ["bab"]),
        ({"conversations": turns("human bab, gpt beb, human -, gpt bob")}, ["bab"]),
        ({"conversations": turns("human bab, gpt beb, human bib, gpt  ")}, ["bab"]),
        ({"conversations": turns("human bab, gpt beb, human bib, human bob, gpt bab")}, ["bab"]),
        ({"conversations": turns("human bab, gpt beb, human bib, function_call bob, observation beb, gpt bab")}, ["bab"]),
        ({"conversations": turns("human bab, gpt beb, system bob, human bib, gpt bab")}, ["bab"]),
        ({"conversations": [{"from": "human", "value": "bab", "markdown": None}, {"from": "GPT", "value": "beb"}]}, ["bab"]),
        ({"conversations": []}, []),
        ({"conversations": turns("gpt bab")}, []),
        ({"conversations": turns("gpt bab, gpt beb, human bib, gpt bob")}, []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_lines", [False, True])
def test_what_conversations_of_files_are(entry: Any, pairs: list[str], is_lines: bool, words: Words, tmp_path: Path) -> None:
    path, good = tmp_path / "chats.json", {"conversations": turns("human dab, gpt dab")}
    path.write_text("\n\n".join(map(json.dumps, (entry, good))) if is_lines else json.dumps([entry, good]))
    load = make_workload("sharegpt", words, 1, path=str(path))
    questions = [words.text(request.parts[-1]).strip() for request in load.requests]
    assert [one for one in questions if one != "dab"] == pairs
    assert len(questions) == len(pairs) + 1


def test_questions_alone_are_asked_where_the_length_of_an_answer_is_given(words: Words, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"conversations": turns("human bab, gpt ")}, {"conversations": turns("human beb, gpt bib, human bob")}]))
    questions = {
        output_len: sorted(
            words.text(request.parts[-1]).strip()
            for request in make_workload("sharegpt", words, 1, path=str(path), output_len=output_len).requests
        )
        for output_len in (0, 3)
    }
    assert questions == {0: ["beb"], 3: ["bab", "beb", "bob"]}


def test_no_more_conversations_are_read_than_asked_for(small: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """A file of 90,000 is not tokenized for 32."""

    class Counting(WholeWords):
        num_encoded = 0

        def encode(self, text: str) -> list[int]:
            self.num_encoded += 1
            return super().encode(text)

    words = Counting()
    chat = {"conversations": [{"from": "human", "value": " w100 w101"}, {"from": "gpt", "value": " w102"}]}
    (tmp_path / "chats.json").write_text(json.dumps([chat] * 1000))
    assert make_workload("sharegpt", words, 1, path=str(tmp_path / "chats.json"), num_chats=2).num_requests == 2
    assert words.num_encoded < 20


def test_ideal_of_a_few_prompts() -> None:
    """The second goes on from the first's answer of three tokens, of which two were computed; the third is the first; the fourth is new."""
    assert ideal_cached_lens([[1, 2], [1, 2, -1, -1, -1, 7], [1, 2], [9]], [2, 0, 5, 1]) == [0, 4, 1, 0]


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("G", {}, "expected one of A, B, C, D, E, F, random, .*, got 'G'"),
    ("random", {"question_len": 1}, "expected an option of num_prompts, .*, got 'question_len'"),
    ("shared-prefix", {"question_len": 0}, "question_len: expected at least 1, got 0"),
    ("shared-prefix", {"system_prompt_len": -1}, "system_prompt_len: expected at least 0, got -1"),
    ("shared-prefix", {"num_groups": 1.5}, "num_groups: expected int, got 1.5"),
    ("shared-prefix", {"ordered": 1}, "ordered: expected bool, got 1"),
    ("shared-prefix", {"range_ratio": 2}, "range_ratio: expected at most 1.0, got 2.0"),
    ("shared-prefix", {"group_distribution": "normal"}, "expected one of uniform, zipf, got 'normal'"),
    ("shared-prefix", {"num_groups": 1000, "prompts_per_group": 1}, "more distinct words"),
    ("perturbed", {"changes": "timestamp,weather"}, "expected timestamp, .*, got 'weather'"),
    ("rag", {"num_passages": 2}, "passages_per_question: expected at most 2, got 3"),
    ("shared-prefix", {"range_ratio": float("nan")}, "range_ratio: expected a finite number, got nan"),
    ("trace", {"path": "x", "time_scale": float("inf")}, "time_scale: expected a finite number, got inf"),
    ("trace", {}, "path: expected a file, got ''"),
    ("sharegpt", {"path": "/nowhere"}, "path: expected a file, got '/nowhere'"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str, options: dict[str, object], message: str, words: Words) -> None:
    with pytest.raises(ValueError, match=message):
        make_workload(name, words, 1, **options)


def test_requests_come_after_what_they_depend_on(words: Words) -> None:
    one, two = WorkloadRequest("a", ([1],), 1, "g"), WorkloadRequest("b", ([1], AnswerOf("a")), 1, "g", after=("a",))
    assert two.depends_on == ("a",)
    assert Workload.of("x", "", [one, two], words).prompt_lens == (1, 2)
    for requests, message in (([two, one], "expected to come after a"), ([one, one], "got it twice"), ([], "at least one request")):
        with pytest.raises(ValueError, match=message):
            Workload.of("x", "", requests, words)


def test_options_of_the_command_line() -> None:
    assert [parse_option(text) for text in ("a=1", "b=0.5", "c=true", "d=zipf", "e=x=y")] == [
        ("a", 1),
        ("b", 0.5),
        ("c", True),
        ("d", "zipf"),
        ("e", "x=y"),
    ]
    with pytest.raises(ValueError, match="expected name=value, got 'a'"):
        parse_option("a")


def test_warm_up_is_new_each_time(words: Words) -> None:
    assert warm_up(words, 1).requests != warm_up(words, 2).requests
    assert warm_up(words, 1).ideal_hit_tokens == 0
