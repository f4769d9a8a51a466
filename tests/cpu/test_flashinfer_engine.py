"""The whole engine with --attention-backend flashinfer on the CPU: FlashInfer's own wrappers over the checking reference, graphs recorded
and replayed operation by operation. Tokens and logits against the torch backend in bfloat16, against transformers in float32.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve.attention import flashinfer_package, registry
from radixserve.attention.decode_groups import SharingCost
from radixserve.attention.decode_tables import RowTables
from radixserve.attention.flashinfer_backend import FlashInferBackend
from radixserve.engine import build, graphs
from radixserve.engine.engine import Engine
from radixserve.errors import ConfigError
from radixserve.kv import KVPool
from radixserve.models import decoder
from radixserve.runner import model_runner
from radixserve.runner.upload import Uploader
from tests.support.engine_runs import Answer, make_request, run, tiny_engine
from tests.support.flashinfer_ops import install_ops
from tests.support.flashinfer_reference import Reference, nearest_fp8
from tests.support.pinned_memory import PinnedMemory
from tests.support.recorded_graph import GraphRecorder

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (make install does it)")

Tiny = Callable[[str, bool], Path]
NUM_OUTPUT = 12
# how near the torch backend's two best logits may be and change places: those of 4 to 8 are multiples of 1/32 in bfloat16, 1/256 in float16
UNDECIDED = {"bfloat16": 0.1, "float16": 0.05}
# largest and mean difference of log-probabilities
TOLERANCE = {"bfloat16": (8e-2, 2e-2), "float16": (2e-2, 4e-3)}
ALWAYS, NEVER = SharingCost(bytes_per_s=0.0), None


@dataclass
class Gpu:
    """What stands in for one."""

    reference: Reference
    recorder: GraphRecorder
    cost: list[SharingCost | None]

    def engine(self, model_dir: Path, cost: SharingCost | None = NEVER, **options: object) -> Engine:
        self.cost[0] = cost
        defaults: dict[str, object] = {"attention_backend": "flashinfer", "linear_backend": "torch", "dtype": "bfloat16"}
        engine = tiny_engine(model_dir, **(defaults | {"max_total_tokens": 1024} | options))
        pool: Any = engine._scheduler.cache
        self.reference.freed_pages = pool._pool.free_ids
        return engine


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(Reference(), GraphRecorder(), [NEVER])
    made.reference.install(monkeypatch)
    made.reference.on_kernel = made.recorder.kernel
    monkeypatch.setattr(registry, "why_not_flashinfer", lambda pool: None)
    monkeypatch.setattr(build, "graph_capture", lambda device: made.recorder)
    monkeypatch.setattr(build, "refuse_gpu_flags", lambda config, device: None)
    monkeypatch.setattr(model_runner, "Uploader", partial(Uploader, is_packed=True))
    plain = graphs.attention_options
    monkeypatch.setattr(build, "attention_options", lambda *given: {"cost": made.cost[0]} | plain(*given))
    return made


def make_prompts(num_prompts: int, seed: int = 5) -> list[list[int]]:
    """2 to 120 tokens, three in four with a beginning of one document."""
    rng = random.Random(seed)
    document = rng.choices(range(3, 384), k=120)
    prompts = []
    for number in range(num_prompts):
        length = rng.randrange(2, 120)
        shared = rng.randrange(length) if number % 4 else 0
        prompts.append(document[:shared] + rng.choices(range(3, 384), k=length - shared))
    return prompts


def greedy(engine: Engine, prompts: Sequence[list[int]], **sampling: object) -> dict[str, Answer]:
    options = {"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True, "logprobs": 2} | sampling
    answers = run(engine, [make_request(f"r{i}", prompt, **options) for i, prompt in enumerate(prompts)])
    engine.check_idle()
    return answers


def assert_equal_where_decided(answers: dict[str, Answer], expected: dict[str, Answer], undecided: float) -> int:
    """Up to the first place where the expected run itself is undecided; how many tokens were held against each other."""
    num_compared = 0
    for name, answer in answers.items():
        for token_id, wanted, logprob in zip(answer.token_ids, expected[name].token_ids, expected[name].logprobs, strict=True):
            (_, best), (_, second) = logprob.top
            if token_id != wanted:
                assert best - second <= undecided, f"{name}: {token_id} instead of {wanted}, {best - second:.3f} likelier than the next"
                break
            num_compared += 1
    return num_compared


@pytest.mark.parametrize("cost", [NEVER, ALWAYS], ids=["flat", "shared"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("family", "dtype"), [("llama", "float16"), ("qwen2", "bfloat16"), ("qwen3", "bfloat16")])
def test_tokens_equal_the_torch_backends(
    gpu: Gpu, tiny_model: Tiny, family: str, dtype: str, page_size: int, cost: SharingCost | None
) -> None:
    """Chunks and decode rows in one step, a pool so small that the tree is evicted from and requests are retracted, hits and misses."""
    prompts = make_prompts(16)
    options = {"page_size": page_size, "chunked_prefill_size": 48, "max_running_requests": 6, "max_total_tokens": 416, "dtype": dtype}
    plain = greedy(gpu.engine(tiny_model(family, True), attention_backend="torch", **options), prompts)
    assert not gpu.reference.num_runs
    engine = gpu.engine(tiny_model(family, True), cost, **options)
    num_merges = gpu.reference.num_merges  # of the warm-up
    assert engine.info.attention_backend == "flashinfer"
    answers = greedy(engine, prompts)
    assert assert_equal_where_decided(answers, plain, UNDECIDED[dtype]) > 0.7 * 16 * NUM_OUTPUT
    assert engine.stats().cached_tokens_total > 0 and engine.stats().evicted_tokens_total > 0
    assert (gpu.reference.num_merges > num_merges) == (cost is ALWAYS)
    num_replays = [graph.num_replays for graph in gpu.recorder.graphs]  # of 6, 4, 2, 1 rows
    assert len(num_replays) == 4 and (cost is ALWAYS or num_replays[0] > 0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_with_flashinfers_norms_rotary_and_activation(gpu: Gpu, tiny_model: Tiny, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a decoder does on a GPU, inside of graphs and outside."""
    prompts = make_prompts(10)
    options = {"dtype": "float16", "chunked_prefill_size": 48, "max_running_requests": 6}
    plain = greedy(gpu.engine(tiny_model(family, True), attention_backend="torch", **options), prompts)
    ops = install_ops(monkeypatch)
    monkeypatch.setattr(decoder, "choose_ops", lambda *where: ops)
    answers = greedy(gpu.engine(tiny_model(family, True), **options), prompts)
    assert assert_equal_where_decided(answers, plain, UNDECIDED["float16"]) > 0.7 * 10 * NUM_OUTPUT
    assert gpu.recorder.graphs[0].num_replays > 0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_equal_the_torch_backends(gpu: Gpu, tiny_model: Tiny, page_size: int, dtype: str) -> None:
    """The log-probability of every token of every prompt, and of the likeliest two in its place."""
    prompts = make_prompts(8)
    wanted = {"prompt_logprobs": 2, "max_tokens": 1}
    options = {"page_size": page_size, "chunked_prefill_size": 40, "dtype": dtype}
    plain = greedy(gpu.engine(tiny_model("llama", False), attention_backend="torch", **options), prompts, **wanted)
    answers = greedy(gpu.engine(tiny_model("llama", False), **options), prompts, **wanted)
    differences = []
    for name, answer in answers.items():
        assert len(answer.prompt_logprobs) == len(plain[name].prompt_logprobs) == len(prompts[int(name[1:])]) - 1
        differences += [abs(one.logprob - other.logprob) for one, other in zip(answer.prompt_logprobs, plain[name].prompt_logprobs)]
    largest, mean = TOLERANCE[dtype]
    assert max(differences) < largest and sum(differences) / len(differences) < mean and len(differences) > 300


@pytest.mark.parametrize(("page_size", "cost"), [(1, NEVER), (16, NEVER), (1, ALWAYS)], ids=["page 1", "page 16", "shared"])
def test_tokens_equal_transformers_in_float32(gpu: Gpu, tiny_model: Tiny, page_size: int, cost: SharingCost | None) -> None:
    """FlashInfer has no float32; the wrappers do not know, and the reference is told to let it through."""
    import transformers

    gpu.reference.dtypes = (torch.float32,)
    directory = tiny_model("llama", True)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = make_prompts(12, seed=9)
    engine = gpu.engine(directory, cost, dtype="float32", page_size=page_size, chunked_prefill_size=48, max_running_requests=6)
    answers = greedy(engine, prompts)
    for number, prompt in enumerate(prompts):
        ids = answers[f"r{number}"].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids[:-1]]]), use_cache=False, logits_to_keep=NUM_OUTPUT).logits[0]
        assert torch.equal(logits.argmax(-1), torch.tensor(ids)) or float((logits.topk(2).values.diff(dim=-1)).abs().min()) < 1e-4


def test_padding_rows_change_nothing(gpu: Gpu, tiny_model: Tiny) -> None:
    """Five requests in a graph of eight rows, and of five."""
    prompts = make_prompts(5)
    tokens = []
    for most in (8, 5, 1):
        answers = greedy(gpu.engine(tiny_model("llama", True), max_running_requests=8, cuda_graph_max_bs=most), prompts)
        tokens.append([answer.token_ids for answer in answers.values()])
    assert tokens[0] == tokens[1] == tokens[2]
    padded, exact = gpu.recorder.graphs[0], gpu.recorder.graphs[4]
    assert padded.num_replays == exact.num_replays >= NUM_OUTPUT - 2  # prompts of two steps
    assert {plan.is_graph for plan in gpu.reference.plans} == {True, False}


def test_graphs_can_be_turned_off(gpu: Gpu, tiny_model: Tiny) -> None:
    greedy(gpu.engine(tiny_model("llama", True), disable_cuda_graph=True), make_prompts(3))
    assert not gpu.recorder.graphs
    assert not any(plan.is_graph for plan in gpu.reference.plans)


def test_repeatable_attention_fixes_where_rows_are_cut(gpu: Gpu, tiny_model: Tiny) -> None:
    options = {"page_size": 16, "repeatable_attention": True, "max_running_requests": 4, "cuda_graph_max_bs": 2}
    greedy(gpu.engine(tiny_model("llama", True), **options), make_prompts(4))
    assert {(plan.is_graph, plan.is_causal, plan.fixed_split_size, plan.disable_split_kv) for plan in gpu.reference.plans} == {
        (False, False, 2048 // 16, False),
        (False, True, -1, True),
        (True, False, -1, True),
    }


def test_the_account_sees_a_freed_page(gpu: Gpu, tiny_model: Tiny) -> None:
    """The check that no freed page is read can fail."""
    engine = gpu.engine(tiny_model("llama", True))
    gpu.reference.freed_pages = partial(range, 1, 100)
    with pytest.raises(AssertionError, match="are free and are read"):
        greedy(engine, make_prompts(1))


def test_kernels_that_do_not_compile_are_one_sentence(gpu: Gpu, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, not under the first request."""
    import flashinfer.decode

    def fail(*args: object) -> None:
        raise RuntimeError("Ninja build failed.\nOutput: nvcc: not found")

    monkeypatch.setattr(flashinfer.decode, "get_batch_prefill_module", fail)
    with pytest.raises(
        ConfigError, match=r"^--attention-backend flashinfer: its kernels .* \(RuntimeError: Ninja build failed\.\); they need nvcc"
    ):
        gpu.engine(tiny_model("llama", True))


@pytest.mark.parametrize("cost", [NEVER, ALWAYS], ids=["flat", "shared"])
def test_tables_that_planners_copy_are_pinned(
    gpu: Gpu, tiny_model: Tiny, cost: SharingCost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets and lengths of every step's plans, in graphs and outside; plans at start are of tables that nobody has sent."""
    memory = PinnedMemory()
    memory.install(monkeypatch, torch.device("cpu"))
    engine = gpu.engine(tiny_model("llama", True), cost, chunked_prefill_size=48, max_running_requests=6)
    seen: list[torch.Tensor] = []
    plain = FlashInferBackend._plan_rows, FlashInferBackend._plan_prefill

    def plan_rows(self: FlashInferBackend, wrapper: Any, tables: RowTables, **split: Any) -> None:
        seen.extend([tables.kv_indptr, tables.last_page_len, tables.seq_lens])
        plain[0](self, wrapper, tables, **split)

    def plan_prefill(self: FlashInferBackend, wrapper: Any, tables: RowTables, is_causal: bool) -> None:
        seen.extend([tables.qo_indptr, tables.kv_indptr, tables.last_page_len, tables.seq_lens])
        plain[1](self, wrapper, tables, is_causal)

    monkeypatch.setattr(FlashInferBackend, "_plan_rows", plan_rows)
    monkeypatch.setattr(FlashInferBackend, "_plan_prefill", plan_prefill)
    greedy(engine, make_prompts(8))
    assert len(seen) > 60 and all(memory.holds(table) for table in seen)


def test_a_pool_of_8_bits(gpu: Gpu, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits, chunks, graphs and evictions over it, against the torch backend over a pool of 16 bits that is given rounded K and V."""
    prompts = make_prompts(12)
    options = {"page_size": 16, "chunked_prefill_size": 48, "max_running_requests": 6, "max_total_tokens": 416}
    engine = gpu.engine(tiny_model("llama", True), ALWAYS, kv_cache_dtype="fp8_e4m3", **options)
    answers = greedy(engine, prompts)
    assert engine.stats().cached_tokens_total > 0 and gpu.recorder.graphs
    plain_write = KVPool.write

    def write_rounded(self: KVPool, layer: int, out_slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        assert self.stored_dtype == torch.bfloat16
        plain_write(self, layer, out_slots, *(nearest_fp8(x).to(torch.bfloat16) for x in (k, v)))

    exact = greedy(gpu.engine(tiny_model("llama", True), attention_backend="torch", **options), prompts)
    monkeypatch.setattr(KVPool, "write", write_rounded)
    rounded_engine = gpu.engine(tiny_model("llama", True), attention_backend="torch", **options)
    rounded = greedy(rounded_engine, prompts)
    assert (engine.info.kv_cache_dtype, rounded_engine.info.kv_cache_dtype) == ("fp8_e4m3", "auto")
    assert engine.info.pool_size_bytes * 2 == rounded_engine.info.pool_size_bytes
    assert assert_equal_where_decided(answers, rounded, UNDECIDED["bfloat16"]) > 0.7 * 12 * NUM_OUTPUT
    assert [answer.logprobs for answer in rounded.values()] != [answer.logprobs for answer in exact.values()], "rounding can be seen"


@pytest.mark.parametrize(("name", "device"), [("torch", "cpu"), ("triton", "cpu"), ("auto", "cpu")])
def test_8_bits_are_refused_where_no_kernel_reads_them(gpu: Gpu, tiny_model: Tiny, name: str, device: str) -> None:
    expected = "--device cuda, got cpu" if name == "auto" else f"--attention-backend flashinfer, got {name}"
    with pytest.raises(ConfigError, match=f"^--kv-cache-dtype fp8_e4m3: expected {expected}"):
        gpu.engine(tiny_model("llama", True), attention_backend=name, kv_cache_dtype="fp8_e4m3")


def test_8_bits_are_never_handed_to_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by "auto" either, where FlashInfer cannot be had."""
    pool = KVPool(1, 4, 1, 1, 64, torch.bfloat16, stored_dtype=torch.float8_e4m3fn)
    for name in ("torch", "cpu", "triton"):
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype fp8_e4m3: expected --attention-backend flashinfer, got {name}"):
            registry.make_attention_backend(name, pool, 1)
    with pytest.raises(ConfigError, match="expected a CUDA device, got cpu; --kv-cache-dtype fp8_e4m3 is for these kernels only"):
        registry.make_attention_backend("auto", pool, 1)
    pool.device = torch.device("cuda")
    assert flashinfer_package.why_not(pool) == "expected heads of 128 or 256 dimensions for --kv-cache-dtype fp8_e4m3, got 64"
