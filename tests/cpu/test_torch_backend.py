"""TorchBackend against dense attention in float64, over shuffled pages in a poisoned pool."""

from collections.abc import Sequence

import pytest
import torch

from radixserve.attention import make_attention_backend
from radixserve.attention.torch_backend import TorchBackend
from radixserve.errors import ConfigError
from radixserve.kv import KVPool
from tests.support.paged_cases import MIXED, ROWS, Case, dense, make_case

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def run(case: Case, num_heads: int) -> torch.Tensor:
    backend = make_attention_backend("torch", case.pool, num_heads)
    backend.plan(case.batch)
    return backend.run(0, torch.cat(case.queries), case.new_k, case.new_v)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_equals_dense_attention(rows: list[tuple[int, int, bool]], page_size: int, heads: tuple[int, int]) -> None:
    case = make_case(rows, page_size, *heads)
    out = run(case, heads[0])
    torch.testing.assert_close(out.double(), dense(case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = make_case(MIXED, 4, 6, 2, dtype)
    out = run(case, 6)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), dense(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_writes_this_steps_keys_and_nothing_else() -> None:
    case = make_case(MIXED, 4, 6, 2)
    before = case.pool.k(0).clone()
    run(case, 6)
    flat = case.pool.k(0).flatten(0, 1)
    torch.testing.assert_close(flat[case.batch.out_slots], case.new_k)
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[case.batch.out_slots] = False
    torch.testing.assert_close(flat[untouched], before.flatten(0, 1)[untouched], equal_nan=True)
    assert case.pool.k(0)[0].isnan().all()


def test_views_of_a_fused_projection_are_accepted() -> None:
    case = make_case(MIXED, 4, 6, 2)
    expected = run(case, 6)
    fused = torch.cat([torch.cat(case.queries), case.new_k, case.new_v], dim=1)
    backend = make_attention_backend("torch", case.pool, 6)
    backend.plan(case.batch)
    assert torch.equal(backend.run(0, fused[:, :6], fused[:, 6:8], fused[:, 8:]), expected)


def test_long_rows_are_cut_into_several_padded_batches() -> None:
    rows = [(1500, 1, True), (3, 1, True), (700, 1, True), (2, 1, True), (1400, 1, True)]
    case = make_case(rows, 16, 2, 1)
    torch.testing.assert_close(run(case, 2).double(), dense(case), atol=1e-5, rtol=1e-5)


def test_unknown_names_are_refused() -> None:
    pool = KVPool(1, 1, 1, 2, 4, torch.float32)
    with pytest.raises(ConfigError, match="--attention-backend: expected one of auto, flashinfer, triton, torch, cpu, got 'fa4'"):
        make_attention_backend("fa4", pool, 2)
    with pytest.raises(AssertionError, match="multiple of num_kv_heads = 2, got 3"):
        make_attention_backend("torch", pool, 3)


# tokens of a prompt of 8 behind a prefix of 4; where its queries are cut
@pytest.mark.parametrize(
    ("not_finite", "number", "starts"),
    [
        (range(8), torch.nan, [0]),
        (range(3, 8), torch.nan, [0, 3]),
        ([3, 6], torch.nan, [0, 3]),
        ([3, 6], torch.inf, [0, 3, 6]),
    ],
)
def test_a_prompt_without_numbers_is_not_cut_into_its_tokens(
    not_finite: Sequence[int], number: float, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([(12, 8, False), (9, 5, False)], 4, 4, 2)
    expected = run(case, 4)
    case.new_k[list(not_finite)] = number
    backend, done = TorchBackend(case.pool, 4), []
    extend = backend._extend
    monkeypatch.setattr(backend, "_extend", lambda row, *rest: (done.append(row.start), extend(row, *rest))[1])
    backend.plan(case.batch)
    out = backend.run(0, torch.cat(case.queries), case.new_k, case.new_v)
    assert done == [*starts, 8]
    for tokens in (slice(0, not_finite[0]), slice(8, 13)):
        torch.testing.assert_close(out[tokens], expected[tokens])
    if number != number:
        assert bool(out[not_finite[0] : 8].isnan().all())
