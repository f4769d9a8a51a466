"""What is re-used answers as what is computed: every prompt length, repeated prompts, sampling, and secrets side by side under eviction."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radixserve import LLM, Namespace, SamplingParams
from radixserve.errors import UnsupportedFieldError

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def tiny_llm(model_dir: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 2048}
    return LLM(str(model_dir), **(defaults | options))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_cold_then_warm_for_every_length(tiny_model: Callable[[str, bool], Path], page_size: int) -> None:
    """DET-02, DET-03, DET-07: also where the hit leaves exactly one token to compute."""
    llm = tiny_llm(tiny_model("llama", True), page_size=page_size)
    rng = random.Random(page_size)
    for length in range(1, 131):
        prompt = [rng.randrange(384) for _ in range(length)]
        (cold,), (warm,) = llm.generate([prompt], GREEDY), llm.generate([prompt], GREEDY)
        assert cold.num_cached_tokens == 0 or page_size == 1  # at page size 1 a random first token may be known
        assert warm.num_cached_tokens == (length - 1) // page_size * page_size
        assert warm.token_ids == cold.token_ids
    assert llm.engine.flush_cache()
    llm.engine.check_idle()


def test_one_prompt_twenty_times_with_and_without_the_tree(tiny_model: Callable[[str, bool], Path]) -> None:
    """DET-04: one distinct output per mode, and the same one."""
    prompt = [random.Random(1).randrange(384) for _ in range(90)]
    answers = set()
    for is_off in (False, True):
        llm = tiny_llm(tiny_model("qwen3", True), disable_radix_cache=is_off)
        answers |= {llm.generate([prompt], GREEDY)[0].token_ids for _ in range(20)}
    assert len(answers) == 1


def test_a_seed_decides_the_sample_whatever_runs_beside_it(tiny_model: Callable[[str, bool], Path]) -> None:
    """DET-05: same (seed, prompt) gives the same tokens: alone, warm, in a batch, chunked."""
    model_dir = tiny_model("llama", False)
    prompt = [random.Random(2).randrange(384) for _ in range(70)]
    sampling = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, top_k=40, seed=77, ignore_eos=True)
    llm = tiny_llm(model_dir)
    alone = llm.generate([prompt], sampling)[0].token_ids
    warm = llm.generate([prompt], sampling)[0].token_ids
    noise = [[random.Random(i).randrange(384) for _ in range(20 + i)] for i in range(7)]
    beside = llm.generate([*noise, prompt], [SamplingParams(max_tokens=9, temperature=1.5)] * 7 + [sampling])[-1].token_ids
    chunked = tiny_llm(model_dir, chunked_prefill_size=16, max_running_requests=8).generate([prompt], sampling)[0].token_ids
    assert alone == warm == beside == chunked
    other = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, top_k=40, seed=78, ignore_eos=True))
    assert other[0].token_ids != alone


def test_no_tokens_cross_a_namespace(tiny_model: Callable[[str, bool], Path]) -> None:
    llm = tiny_llm(tiny_model("llama", True))
    prompt = [random.Random(3).randrange(384) for _ in range(50)]
    spaces = [Namespace(), Namespace(cache_salt="a"), Namespace(cache_salt="b"), Namespace(extra_key="a")]
    for namespace in spaces:
        assert llm.generate([prompt], GREEDY, namespace=namespace)[0].num_cached_tokens == 0
    for namespace in spaces:
        assert llm.generate([prompt], GREEDY, namespace=namespace)[0].num_cached_tokens == 49
    with pytest.raises(UnsupportedFieldError, match="adapter"):  # no adapter is applied, so none may be named
        llm.generate([prompt], GREEDY, namespace=Namespace(adapter="a"))


def test_sixteen_secrets_side_by_side_under_eviction(default_model_dir: Path) -> None:
    """REUSE-16: each copies a marker of its own; the answer is that of the prompt alone on an empty tree, no foreign marker shows."""
    torch.set_num_threads(2)
    rules = "Copy the code of the last line. " * 4
    markers = [f"{1000 + 37 * i}-{chr(65 + i) * 3}" for i in range(16)]
    prompts = [f"{rules}\n" + f"code: {marker}\n" * 4 + "code:" for marker in markers]
    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    options: dict[str, object] = {"dtype": "float32", "device": "cpu"}
    alone_llm = LLM(str(default_model_dir), **options, max_total_tokens=1024)
    alone = []
    for prompt in prompts:
        alone += alone_llm.generate([prompt], sampling)
        assert alone_llm.engine.flush_cache()
    lengths = [answer.num_prompt_tokens for answer in alone]
    # room for about eight of the sixteen: admission waits, and what the first round left behind is evicted by the second
    llm = LLM(str(default_model_dir), **options, max_total_tokens=8 * (max(lengths) + 10), max_running_requests=16)
    for _ in range(2):
        together = llm.generate(prompts, sampling)
        for marker, answer, lonely in zip(markers, together, alone, strict=True):
            assert answer.token_ids == lonely.token_ids
            assert marker in answer.text
            assert not any(foreign in answer.text for foreign in markers if foreign != marker)
    assert sum(answer.num_cached_tokens for answer in together) > 0
    assert llm.engine.stats().evicted_tokens_total > 0
