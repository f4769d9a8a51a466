"""The right-or-wrong half of bench.gpu_check: the backend on random page tables against float64, and whole engines against each other."""

import math
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu_report import Report
from bench.gpu_shapes import Shape, engine_of
from radixserve.attention import AttentionBackend, ForwardBatch
from radixserve.attention.decode_groups import SharingCost
from radixserve.attention.flashinfer_backend import FlashInferBackend
from radixserve.attention.triton_backend import TritonBackend
from radixserve.attention.triton_plan import MIN_SPLIT_LEN
from radixserve.core import PageWrite, Request, SamplingParams, ScheduledBatch, ScheduledRow, TokenLogprob
from radixserve.engine.engine import Engine
from radixserve.engine.graphs import FIXED_SPLIT_TOKENS
from radixserve.kv import KVPool, PageTable
from radixserve.kv.pool import FP8
from radixserve.runner.batch_builder import build_forward_batch
from radixserve.runner.decode_graphs import Capture, CudaCapture
from radixserve.runner.upload import Uploader

ALWAYS = SharingCost(bytes_per_s=0.0)
ATOL, RTOL = 4e-3, 1.6e-2
UNDECIDED = 0.1  # two best logits nearer than this may change places in bfloat16


@dataclass
class Case:
    """A pool of one layer where every page that no row owns is NaN, and a step over it."""

    pool: KVPool
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def make_case(
    rows: list[tuple[int, int]],
    num_shared: int,
    page_size: int,
    heads: tuple[int, int, int],
    device: torch.device,
    seed: int,
    stored_dtype: torch.dtype | None = None,
) -> Case:
    """rows are (tokens, new ones); those with one new token are decode rows and come first. num_shared: leading pages that they share."""
    generator, rng = torch.Generator(device=device).manual_seed(seed), random.Random(seed)
    num_heads, num_kv_heads, head_dim = heads
    needed = [-(-length // page_size) for length, _ in rows]
    num_pages = sum(needed) + 64
    pool = KVPool(1, num_pages, page_size, num_kv_heads, head_dim, torch.bfloat16, device, stored_dtype)
    free = list(range(1, num_pages + 1))
    rng.shuffle(free)
    shared = [free.pop() for _ in range(num_shared)]
    table = PageTable(len(rows), max(needed), page_size, device)
    scheduled, owned = [], set(shared)
    for slot, (length, num_new) in enumerate(rows):
        is_decode = num_new == 1
        beginning = shared[: needed[slot] - 1] if is_decode else []
        pages = beginning + [free.pop() for _ in range(needed[slot] - len(beginning))]
        owned.update(pages)
        table.write(slot, PageWrite(0, array("i", pages)))
        scheduled.append(ScheduledRow(slot, length - num_new, num_new, array("i") if is_decode else array("i", [0] * num_new)))
    for part in (pool.k(0), pool.v(0)):
        values = torch.randn(part.shape, generator=generator, device=device)
        values[torch.tensor([page for page in range(1, num_pages + 1) if page not in owned], device=device)] = math.nan
        values[0] = 0.0
        part.copy_(values)
    last = torch.zeros(len(rows), dtype=torch.int64, device=device)
    batch = build_forward_batch(ScheduledBatch(0, tuple(scheduled)), table, last, device, Uploader(device))
    n = batch.num_tokens
    q, k, v = (torch.randn(n, h, head_dim, generator=generator, device=device).bfloat16() for h in (num_heads, num_kv_heads, num_kv_heads))
    return Case(pool, batch, q, k, v)


def dense(case: Case) -> torch.Tensor:
    """float64, row by row, from the pool as it is after the step's write."""
    batch, outputs = case.batch, []
    for row in range(batch.num_rows):
        first, end = batch.qo_indptr_host[row : row + 2].tolist()
        pages = batch.kv_indices[batch.kv_indptr_host[row] : batch.kv_indptr_host[row + 1]].long()
        n, m = end - first, int(batch.seq_lens_host[row])
        keys, values = (_take(pool, pages).flatten(0, 1)[:m].double() for pool in (case.pool.k(0), case.pool.v(0)))
        queries = case.q[first:end].double().view(n, keys.shape[1], -1, keys.shape[2])
        scores = torch.einsum("nhgd,mhd->hgnm", queries, keys) / math.sqrt(case.q.shape[2])
        future = torch.arange(m, device=scores.device) > torch.arange(m - n, m, device=scores.device)[:, None]
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        outputs.append(torch.einsum("hgnm,mhd->nhgd", weights, values).flatten(1, 2))
    return torch.cat(outputs)


def _take(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Pages of K or V; torch indexes no numbers of 8 bits everywhere, but bytes."""
    return pool[pages] if pool.dtype != FP8 else pool.view(torch.uint8)[pages].view(FP8).float()


def judge(report: Report, name: str, out: torch.Tensor, expected: torch.Tensor, times: float = 1.0, **figures: Any) -> None:
    """times: the tolerance, which is twice what kernels that round weights and results to the nearest bfloat16 come to."""
    difference = (out.double() - expected).abs()
    is_right = bool(out.isfinite().all()) and bool((difference <= times * (ATOL + RTOL * expected.abs())).all())
    report.say(name, is_right, max_error=float(difference.max()), **figures)


MIXED = [(1, 1), (17, 1), (640, 1), (1000, 1), (4000, 1), (130, 130), (1088, 64), (513, 2), (2049, 33)]
SHARED = [(700, 1), (513, 1), (600, 1), (520, 1), (1500, 1), (64, 64)]
SMALL_MIXED = [(1, 1), (17, 1), (64, 1), (30, 30), (108, 64), (33, 2)]
TINY_MIXED = [(1, 1), (40, 1), (33, 18), (9, 2)]
SMALL_SHARED = [(70, 1), (50, 1), (60, 1), (52, 1), (20, 20)]


def check_backend(
    report: Report, heads: tuple[int, int, int], page_size: int, device: torch.device, stored_dtype: torch.dtype | None = None
) -> None:
    is_small = device.type == "cpu"
    figures: dict[str, Any] = {"heads": heads, "page_size": page_size}
    kind = ", fp8" if stored_dtype else ""
    for name, rows, num_shared in (
        ("mixed", SMALL_MIXED if is_small else MIXED, 0),
        ("shared", SMALL_SHARED if is_small else SHARED, (48 if is_small else 512) // page_size),
    ):
        case = make_case(rows, num_shared, page_size, heads, device, seed=1, stored_dtype=stored_dtype)
        backend = FlashInferBackend(case.pool, heads[0], cost=ALWAYS if num_shared else None)
        _judge_twice(report, f"attention/{name}{kind}", backend, case, **figures)
        assert backend.num_shared_rows == (len(rows) - 1 if num_shared else 0)
        if not num_shared:  # as --repeatable-attention does: the longest rows are really cut
            pages = (32 if is_small else FIXED_SPLIT_TOKENS) // page_size
            backend = FlashInferBackend(case.pool, heads[0], cost=None, fixed_split_pages=pages)
            _judge_twice(report, f"attention/cut{kind}", backend, case, **figures)


def check_triton(report: Report, heads: tuple[int, int, int], page_size: int, device: torch.device) -> None:
    """TritonBackend, which serves where FlashInfer is missing; on a CPU its kernels have to be interpreted."""
    is_small = device.type == "cpu"
    case = make_case(TINY_MIXED if is_small else MIXED, 0, page_size, heads, device, seed=1)
    backend = TritonBackend(case.pool, heads[0], min_split_len=32 if is_small else MIN_SPLIT_LEN)
    # the interpreter cuts bfloat16 off where a GPU rounds to the nearest
    _judge_twice(report, "attention/triton", backend, case, 2.0 if is_small else 1.0, heads=heads, page_size=page_size)


def _judge_twice(report: Report, name: str, backend: AttentionBackend, case: Case, times: float = 1.0, **figures: Any) -> None:
    """Against float64, and the second time against the first, to the bit."""
    outputs = []
    for _ in range(2):
        backend.plan(case.batch)
        outputs.append(backend.run(0, case.q, case.k, case.v))
    judge(report, name, outputs[0], dense(case), times, **figures)
    report.say(f"{name}, again", torch.equal(*outputs), **figures)


def check_graph(report: Report, heads: tuple[int, int, int], page_size: int, device: torch.device, capture: Capture | None) -> None:
    """A graph of eight rows: replayed for batches of other lengths and fewer rows."""
    is_small = device.type == "cpu"
    lengths = [1, 16, 17, 40, 50, 33] if is_small else [1, 16, 17, 1000, 4000, 640]
    cases = [make_case([(length + 7 * step, 1) for length in lengths[step:]], 0, page_size, heads, device, seed=step) for step in range(3)]
    pool = KVPool(1, max(case.pool.num_pages for case in cases), page_size, heads[1], heads[2], torch.bfloat16, device)
    backend = FlashInferBackend(pool, heads[0], cost=None)
    graph = backend.decode_graph(8, torch.zeros(16384, dtype=torch.int32, device=device))
    q, k, v = (torch.zeros(8, h, heads[2], dtype=torch.bfloat16, device=device) for h in (heads[0], heads[1], heads[1]))
    captured = None
    for case in cases:
        n = case.batch.num_rows
        for part, source in ((pool.k(0), case.pool.k(0)), (pool.v(0), case.pool.v(0))):
            part[: len(source)].copy_(source)
        for buffer, values in ((q, case.q), (k, case.k), (v, case.v)):
            buffer.zero_()
            buffer[:n].copy_(values)
        graph.plan(case.batch)
        if captured is None:
            captured = (capture or CudaCapture(device))(partial(graph.run, 0, q, k, v))
        captured.replay()
        case.pool.write(0, case.batch.out_slots, case.k, case.v)
        judge(report, "attention/graph", captured.output[:n], dense(case), heads=heads, page_size=page_size, rows=n)


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]


def answers_of(engine: Engine, prompts: list[list[int]], num_output: int, **sampling: Any) -> list[Answer]:
    """All at once, greedy, to the end; the account of pages is recounted behind them."""
    params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, **sampling).validate()
    news: dict[str, list[Any]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), array("i", prompt), params, 0))
    while engine.has_work:
        for output in engine.step():
            news[output.request_id].append(output)
    engine.check_idle()
    return [
        Answer(
            *(tuple(item for output in outputs for item in getattr(output, name)) for name in ("token_ids", "logprobs", "prompt_logprobs"))
        )
        for outputs in news.values()
    ]


def make_prompts(shape: Shape, num_prompts: int, num_shared: int, num_own: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    shared = rng.choices(range(3, shape.vocab), k=num_shared)
    return [shared + rng.choices(range(3, shape.vocab), k=1 + rng.randrange(num_own)) for _ in range(num_prompts)]


Dresses = Mapping[str, Mapping[str, Any]]
FLASHINFER: Dresses = {
    "graphs": {"overlap_schedule": "on"},
    "one by one": {"overlap_schedule": "off"},
    "eager": {"disable_cuda_graph": True},
    "no tree": {"disable_radix_cache": True},
    "page 16": {"page_size": 16},
    "repeatable": {"repeatable_attention": True},
}
TRITON: Dresses = {"triton": {"attention_backend": "triton"}}


def check_engine(report: Report, shape: Shape, device: torch.device, dresses: Dresses = FLASHINFER) -> None:
    """The engine in several dresses against itself with plain torch attention: log-probabilities of the same text, and greedy tokens."""
    is_small = device.type == "cpu"
    prompts = make_prompts(shape, 8, 40 if is_small else 700, 30 if is_small else 300)
    num_output = 8 if is_small else 24
    common: dict[str, Any] = {"max_total_tokens": 1024 if is_small else 16384, "chunked_prefill_size": 64 if is_small else 512}
    common |= {"max_running_requests": 8, "context_length": 1024 if is_small else 4096, "check_account_every_step": True}
    with engine_of(shape, device, attention_backend="torch", **common) as engine:
        plain = answers_of(engine, prompts, num_output, logprobs=2, prompt_logprobs=1)
    for name, options in dresses.items():
        with engine_of(shape, device, **{"attention_backend": "flashinfer", **common, **options}) as engine:
            first = answers_of(engine, prompts, num_output, logprobs=2, prompt_logprobs=1)
            again = answers_of(engine, prompts, num_output, logprobs=2)  # with the tree: hits
            # log-probabilities wait for the device in every step; without them the host is really a step ahead
            ahead = answers_of(engine, prompts, num_output)
        for kind, answers in (("cold", first), ("again", again), ("no logprobs", ahead)):
            num_same, worst = _tokens_alike(answers, plain)
            report.say(f"engine/{name}, {kind}", worst <= UNDECIDED, model=shape.name, same_tokens=num_same, worst_margin=worst)
        gaps = [
            abs(one.logprob - other.logprob)
            for answer, expected in zip(first, plain)
            for one, other in zip(answer.prompt_logprobs, expected.prompt_logprobs, strict=True)
        ]
        mean = sum(gaps) / len(gaps)
        report.say(f"engine/{name}, logprobs", mean < 2e-2 and max(gaps) < 0.25, model=shape.name, mean_gap=mean, max_gap=max(gaps))


def _tokens_alike(answers: list[Answer], plain: list[Answer]) -> tuple[str, float]:
    """Tokens that are equal up to the first that is not, of how many; and how decided the plain run was, at most, where they part."""
    num_same = num_all = 0
    worst = 0.0
    for answer, expected in zip(answers, plain, strict=True):
        num_all += len(expected.token_ids)
        for token_id, wanted, logprob in zip(answer.token_ids, expected.token_ids, expected.logprobs, strict=True):
            if token_id != wanted:
                worst = max(worst, logprob.top[0][1] - logprob.top[1][1])
                break
            num_same += 1
    return f"{num_same}/{num_all}", worst
