"""TritonBackend in Triton's interpreter (tests/conftest.py turns it on) against dense attention in float64, and in a whole engine.

On a machine with a GPU, TRITON_INTERPRET=0 runs the same cases there.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from radixserve.attention import make_attention_backend, registry
from radixserve.attention.triton_backend import TritonBackend
from radixserve.errors import ConfigError
from radixserve.kv import KVPool
from tests.support.engine_runs import is_equal_up_to_a_near_tie, make_request, run, tiny_engine
from tests.support.paged_cases import MIXED, ROWS, Case, dense, make_case

pytest.importorskip("triton", reason="Triton is not installed: it has wheels for Linux only")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="neither the interpreter nor a GPU")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DECODE = [(n, 1, True) for n in (1, 63, 64, 65, 200, 31)]
EXTEND = [(37, 37, False), (150, 20, False), (90, 3, False), (33, 1, False)]


@pytest.fixture(autouse=True)
def nan_where_nothing_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and scratch come from torch.empty: a place that a kernel forgets, or reads too early, must show."""
    plain_empty = torch.empty

    def poisoned_empty(*args: object, **options: object) -> torch.Tensor:
        made = plain_empty(*args, **options)  # type: ignore[call-overload]
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def attend(case: Case, min_split_len: int = 32, scratch_bytes: int = 1 << 20) -> torch.Tensor:
    num_heads = case.queries[0].shape[1]
    backend = TritonBackend(case.pool, num_heads, min_split_len=min_split_len, scratch_bytes=scratch_bytes)
    backend.plan(case.batch)
    out = backend.run(0, *(x.to(DEVICE) for x in (torch.cat(case.queries), case.new_k, case.new_v)))
    return out.cpu()


def assert_is_dense(case: Case, out: torch.Tensor) -> None:
    dtype = case.pool.dtype
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), dense(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("page_size", "heads"), [(1, (2, 2)), (1, (6, 2)), (3, (8, 1)), (16, (6, 2)), (64, (8, 1))])
def test_mixed_steps(page_size: int, heads: tuple[int, int]) -> None:
    case = make_case(DECODE[2:] + EXTEND, page_size, *heads, device=DEVICE)
    assert_is_dense(case, attend(case))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    case = make_case([(65, 1, True), (20, 1, True), (70, 8, False)], 16, 6, 2, dtype, head_dim, DEVICE)
    assert_is_dense(case, attend(case))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_shapes_of_steps(rows: list[tuple[int, int, bool]]) -> None:
    case = make_case(rows, 4, 6, 2, device=DEVICE)
    assert_is_dense(case, attend(case))


def test_splits_do_not_change_what_comes_out() -> None:
    """Long enough for many splits of a row; a scratch without room for them; and no splits at all."""
    case = make_case([(700, 1, True), (450, 1, True), (600, 5, False), (520, 20, False)], 16, 4, 1, device=DEVICE)
    expected = dense(case)
    for min_split_len, scratch_bytes in ((32, 1 << 20), (256, 1 << 20), (32, 8000), (32, 0), (10**4, 1 << 20)):
        out = attend(case, min_split_len, scratch_bytes)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_row_has_the_same_bits_whoever_is_beside_it() -> None:
    rows = [(200, 1, True), (65, 1, True), (150, 20, False)]
    case = make_case(rows, 16, 6, 2, torch.bfloat16, device=DEVICE)
    together = attend(case)
    alone = make_case(rows[:1], 16, 6, 2, torch.bfloat16, device=DEVICE)
    for mine, its in ((alone.keys, case.keys), (alone.values, case.values), (alone.queries, case.queries)):
        torch.testing.assert_close(mine[0], its[0])  # the generator begins with the same row
    assert torch.equal(attend(alone)[0], together[0])


def test_scores_far_below_zero_and_far_above() -> None:
    case = make_case(DECODE + EXTEND, 4, 4, 2, device=DEVICE)
    case.queries = [q * 300 for q in case.queries]
    torch.testing.assert_close(attend(case).double(), dense(case), atol=1e-3, rtol=1e-3)


def test_writes_this_steps_keys_and_nothing_else() -> None:
    case = make_case(MIXED, 4, 6, 2, head_dim=24, device=DEVICE)
    before = [x(0).flatten(0, 1).clone() for x in (case.pool.k, case.pool.v)]
    attend(case)
    untouched = torch.ones(len(before[0]), dtype=torch.bool)
    untouched[case.batch.out_slots] = False
    for now, then, new in zip((case.pool.k(0), case.pool.v(0)), before, (case.new_k, case.new_v)):
        torch.testing.assert_close(now.flatten(0, 1)[case.batch.out_slots].cpu(), new, atol=0, rtol=0)
        torch.testing.assert_close(now.flatten(0, 1)[untouched], then[untouched], equal_nan=True, atol=0, rtol=0)


def test_views_of_a_fused_projection_are_accepted() -> None:
    case = make_case(MIXED, 4, 6, 2, device=DEVICE)
    expected = attend(case)
    backend = TritonBackend(case.pool, 6, min_split_len=32, scratch_bytes=1 << 20)
    backend.plan(case.batch)
    fused = torch.cat([torch.cat(case.queries), case.new_k, case.new_v], dim=1).to(DEVICE)
    assert torch.equal(backend.run(0, fused[:, :6], fused[:, 6:8], fused[:, 8:]).cpu(), expected)
    strided = fused.transpose(1, 2).contiguous().transpose(1, 2)  # a head's numbers are apart
    assert torch.equal(backend.run(0, strided[:, :6], strided[:, 6:8], strided[:, 8:]).cpu(), expected)


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_engine_says_what_it_says_with_plain_torch(tiny_model: Callable[[str, bool], Path], page_size: int) -> None:
    """Shared prefixes, chunks and decode in one step, a tree that is hit; NaN would show in the log-probabilities."""
    prefix = [5 + i * 7 % 300 for i in range(40)]
    prompts = [[*prefix, 10 + i, 20 + i] for i in range(2)] + [list(range(30, 51)), prefix[:33]]
    answers = {}
    for name in ("torch", "triton"):
        options = {
            "attention_backend": name,
            "device": DEVICE,
            "page_size": page_size,
            "chunked_prefill_size": 24,
            "max_running_requests": 4,
        }
        engine = tiny_engine(tiny_model("llama", True), max_total_tokens=1024, **options)
        assert engine.info.attention_backend == name
        requests = [make_request(f"r{i}", prompt, temperature=0, max_tokens=4, logprobs=2) for i, prompt in enumerate(prompts)]
        answers[name] = run(engine, requests)
        again = run(engine, [make_request("again", prompts[0], temperature=0, max_tokens=4, logprobs=2)])["again"]
        assert again.final is not None and again.final.num_cached_tokens >= 32
        assert is_equal_up_to_a_near_tie(again, answers[name]["r0"])
    for name, calm in answers["torch"].items():
        assert is_equal_up_to_a_near_tie(answers["triton"][name], calm), name
        ours, theirs = ([one.logprob for one in answers[backend][name].logprobs] for backend in ("triton", "torch"))
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-3, rtol=1e-3)


def test_a_start_runs_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What warm_up() leaves out would be compiled under a request."""
    backend = TritonBackend(pool_of(head_dim=64, dtype=torch.bfloat16), 1)
    launched: list[tuple[str, int]] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(triton_kernels, name)

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*args: object, **constants: int) -> None:
                launched.append((self.name, constants.get("BLOCK_M", 0)))
                self.kernel[grid](*args, **constants)

            return launch

    from radixserve.attention import triton_kernels

    names = ("write_kernel", "attend_kernel", "merge_kernel")
    monkeypatch.setattr(backend, "_kernels", SimpleNamespace(**{name: Recorded(name) for name in names}))
    backend.warm_up()
    assert sorted(launched) == [("attend_kernel", 16), ("attend_kernel", 128), ("merge_kernel", 0), ("write_kernel", 0)]
    with pytest.raises(AssertionError, match=r"run\(\) before plan\(\)"):
        backend.run(0, *(torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)))


def test_it_serves_where_flashinfer_cannot_and_torch_where_it_cannot_either(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(registry._ORDER, "cpu", registry._ORDER["cuda"])
    assert make_attention_backend("auto", pool_of(), 1).name == "triton"
    assert "attention runs on triton, slower than the best" in caplog.text and "--attention-backend flashinfer: expected" in caplog.text

    def broken(backend: TritonBackend) -> None:
        raise RuntimeError("\n  no ptxas here\nmore")

    monkeypatch.setattr(TritonBackend, "warm_up", broken)
    assert make_attention_backend("auto", pool_of(), 1).name == "torch"
    assert "--attention-backend triton: its kernels cannot be compiled or run here (RuntimeError: no ptxas here)" in caplog.text


def pool_of(head_dim: int = 16, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(1, 1, 1, 1, head_dim, dtype, DEVICE)


def test_what_it_cannot_serve_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pool: KVPool, num_heads: int, sentence: str) -> None:
        with pytest.raises(ConfigError, match=f"^--attention-backend triton: {sentence}.*; or use --attention-backend torch"):
            make_attention_backend("triton", pool, num_heads)

    refused(pool_of(head_dim=320), 1, "expected a head_dim of at most 256, got 320")
    refused(pool_of(dtype=torch.float64), 1, "expected bfloat16, float16 or float32, got torch.float64")
    refused(pool_of(), 129, "expected at most 128 heads per KV head, got 129")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    refused(pool_of(), 1, "expected a CUDA device, got cpu")
    monkeypatch.setattr("radixserve.attention.triton_backend.find_spec", lambda name: None)
    refused(pool_of(), 1, "Triton is not installed; pip install triton")
