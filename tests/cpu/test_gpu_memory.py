"""How a GPU's memory is divided, by arithmetic alone: an H200 and a small card with Llama-3.1-8B, and what is said when nothing is left."""

import dataclasses

import pytest
import torch

from radixserve.attention import flashinfer_backend, triton_backend
from radixserve.engine.gpu_memory import Reserve, estimate_reserve, gpu_pool_bytes
from radixserve.engine.graphs import GraphPlan, attention_options, plan_graphs, refuse_idle_flags
from radixserve.engine.llm import engine_config
from radixserve.errors import ConfigError
from radixserve.models.config import ModelConfig, parse_model_config
from radixserve.runner.decode_graphs import graph_sizes

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
WEIGHTS = 16_060_522_496


@pytest.fixture
def model() -> ModelConfig:
    return parse_model_config(LLAMA_8B, {})


def reserve_of(model: ModelConfig, chunk: int = 8192, rows: int = 256, most: int = 64) -> Reserve:
    return estimate_reserve(model, torch.bfloat16, chunk, rows, graph_sizes(most), 8 << 20)


def test_what_steps_need_grows_with_them(model: ModelConfig) -> None:
    reserve = reserve_of(model)
    # gate, up and their product of 8192 tokens are 0.7 GB already; a reserve of many times that would waste the pool
    assert 3 * 14336 * 8192 * 2 < reserve.activations < 2 * GIB
    assert reserve.total < 5 * GIB
    assert reserve_of(model, chunk=2048).activations * 4 == pytest.approx(reserve.activations, rel=0.01)
    assert reserve_of(model, rows=64).logits * 4 == pytest.approx(reserve.logits, rel=0.01)
    assert reserve_of(model, most=16).graphs < reserve.graphs
    assert reserve.total == sum(dataclasses.astuple(reserve))


def test_either_attention_backend_fits_into_what_is_kept_for_it(model: ModelConfig) -> None:
    num_wrappers = 3  # extend, shared, decode: each has a workspace of integers
    assert flashinfer_backend.WORKSPACE_BYTES + num_wrappers * flashinfer_backend.INT_WORKSPACE_BYTES <= reserve_of(model).attention
    assert reserve_of(model).attention >= triton_backend.SCRATCH_BYTES


def test_the_pool_is_what_is_left(model: ModelConfig) -> None:
    reserve, total = reserve_of(model), 141 * GIB
    free = total - WEIGHTS - GIB
    pool = gpu_pool_bytes(free, total, WEIGHTS, reserve, None)
    assert pool == int(total * 0.92) - WEIGHTS - reserve.total
    assert 700_000 < pool // (2 * 32 * 8 * 128 * 2) < 950_000  # tokens
    # SGLang's meaning where it is given
    assert gpu_pool_bytes(free, total, WEIGHTS, reserve, 0.5) == int(total * 0.5) - WEIGHTS
    # never more than steps leave free, whatever is asked for, and whoever else uses the GPU
    assert gpu_pool_bytes(free, total, WEIGHTS, reserve, 0.99) == free - reserve.total
    assert gpu_pool_bytes(30 * GIB, total, WEIGHTS, reserve, None) == 30 * GIB - reserve.total


def test_nothing_left_says_how_much_and_what_to_do(model: ModelConfig) -> None:
    with pytest.raises(
        ConfigError, match=r"the GPU has 16384 MiB, of which 1024 MiB are free beside 15317 MiB of weights; steps need \d+ MiB"
    ) as caught:
        gpu_pool_bytes(GIB, 16 * GIB, WEIGHTS, reserve_of(model), None)
    for flag in ("--chunked-prefill-size", "--max-running-requests", "--cuda-graph-max-bs", "--mem-fraction-static"):
        assert flag in caught.value.message
    with pytest.raises(ConfigError, match=r"--mem-fraction-static 0\.1 of the GPU"):
        gpu_pool_bytes(60 * GIB, 141 * GIB, WEIGHTS, reserve_of(model), 0.1)


def test_which_graphs_are_planned() -> None:
    config = engine_config(None, {"context_length": 4096, "max_running_requests": 20, "page_size": 16})
    nothing = GraphPlan([], 0)
    assert plan_graphs(config, None) == nothing
    capture = object()
    assert plan_graphs(config, capture) == GraphPlan([1, 2, 4, 8, 16, 20], 20 * 256 + 20)  # type: ignore[arg-type]
    assert plan_graphs(dataclasses.replace(config, disable_cuda_graph=True), capture) == nothing  # type: ignore[arg-type]
    config = dataclasses.replace(config, cuda_graph_max_bs=2, context_length=1 << 30)
    assert plan_graphs(config, capture) == GraphPlan([1, 2], (8 << 20) + 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flag", "value", "options"),
    [
        ("cuda_graph_max_bs", 8, {}),
        ("disable_cascade_attention", True, {"cost": None}),
        ("repeatable_attention", True, {"cost": None, "fixed_split_pages": 2048}),
    ],
)
def test_flags_of_another_backend_are_refused(flag: str, value: object, options: dict[str, object]) -> None:
    config = engine_config(None, {flag: value})
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: expected --attention-backend flashinfer, got torch"):
        refuse_idle_flags(config, "torch")
    refuse_idle_flags(config, "flashinfer")
    assert attention_options(config) == options
