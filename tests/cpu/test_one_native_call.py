"""A whole step in one native call gives the bits of the same step layer by layer, and of one thread."""

from array import array
from pathlib import Path

import pytest
import torch

from radixserve.attention.cpu_backend import CpuBackend
from radixserve.attention.timed import TimedAttention
from radixserve.core import PageWrite, ScheduledBatch, ScheduledRow
from radixserve.kv import KVPool, PageTable
from radixserve.models import load_decoder
from radixserve.models.config import ModelConfig, parse_model_config
from radixserve.models.packed_decoder import PackedDecoder, can_compute
from radixserve.runner.batch_builder import build_forward_batch

CPU = torch.device("cpu")
PAGE_SIZE = 4
RAW = {
    "vocab_size": 197,
    "hidden_size": 200,
    "intermediate_size": 330,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 2048,
}
# rows (start, count) of one step after another, all on slots of their own
STEPS = [
    [(0, 700), (0, 5), (0, 1), (0, 33)],
    [(700, 1), (5, 1), (1, 1), (33, 1)],
    [(701, 1), (6, 1), (2, 14)],  # up to 8 rows are normed in one piece
    [(702, 1), (7, 1), (16, 15)],
    [(703, 1), (34, 400)],
]


@pytest.fixture(autouse=True)
def threads_are_put_back() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_steps(decoder: PackedDecoder, config: ModelConfig, dtype: torch.dtype, is_at_once: bool) -> list[torch.Tensor]:
    """Hidden states of every step, then all of K and V."""
    pool = KVPool(config.num_layers, 400, PAGE_SIZE, config.num_kv_heads, config.head_dim, dtype)
    table = PageTable(4, 200, PAGE_SIZE)
    backend = CpuBackend(pool, config.num_heads)
    attention = backend if is_at_once else TimedAttention(backend)  # nobody looks behind a stopwatch
    assert decoder.attends_natively(attention) == is_at_once
    free = iter(torch.randperm(400, generator=torch.Generator().manual_seed(2)).add(1).tolist())
    taken = [0] * 4
    results = []
    for number, rows in enumerate(STEPS):
        scheduled = []
        for slot, (start, count) in enumerate(rows):
            end_page = -(-(start + count) // PAGE_SIZE)
            pages = array("i", [next(free) for _ in range(taken[slot], end_page)])
            table.write(slot, PageWrite(taken[slot], pages))
            taken[slot] = max(end_page, taken[slot])
            ids = array("i", [(7 * number + 31 * i + slot) % 197 for i in range(count)])
            scheduled.append(ScheduledRow(slot, start, count, ids))
        batch = build_forward_batch(ScheduledBatch(number, tuple(scheduled)), table, torch.zeros(4, dtype=torch.int64), CPU)
        attention.plan(batch)
        results.append(decoder.forward(batch, attention))
    return results + [pool.k(layer) for layer in range(config.num_layers)] + [pool.v(layer) for layer in range(config.num_layers)]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_as_layer_by_layer(dtype: torch.dtype, architecture: str) -> None:
    if not can_compute(dtype):
        pytest.skip(f"no native products of {dtype} here")
    config = parse_model_config(RAW | {"architectures": [architecture]}, {})
    decoder = load_decoder(config, Path(), dtype=dtype, device=CPU, load_format="dummy", seed=3, linear_backend="native")
    assert isinstance(decoder, PackedDecoder)
    with torch.inference_mode():
        torch.set_num_threads(2)
        by_layer = run_steps(decoder, config, dtype, is_at_once=False)
        assert decoder.seconds()[0] == 0.0
        at_once = run_steps(decoder, config, dtype, is_at_once=True)
        assert all(part > 0.0 for part in decoder.seconds()[:3])
        torch.set_num_threads(1)
        on_one_thread = run_steps(decoder, config, dtype, is_at_once=True)
    assert by_layer[0].float().std() > 0.1
    for place, (expected, got, alone) in enumerate(zip(by_layer, at_once, on_one_thread, strict=True)):
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
        assert torch.equal(got.view(bits), expected.view(bits)) and torch.equal(alone.view(bits), expected.view(bits)), place


def test_only_the_planned_batch_and_a_backend_of_its_own_shape() -> None:
    if not can_compute(torch.float32):
        pytest.skip("no native products here")
    config = parse_model_config(RAW | {"architectures": ["LlamaForCausalLM"]}, {})
    decoder = load_decoder(config, Path(), dtype=torch.float32, device=CPU, load_format="dummy", seed=3, linear_backend="native")
    table = PageTable(1, 4, PAGE_SIZE)
    table.write(0, PageWrite(0, array("i", [1])))
    rows = ScheduledBatch(0, (ScheduledRow(0, 0, 2, array("i", [5, 6])),))
    batch, other = (build_forward_batch(rows, table, torch.zeros(1, dtype=torch.int64), CPU) for _ in range(2))
    backend = CpuBackend(KVPool(3, 4, PAGE_SIZE, 2, 20, torch.float32), 6)
    backend.plan(batch)
    with pytest.raises(AssertionError, match="planned batch"):
        decoder.forward(other, backend)
    assert not decoder.attends_natively(CpuBackend(KVPool(2, 4, PAGE_SIZE, 2, 20, torch.float32), 6))
    assert not decoder.attends_natively(CpuBackend(KVPool(3, 4, PAGE_SIZE, 2, 20, torch.bfloat16), 6))
