"""ModelRunner with the real Decoder gives transformers' greedy tokens, in float32, whatever the pages, chunks and company."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from radixserve.attention import make_attention_backend
from radixserve.kv import KVPool, PageTable
from radixserve.models import load_decoder, load_model_config
from radixserve.runner import ModelRunner
from tests.support.stepping import Running, Stepper

NUM_OUTPUT = 16
MODELS = [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False)]
LENGTHS = [1, 2, 15, 16, 17, 64, 130, 300]


def greedy(model: torch.nn.Module, prompt_ids: list[int]) -> list[int]:
    """transformers' own loop over the whole sequence, without its cache; fails on a near tie, which would prove nothing."""
    ids = list(prompt_ids)
    with torch.inference_mode():
        for _ in range(NUM_OUTPUT):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-4, "choose another seed: the oracle itself is undecided"
            ids.append(int(logits.argmax()))
    return ids[len(prompt_ids) :]


@pytest.fixture(scope="module", params=MODELS, ids=[f"{family}-{'tied' if tie else 'untied'}" for family, tie in MODELS])
def oracle(
    request: pytest.FixtureRequest, tiny_model: Callable[[str, bool], Path], one_thread: None
) -> tuple[Path, list[list[int]], list[list[int]]]:
    """Model directory, prompts, and transformers' continuations."""
    import transformers

    directory = tiny_model(*request.param)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rng = random.Random(11)
    prompts = [rng.choices(range(model.config.vocab_size), k=length) for length in LENGTHS]
    return directory, prompts, [greedy(model, prompt) for prompt in prompts]


def make_stepper(directory: Path, page_size: int) -> Stepper:
    config = load_model_config(directory)
    decoder = load_decoder(config, directory, dtype=torch.float32, device=torch.device("cpu"))
    pool = KVPool(config.num_layers, 1024 // page_size, page_size, config.num_kv_heads, config.head_dim, torch.float32)
    table = PageTable(16, 512 // page_size, page_size)
    backend = make_attention_backend("torch", pool, config.num_heads)
    return Stepper(ModelRunner(decoder, pool, table, backend, config.vocab_size), pool.num_pages, page_size)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (16, 50), (4, 512)])
def test_batch_of_ragged_prompts(oracle: tuple[Path, list[list[int]], list[list[int]]], page_size: int, chunk: int) -> None:
    directory, prompts, expected = oracle
    assert len({tuple(ids) for ids in expected}) == len(expected)
    stepper = make_stepper(directory, page_size)
    running = [Running(slot, prompt) for slot, prompt in enumerate(prompts)]
    while unfinished := [r for r in running if len(r.output_ids) < NUM_OUTPUT]:
        stepper.execute([(r, min(chunk, len(r.prompt_ids) - r.num_computed)) for r in unfinished])
    assert [r.output_ids for r in running] == expected


def test_a_shared_prefix(oracle: tuple[Path, list[list[int]], list[list[int]]]) -> None:
    directory, prompts, expected = oracle
    stepper = make_stepper(directory, 16)
    first, second = Running(0, prompts[-1]), Running(1, prompts[-1])
    assert stepper.generate(first, NUM_OUTPUT, chunk=70) == expected[-1]
    second.share(first, 288 // 16, 16)
    assert stepper.generate(second, NUM_OUTPUT) == expected[-1]
