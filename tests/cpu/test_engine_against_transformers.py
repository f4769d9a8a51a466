"""Greedy token ids of the whole engine equal transformers' in float32: page sizes, tree on and off, batches, chunks. Hit equals miss."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from radixserve import LLM, SamplingParams
from radixserve.engine.llm import Completion

NUM_OUTPUT = 32
NUM_PROMPTS = 40
NEAR_TIE = 1e-4  # the oracle's two best logits may be so close that float32 rounding decides
TINY_MODELS = [(family, tie) for family in ("llama", "qwen2", "qwen3") for tie in (True, False)]


def make_prompts(vocab_size: int, seed: int, max_random_len: int) -> list[list[int]]:
    """1 to 1500 tokens; three in four share a beginning with others, of every length and not a multiple of any page.

    max_random_len: of those whose length is drawn; what the oracle costs is the sum of all lengths.
    """
    rng = random.Random(seed)
    document = [rng.randrange(vocab_size) for _ in range(1500)]
    lengths = (
        [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1500]
        + [rng.randrange(1, max_random_len) for _ in range(NUM_PROMPTS - 17)]
        + [1499]
    )
    prompts = []
    for number, length in enumerate(lengths):
        shared = 0 if number % 4 == 0 else rng.randrange(length)
        prompts.append(document[:shared] + [rng.randrange(vocab_size) for _ in range(length - shared)])
    prompts[-1] = prompts[15][:1499]  # a whole prompt that is a prefix of another one
    return prompts


class Oracle:
    """transformers in float32. One forward over prompt and answer gives the likeliest token after every prefix: an answer that agrees
    everywhere is, by induction, the greedy one."""

    def __init__(self, model_dir: Path, max_random_len: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.prompts = make_prompts(self._model.config.vocab_size, seed=1, max_random_len=max_random_len)
        self._verdicts: dict[tuple[int, tuple[int, ...]], list[tuple[int, float]]] = {}

    def differences(self, number: int, answer: tuple[int, ...]) -> list[tuple[int, float]]:
        """Where the answer to prompt `number` is not the likeliest token: (output index, how much likelier in logits the oracle's is)."""
        if (number, answer) not in self._verdicts:
            ids = torch.tensor([[*self.prompts[number], *answer[:-1]]])
            with torch.inference_mode():
                logits = self._model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
            behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            self._verdicts[number, answer] = [(i, float(gap)) for i, gap in enumerate(behind) if gap > 0]
        return self._verdicts[number, answer]


@cache
def oracle(model_dir: Path, max_random_len: int) -> Oracle:
    return Oracle(model_dir, max_random_len)


def run_in_batches(llm: LLM, prompts: list[list[int]], batch: int) -> list[Completion]:
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
    answers: list[Completion] = []
    for start in range(0, len(prompts), batch):
        answers += llm.generate(prompts[start : start + batch], sampling)
    llm.engine.check_idle()
    return answers


def assert_equal_up_to_near_ties(answers: list[Completion], expected: Oracle) -> None:
    num_ties = 0
    for number, answer in enumerate(answers):
        assert len(answer.token_ids) == NUM_OUTPUT
        differences = expected.differences(number, answer.token_ids)
        for index, gap in differences:
            assert gap < NEAR_TIE, (
                f"prompt {number} ({len(expected.prompts[number])} tokens): output {index} is {gap:.6f} behind the oracle's"
            )
        num_ties += bool(differences)
    assert len(answers) == NUM_PROMPTS
    assert num_ties <= 1, f"{num_ties} near-ties of {len(answers)} prompts came out differently"


def check(model_dir: Path, *, page_size: int, is_tree_on: bool, batch: int, chunk: int, max_random_len: int) -> None:
    expected = oracle(model_dir, max_random_len)
    llm = LLM(
        str(model_dir),
        dtype="float32",
        device="cpu",
        page_size=page_size,
        disable_radix_cache=not is_tree_on,
        chunked_prefill_size=chunk,
        max_running_requests=batch,
        max_total_tokens=1200 + 400 * batch,  # the longest, and less than all of them: the tree lives under eviction all the time
    )
    answers = run_in_batches(llm, expected.prompts, batch)
    assert_equal_up_to_near_ties(answers, expected)
    num_cached = sum(answer.num_cached_tokens for answer in answers)
    assert num_cached > 0 if is_tree_on else num_cached == 0


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("is_tree_on", [True, False], ids=["tree", "no-tree"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("family", "tie"), TINY_MODELS)
def test_tiny_models(tiny_model: Callable[[str, bool], Path], family: str, tie: bool, page_size: int, is_tree_on: bool, batch: int) -> None:
    check(tiny_model(family, tie), page_size=page_size, is_tree_on=is_tree_on, batch=batch, chunk=64, max_random_len=700)


@pytest.mark.parametrize(("page_size", "is_tree_on", "batch"), [(1, True, 4), (16, False, 16)])
def test_default_model(default_model_dir: Path, page_size: int, is_tree_on: bool, batch: int) -> None:
    torch.set_num_threads(2)
    check(default_model_dir, page_size=page_size, is_tree_on=is_tree_on, batch=batch, chunk=512, max_random_len=200)


def test_prompt_given_as_text_and_as_ids(tiny_model: Callable[[str, bool], Path]) -> None:
    llm = LLM(str(tiny_model("llama", True)), dtype="float32", device="cpu", max_total_tokens=256)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    by_text, by_ids = llm.generate(["the quick brown", llm.tokenizer.encode("the quick brown")], sampling)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == by_ids.text == llm.tokenizer.decode(by_text.token_ids)
