"""The loads of bench/: sizes as promised, equal by seed, and the closed forms of ideal re-use against a naive replay."""

import random

import pytest

from bench.workloads import LOAD_NAMES, SharedPrefix, Workload, make_load, shared_prefix, warm_up

WORD_IDS = list(range(1000, 7000))

# name: conversations, prompt lengths of the first request, turns, output, concurrency, prompt tokens of the whole load
EXPECTED = {
    "A": (64, 1024 + 64, 1, 32, 8, 64 * 1088),
    "B": (32, 512, 1, 64, 8, 32 * 512),
    "C": (16, 64, 1, 256, 16, 16 * 64),
    "D": (8, 512, 5, 64, 8, 8 * (512 + 640 + 768 + 896 + 1024)),
    "E": (1, 512, 1, 128, 1, 512),
    "F": (16, 7000 + 32, 1, 32, 8, 16 * 7032),
}


@pytest.mark.parametrize("name", LOAD_NAMES)
def test_sizes(name: str) -> None:
    num_conversations, first_len, num_turns, output_len, concurrency, prompt_tokens = EXPECTED[name]
    load = make_load(name, WORD_IDS, seed=3)
    assert load.name == name
    assert len(load.conversations) == num_conversations
    assert {len(conversation.turns[0]) for conversation in load.conversations} == {first_len}
    assert {len(conversation.turns) for conversation in load.conversations} == {num_turns}
    assert {len(turn) for conversation in load.conversations for turn in conversation.turns[1:]} <= {64}
    assert (load.output_len, load.concurrency, load.prompt_tokens) == (output_len, concurrency, prompt_tokens)
    assert load.num_requests == num_conversations * num_turns
    assert load.is_multi_turn == (num_turns > 1)
    assert {token for conversation in load.conversations for turn in conversation.turns for token in turn} <= set(WORD_IDS)


@pytest.mark.parametrize("name", LOAD_NAMES)
def test_equal_by_seed_and_new_by_another(name: str) -> None:
    load = make_load(name, WORD_IDS, seed=1)
    assert make_load(name, WORD_IDS, seed=1) == load
    other = make_load(name, WORD_IDS, seed=2)
    assert all(one.turns[0] != two.turns[0] for one in load.conversations for two in other.conversations)


def naive_hits(load: Workload, seed: int) -> int:
    """Replay one request after another against the set of all prefixes ever computed (each kept as the hash of its chain)."""
    known: set[int] = set()
    rng = random.Random(seed)

    def chain(ids: list[int]) -> list[int]:
        links, link = [], 0
        for token in ids:
            link = hash((link, token))
            links.append(link)
        return links

    hits = 0
    for conversation in load.conversations:
        history: list[int] = []
        for turn in conversation.turns:
            history += turn
            links = chain(history)
            matched = next((i for i, link in enumerate(links) if link not in known), len(links))
            hits += min(matched, len(history) - 1)
            history += [rng.randrange(100) for _ in range(load.output_len)]
            known.update(chain(history[:-1]))
    return hits


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", LOAD_NAMES)
def test_ideal_hits_are_those_of_a_naive_replay(name: str, seed: int) -> None:
    load = make_load(name, WORD_IDS, seed)
    assert naive_hits(load, seed) == load.ideal_hit_tokens


SHAPES = [
    SharedPrefix(num_groups=3, prompts_per_group=5, system_prompt_len=17, question_len=4, output_len=3, concurrency=2),
    SharedPrefix(num_groups=1, prompts_per_group=1, system_prompt_len=9, question_len=1, output_len=1, concurrency=1),
    SharedPrefix(num_groups=5, prompts_per_group=2, system_prompt_len=1, question_len=30, output_len=2, concurrency=4),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(10))
def test_shared_prefix_with_free_parameters(shape: SharedPrefix, seed: int) -> None:
    """A vocabulary of few words would share beginnings by chance, if the draws allowed it."""
    load = shared_prefix(range(200, 212), seed, shape)
    assert load.num_requests == shape.num_groups * shape.prompts_per_group
    assert load.prompt_tokens == load.num_requests * (shape.system_prompt_len + shape.question_len)
    assert load.ideal_hit_tokens == shape.num_groups * (shape.prompts_per_group - 1) * shape.system_prompt_len
    assert naive_hits(load, seed) == load.ideal_hit_tokens


def test_groups_are_shuffled() -> None:
    load = make_load("A", WORD_IDS, seed=1)
    beginnings = [conversation.turns[0][0] for conversation in load.conversations]
    assert len(set(beginnings)) == 8
    assert any(one != two for one, two in zip(beginnings[:8], [beginnings[0]] * 8))


def test_too_few_words_are_refused() -> None:
    with pytest.raises(ValueError, match="more distinct words"):
        shared_prefix([7, 8, 9], 1, SharedPrefix(num_groups=4, prompts_per_group=1))


def test_bad_names_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of A, B, C, D, E, F, got 'G'"):
        make_load("G", WORD_IDS, 1)
    with pytest.raises(ValueError, match="question_len: expected at least 1, got 0"):
        SharedPrefix(question_len=0)
    with pytest.raises(ValueError, match="system_prompt_len: expected at least 0, got -1"):
        SharedPrefix(system_prompt_len=-1)


def test_warm_up_is_new_each_time() -> None:
    assert warm_up(WORD_IDS, 1).conversations != warm_up(WORD_IDS, 2).conversations
    assert warm_up(WORD_IDS, 1).ideal_hit_tokens == 0
