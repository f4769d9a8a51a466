"""ModelRunner driven by hand-made batches: chunks, sharing, overwritten tables, slots, and what it refuses."""

import math
import random
from array import array

import pytest
import torch

from radixserve.attention import make_attention_backend
from radixserve.core import PageWrite, Request, SamplingParams, ScheduledBatch, ScheduledRow
from radixserve.kv import KVPool, PageTable
from radixserve.runner import ModelRunner
from tests.support.stepping import Running, Stepper
from tests.support.tiny_decoder import TINY_LLAMA, tiny_decoder

NUM_TOKENS = 512
VOCAB_SIZE: int = TINY_LLAMA["vocab_size"]
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])


def make_stepper(page_size: int, num_slots: int = 8, vocab_size: int = VOCAB_SIZE) -> Stepper:
    """Over a pool full of NaN: whatever is read before it was written shows."""
    decoder = tiny_decoder()
    config = decoder.config
    pool = KVPool(config.num_layers, NUM_TOKENS // page_size, page_size, config.num_kv_heads, config.head_dim, torch.float32)
    for layer in range(config.num_layers):
        pool.k(layer).fill_(math.nan)
        pool.v(layer).fill_(math.nan)
    table = PageTable(num_slots, 256 // page_size, page_size)
    runner = ModelRunner(decoder, pool, table, make_attention_backend("auto", pool, config.num_heads), vocab_size)
    return Stepper(runner, pool.num_pages, page_size)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def alone(prompt_ids: list[int], num_tokens: int, **settings: object) -> list[int]:
    """The same request in an engine of its own, prefilled whole."""
    return make_stepper(4).generate(Running(0, prompt_ids, **settings), num_tokens)  # type: ignore[arg-type]


def test_outputs_depend_on_the_whole_prompt() -> None:
    # else the tests below could not fail
    base = prompt(40)
    outputs = {tuple(alone(base, 12))}
    for place in (0, 13, 39):
        changed = list(base)
        changed[place] = (changed[place] + 1) % VOCAB_SIZE
        outputs.add(tuple(alone(changed, 12)))
    outputs.add(tuple(alone(base[1:], 12)))
    assert len(outputs) == 5


@PAGE_SIZES
@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_chunks_change_nothing(page_size: int, chunk: int) -> None:
    ids = prompt(61)
    assert make_stepper(page_size).generate(Running(2, ids), 12, chunk) == alone(ids, 12)


@PAGE_SIZES
def test_company_and_random_chunks_change_nothing(page_size: int) -> None:
    rng = random.Random(page_size)
    stepper = make_stepper(page_size)
    waiting = [Running(slot, prompt(rng.choice([1, 2, 17, 33, 47]), seed=slot)) for slot in range(7)]
    running: list[Running] = []
    while waiting or any(len(r.output_ids) < 10 for r in running):
        if waiting and rng.random() < 0.5:
            running.append(waiting.pop())
        work = [(r, min(rng.randint(1, 20), len(r.prompt_ids) - r.num_computed)) for r in running if len(r.output_ids) < 10]
        if work:
            stepper.execute(work)
    for r in running:
        assert r.output_ids == alone(r.prompt_ids, 10), r.slot


@PAGE_SIZES
def test_two_slots_share_prefix_pages(page_size: int) -> None:
    stepper = make_stepper(page_size)
    common = prompt(32)
    first, second = Running(0, common + prompt(9, seed=1)), Running(5, common + prompt(14, seed=2))
    stepper.execute([(first, 41)])
    second.share(first, 32 // page_size, page_size)
    stepper.execute([(second, 14), (first, 0)])
    for _ in range(8):
        stepper.execute([(first, 0), (second, 0)])
    assert first.output_ids == alone(first.prompt_ids, 10)
    assert second.output_ids == alone(second.prompt_ids, 9)


@PAGE_SIZES
def test_a_page_table_may_be_overwritten_by_pages_with_the_same_content(page_size: int) -> None:
    """Two requests compute one prefix; the tree keeps the first's pages, and the second's table moves over to them mid-decode."""
    stepper = make_stepper(page_size)
    common = prompt(32)
    first, second = Running(0, [*common, 1]), Running(1, [*common, 2, 3])
    stepper.execute([(first, 33), (second, 34)])
    stepper.execute([(first, 0), (second, 0)])
    num_shared = 32 // page_size
    dropped, kept = second.pages[:num_shared], first.pages[:num_shared]
    assert not set(dropped) & set(kept)
    second.pages[:num_shared] = kept
    second.pending_writes.append(PageWrite(0, array("i", kept)))
    poison(stepper, dropped)  # a read through the old entries would show
    for _ in range(8):
        stepper.execute([(first, 0), (second, 0)])
    assert second.output_ids == alone(second.prompt_ids, 10)


def poison(stepper: Stepper, pages: list[int]) -> None:
    pool = stepper.runner._pool
    for layer in range(pool.num_layers):
        pool.k(layer)[pages] = math.nan
        pool.v(layer)[pages] = math.nan


@PAGE_SIZES
def test_pages_of_a_fragmented_pool_are_reached_through_the_table(page_size: int) -> None:
    """TREE-25: after every second page was freed, a long prompt lies scattered; slots are never taken to be consecutive."""
    stepper = make_stepper(page_size)
    stepper.free_pages = list(range(2, stepper.runner._pool.num_pages + 1, 2))
    ids = prompt(120)
    r = Running(3, ids)
    assert stepper.generate(r, 30, chunk=50) == alone(ids, 30)
    assert all(page % 2 == 0 for page in r.pages)
    odd = stepper.runner._pool.k(0)[1::2]
    assert odd.isnan().all()


def test_start_below_what_is_held_truncates() -> None:
    """Forced tokens from an earlier position on: what was computed behind it is overwritten."""
    stepper = make_stepper(4)
    r = Running(0, prompt(20))
    stepper.generate(r, 8)
    r.prompt_ids = [*r.prompt_ids[:11], 5, 6, 7]
    r.num_computed, r.output_ids = 11, []
    assert stepper.generate(r, 8) == alone(r.prompt_ids, 8)


def test_a_freed_slot_takes_a_new_request() -> None:
    stepper = make_stepper(1)
    sampled = SamplingParams(temperature=1.5)
    stepper.generate(Running(1, prompt(10), sampled, seed=9), 3)
    again = Running(1, prompt(12, seed=4))
    stepper.execute([(again, 12)], freed_slots=(1,))
    assert stepper.generate(again, 6) == alone(prompt(12, seed=4), 6)


def test_a_freed_slot_keeps_no_pages() -> None:
    stepper = make_stepper(1)
    stepper.generate(Running(1, prompt(10)), 3)
    row = ScheduledRow(1, 2, 1, array("i", [4]), request=REQUEST)
    with pytest.raises(AssertionError, match=r"row 0 reads tokens 0\.\.3 of slot 1, but its page 0 was never written"):
        stepper.runner.execute(ScheduledBatch(9, (row,), freed_slots=(1,)))


def test_a_batch_that_only_frees_slots_has_an_empty_answer() -> None:
    stepper = make_stepper(1)
    stepper.generate(Running(1, prompt(3)), 2)
    output = stepper.runner.execute(ScheduledBatch(77, (), freed_slots=(1,)))
    assert (output.step, output.token_ids) == (77, ())


def test_a_step_of_unfinished_chunks_samples_nothing() -> None:
    stepper = make_stepper(4)
    output = stepper.execute([(Running(0, prompt(20)), 8), (Running(1, prompt(9)), 3)])
    assert output.token_ids == (-1, -1)
    assert output.times.forward_s > 0
    assert output.times.plan_s > 0


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01)])
def test_a_seed_gives_the_same_tokens_in_any_company(sampling: SamplingParams) -> None:
    target = prompt(30)
    expected = alone(target, 12, sampling=sampling, seed=2**64 - 3, choice_index=1)
    assert alone(target, 12, sampling=sampling, seed=5, choice_index=1) != expected
    assert alone(target, 12, sampling=sampling, seed=2**64 - 3, choice_index=0) != expected
    stepper = make_stepper(16)
    r = Running(6, target, sampling, seed=2**64 - 3, choice_index=1)
    others = [Running(slot, prompt(5, seed=slot), SamplingParams(temperature=slot / 2), seed=slot) for slot in range(4)]
    stepper.execute([(other, 5) for other in others])
    stepper.execute([(r, 11), *((other, 0) for other in others[:2])])
    stepper.execute([(r, 19), *((other, 0) for other in others)])
    while len(r.output_ids) < 12:
        stepper.execute([(r, 0), *((other, 0) for other in others)])
    assert r.output_ids == expected


def test_a_retracted_request_goes_on_with_its_own_draws() -> None:
    """SCHED-01's runner half: the slot is freed mid-output; prompt + output so far come back as a prompt, with output_index going on."""
    sampling = SamplingParams(temperature=1.0)
    expected = alone(prompt(20), 12, sampling=sampling, seed=3)
    stepper = make_stepper(4)
    r = Running(0, prompt(20), sampling, seed=3)
    stepper.generate(r, 5)
    resumed = Running(2, r.prompt_ids + r.output_ids, sampling, seed=3, output_ids=list(r.output_ids))
    stepper.execute([(resumed, 25)], freed_slots=(0,))
    assert stepper.generate(resumed, 12) == expected


def test_ids_beyond_the_vocabulary_are_never_drawn() -> None:
    """A head may be padded beyond the tokenizer's vocabulary."""
    ids = [7, 3]
    assert max(make_stepper(1).generate(Running(0, ids, SamplingParams(temperature=100.0), seed=1), 60)) > 10
    stepper = make_stepper(1, vocab_size=10)
    assert max(stepper.generate(Running(0, ids, SamplingParams(temperature=100.0), seed=1), 60)) < 10


REQUEST = Request("r", array("i", [1, 2]), SamplingParams(temperature=0.0))
PAGES = (PageWrite(0, array("i", [1, 2])),)


def asking(**settings: object) -> Request:
    return Request("r", array("i", [1, 2]), SamplingParams(temperature=0.0, **settings))  # type: ignore[arg-type]


def targets(first: int, *ids: int, request: Request = asking(prompt_logprobs=0)) -> ScheduledRow:  # noqa: B008
    return ScheduledRow(0, 0, 2, array("i", [1, 2]), PAGES, request=request, target_ids=array("i", ids), target_start=first)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ScheduledRow(0, 0, 3, array("i", [1, 2]), PAGES, request=REQUEST)], r"expected count == len\(token_ids\) == 2, got 3"),
        ([ScheduledRow(0, 0, 2, array("i", [1, 97]), PAGES, request=REQUEST)], r"token ids in 0\.\.96, got 1\.\.97"),
        ([ScheduledRow(0, 0, 2, array("i", [1, 2]), PAGES)], "slot 0: expected a request at first sight"),
        ([targets(0, 1, 2, 3)], r"expected targets inside of 0\.\.2, got 0\.\.3"),
        ([targets(1, 1, 2)], r"expected targets inside of 0\.\.2, got 1\.\.3"),
        ([targets(-1, 1, 1)], r"expected targets inside of 0\.\.2, got -1\.\.1"),
        ([targets(1, 97)], r"expected target ids in 0\.\.96, got 97\.\.97"),
        ([targets(1, 5, request=REQUEST)], "slot 0: expected targets only where prompt_logprobs is set, got 1"),
        ([targets(1, request=asking(logit_bias=((97, 1.0),)))], r"expected logit_bias ids in 0\.\.96, got 97\.\.97"),
        ([ScheduledRow(0, 0, 2, array("i", [1, 2]), PAGES, adapter_id=1, request=REQUEST)], "no adapters, got adapter_id 1"),
        ([ScheduledRow(0, 1, 1, array("i"), PAGES, request=REQUEST)], "decode row before any token was sampled"),
        (
            [ScheduledRow(0, 0, 2, array("i", [1, 2]), (PageWrite(0, array("i", [513])),), request=REQUEST)],
            r"page ids in 1\.\.512, got 513",
        ),
        ([ScheduledRow(0, 0, 2, array("i", [1, 2]), (), request=REQUEST)], "page 0 was never written"),
        ([ScheduledRow(0, 0, 2, array("i", [1, 2]), PAGES, request=REQUEST)] * 2, "row 1 .* one row per slot"),
        (
            [ScheduledRow(0, 0, 2, array("i", [1, 2]), PAGES, request=REQUEST), ScheduledRow(1, 0, 1, array("i"), PAGES)],
            "row 1 .* decode rows before all others",
        ),
    ],
)
def test_broken_batches_are_refused(rows: list[ScheduledRow], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make_stepper(1).runner.execute(ScheduledBatch(0, tuple(rows)))


def test_a_slot_is_not_given_away_before_it_was_freed() -> None:
    stepper = make_stepper(1)
    stepper.generate(Running(0, prompt(3)), 2)
    with pytest.raises(AssertionError, match="slot 0 was given to request 'slot-0' before it was freed"):
        stepper.execute([(Running(0, prompt(4)), 4)])
