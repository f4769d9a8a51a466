"""How a GPU's memory is divided, by arithmetic alone: an H200 and a small card with Llama-3.1-8B, and what is said when nothing is left."""

import dataclasses
import re
from array import array

import numpy as np
import pytest
import torch

from radixserve.attention import flashinfer_backend, triton_backend
from radixserve.attention.flashinfer_workspace import WORKSPACE_BYTES
from radixserve.core import Request, SamplingParams
from radixserve.engine.build import rank_device, resolve_config
from radixserve.engine.gpu_memory import Reserve, division, estimate_reserve, gpu_pool_bytes
from radixserve.engine.graphs import GraphPlan, attention_options, plan_graphs, refuse_idle_flags, say_that_there_are_none
from radixserve.engine.llm import engine_config
from radixserve.engine.pool import affordable_pages
from radixserve.errors import ConfigError, DeviceMemoryError
from radixserve.kv import device_state
from radixserve.models.config import ModelConfig, parse_model_config
from radixserve.runner import sampler
from radixserve.runner.adjustments import LogitAdjustments
from radixserve.runner.decode_graphs import CudaCapture, graph_sizes
from radixserve.runner.logprobs import token_logprobs
from radixserve.runner.sampler import SamplingRows
from tests.support.peak_memory import PeakMemory

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


def test_ranks_have_buffers_between_them(model: ModelConfig) -> None:
    alone, together = (estimate_reserve(model, torch.bfloat16, 8192, 256, [], 0, num_ranks) for num_ranks in (1, 2))
    assert alone.nccl == 0 and "nccl" not in str(alone)
    assert 512 << 20 < together.nccl < GIB and f"nccl {together.nccl >> 20}" in str(together)
    assert together.logits > alone.logits  # gathered on the first rank, and put side by side


def rows_of(n: int, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, temperature: float = 1.0) -> SamplingRows:
    settings = [np.full(n, value) for value in (temperature == 0.0, temperature, top_k, top_p, min_p)]
    return SamplingRows(*settings, np.linspace(0.0, 1.0, n, endpoint=False))  # type: ignore[arg-type]


SORT_SCRATCH = 24  # bytes that a GPU's sort takes beside what it returns: keys and ids, twice, and of the ids' own kind


@pytest.mark.parametrize("num_rows", [8, 48])
def test_sampling_stays_within_its_part(model: ModelConfig, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's sampler and log-probabilities, measured; rows that are sorted whole, those that are not, and penalties of all rows."""
    monkeypatch.setattr(sampler, "loaded_library", lambda: None)
    vocab_size = 5000
    model = dataclasses.replace(model, vocab_size=vocab_size)
    reserve = estimate_reserve(model, torch.bfloat16, num_rows, num_rows, [], 0)
    of_sorts = SORT_SCRATCH * vocab_size * min(num_rows, sampler.ROWS_SORTED_AT_ONCE)
    flat = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) / 100
    slots = np.arange(num_rows)
    adjustments = LogitAdjustments(num_rows, vocab_size, torch.device("cpu"))
    with torch.inference_mode(), PeakMemory() as table:
        for slot in slots:
            asked = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5)
            adjustments.put(int(slot), Request(str(slot), array("i", range(60)), asked), array("i", range(60, 90)))
    of_rows = vocab_size * 32  # counts of one row on their way
    assert reserve.penalties <= table.peak <= reserve.penalties + of_rows
    peaks = []
    for rows in (rows_of(num_rows), rows_of(num_rows, top_p=0.9, min_p=0.01), rows_of(num_rows, temperature=0.0)):
        with torch.inference_mode(), PeakMemory() as memory:
            adjusted = adjustments.apply(flat, slots, slots)
            sampler.sample(adjusted, rows)
        peaks.append(memory.peak + of_sorts * (rows.top_p[0] < 1))
    for logits in (torch.zeros_like(flat), flat / torch.zeros(1)):
        with torch.inference_mode(), PeakMemory() as memory:
            token_logprobs(
                lambda first, last, logits=logits: logits[first:last] + 0.0, torch.zeros(num_rows, dtype=torch.int64), [5] * num_rows
            )
        peaks.append(memory.peak + of_sorts)
    assert reserve.sampling / 1.6 < max(peaks) < reserve.sampling, [peak / num_rows / vocab_size for peak in peaks]


def reserve_of(model: ModelConfig, chunk: int = 8192, rows: int = 256, most: int = 64) -> Reserve:
    return estimate_reserve(model, torch.bfloat16, chunk, rows, graph_sizes(most), 8 << 20)


def test_what_steps_need_grows_with_them(model: ModelConfig) -> None:
    reserve = reserve_of(model)
    # gate, up and their product of 8192 tokens are 0.7 GB already; a reserve of many times that would waste the pool
    assert 3 * 14336 * 8192 * 2 < reserve.activations < 2 * GIB
    assert reserve.total < 5 * GIB
    assert reserve_of(model, chunk=2048).activations * 4 == pytest.approx(reserve.activations, rel=0.01)
    for part in ("logits", "penalties"):
        assert getattr(reserve_of(model, rows=64), part) * 4 == pytest.approx(getattr(reserve, part), rel=0.01)
    assert reserve_of(model, rows=1).sampling < reserve.sampling / 2
    assert reserve_of(model, most=16).graphs < reserve.graphs
    assert reserve.total == sum(dataclasses.astuple(reserve))


def test_either_attention_backend_fits_into_what_is_kept_for_it(model: ModelConfig) -> None:
    assert reserve_of(model).attention >= WORKSPACE_BYTES + flashinfer_backend.EAGER_INT_WORKSPACES_BYTES
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
    for part in ("activations", "logits", "sampling", "penalties", "graphs", "attention", "libraries"):
        assert re.search(rf"\b{part} \d+[,;]", caught.value.message)
    for flag in ("--chunked-prefill-size", "--max-running-requests", "--cuda-graph-max-bs", "--mem-fraction-static"):
        assert flag in caught.value.message
    with pytest.raises(ConfigError, match=r"--mem-fraction-static 0\.1 of the GPU"):
        gpu_pool_bytes(60 * GIB, 141 * GIB, WEIGHTS, reserve_of(model), 0.1)


def test_the_division_is_one_line(model: ModelConfig) -> None:
    reserve = reserve_of(model)
    line = division(10 * GIB, WEIGHTS, reserve)
    assert line.startswith(
        f"GPU memory: weights 15317 MiB, KV pool 10240 MiB, left for steps {reserve.total / 2**20:.0f} MiB (activations "
    )
    assert f"penalties {256 * 128256 * 5 / 2**20:.0f}, " in line


def test_which_graphs_are_planned() -> None:
    config = engine_config(None, {"context_length": 4096, "max_running_requests": 20, "page_size": 16})
    nothing = GraphPlan([], 0)
    assert plan_graphs(config, None) == nothing
    capture = object()
    assert plan_graphs(config, capture) == GraphPlan([1, 2, 4, 8, 16, 20], 20 * 256 + 20)  # type: ignore[arg-type]
    assert plan_graphs(dataclasses.replace(config, disable_cuda_graph=True), capture) == nothing  # type: ignore[arg-type]
    assert plan_graphs(dataclasses.replace(config, attention_backend="triton"), capture) == nothing  # type: ignore[arg-type]
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
def test_flags_of_another_backend_are_refused(model: ModelConfig, flag: str, value: object, options: dict[str, object]) -> None:
    config = engine_config(None, {flag: value, "max_running_requests": 8, "context_length": 4096})
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: expected --attention-backend flashinfer, got torch"):
        refuse_idle_flags(config, "torch")
    refuse_idle_flags(config, "flashinfer")
    assert attention_options(config, model, GraphPlan([], 0)) == {"workspace_bytes": WORKSPACE_BYTES} | options


def test_flags_of_a_gpu_are_refused_before_anything_is_loaded(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for backend in ("torch", "triton"):
        config = engine_config(None, {"repeatable_attention": True, "attention_backend": backend, "device": "cuda"})
        with pytest.raises(ConfigError, match=f"--repeatable-attention: expected --attention-backend flashinfer, got {backend}"):
            resolve_config(config, model)


def test_the_device_is_one_with_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that launches steps begins with another current one than the user's, whose own stays as it was."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    config = engine_config(None, {"device": "cuda"})
    assert rank_device(config, 0) == torch.device("cuda", 3)
    assert rank_device(dataclasses.replace(config, tp_size=2), 1) == torch.device("cuda", 1)
    assert not chosen
    assert isinstance(device_state.current(torch.device("cuda", 3)), torch.cuda.device)


def test_kernels_without_graphs_say_so(caplog: pytest.LogCaptureFixture) -> None:
    config, capture = engine_config(None, {}), CudaCapture(torch.device("cuda"))
    quiet = dataclasses.replace(config, disable_cuda_graph=True)
    say_that_there_are_none(config, "flashinfer", capture)
    say_that_there_are_none(quiet, "triton", capture)
    say_that_there_are_none(config, "cpu", None)
    assert not caplog.records
    say_that_there_are_none(config, "triton", capture)
    assert "--attention-backend triton has no CUDA graphs" in caplog.text and caplog.records[0].levelname == "WARNING"


def test_ranks_without_graphs_say_so(model: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    resolve_config(engine_config(None, {"tp_size": 2, "device": "cuda", "disable_cuda_graph": True}), model)
    assert not caplog.records
    config = resolve_config(engine_config(None, {"tp_size": 2, "device": "cuda"}), model)
    assert config.disable_cuda_graph
    assert "--tp-size 2: there are no CUDA graphs with several ranks" in caplog.text and caplog.records[0].levelname == "WARNING"


@dataclasses.dataclass
class Loaded:
    """What is asked of a decoder on a GPU once it is loaded."""

    config: ModelConfig
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    size_bytes: int = WEIGHTS


def test_pages_of_a_gpus_pool(model: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Half of the bytes, twice the tokens; several ranks leave room for NCCL; a size that was asked for is had, with a warning."""
    total, free = 80 * GIB, 80 * GIB - WEIGHTS - GIB // 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    options = {"max_running_requests": 64, "chunked_prefill_size": 2048, "context_length": 4096}

    def pages(**more: object) -> int:
        caplog.clear()
        return affordable_pages(engine_config(None, options | more), model, Loaded(model), GraphPlan([], 0))  # type: ignore[arg-type]

    with caplog.at_level("INFO", logger="radixserve.engine"):
        plain = pages()
        assert re.fullmatch(r"GPU memory: weights 15317 MiB, KV pool \d+ MiB, left for steps \d+ MiB \(activ.*\)", caplog.messages[0])
        assert pages(kv_cache_dtype="fp8_e4m3") == pytest.approx(2 * plain, abs=1)
        assert plain - pages(tp_size=2) >= (512 << 20) // (2 * 32 * 8 * 128 * 2)
        assert pages(max_total_tokens=1000) == 1000 and not caplog.records
        most = free // (2 * 32 * 8 * 128 * 2)
        assert pages(max_total_tokens=most) == most
        assert re.search(r"leaves 0 MiB for steps, which may need \d+ MiB \(activations", caplog.messages[0])
    # partial results of a flag's own come out of the pool
    long = {"context_length": 131072, "max_running_requests": 256}
    assert plain - pages(repeatable_attention=True) < 1000 < pages(**long) - pages(**long, repeatable_attention=True) < 4000
    with pytest.raises(DeviceMemoryError, match=f"enough for {most} tokens"):
        pages(max_total_tokens=most + 1)
