"""FlashInferBackend through FlashInfer's own wrappers, over the checking reference, against dense float64 attention in a poisoned pool."""

import inspect
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixserve.attention.decode_groups import SharingCost
from radixserve.attention.flashinfer_workspace import WORKSPACE_BYTES, size_workspace
from radixserve.core import PageWrite, ScheduledBatch, ScheduledRow
from radixserve.errors import ConfigError
from radixserve.kv import KVPool, PageTable
from radixserve.runner.batch_builder import build_forward_batch
from tests.cpu.test_torch_backend import MIXED, ROWS, TOLERANCE, Case, dense, make_case
from tests.support.flashinfer_reference import FP8, Reference, nearest_fp8, reserve

flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (make install does it)")

from radixserve.attention.flashinfer_backend import FlashInferBackend  # noqa: E402

ALWAYS = SharingCost(bytes_per_s=0.0)
BF16 = torch.bfloat16


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Reference:
    made = Reference()
    made.install(monkeypatch)
    return made


def run(case: Case, num_heads: int, **options: Any) -> torch.Tensor:
    case.pool.k(0)[0] = case.pool.v(0)[0] = 0.0  # the padding page is never NaN in a real pool
    backend = FlashInferBackend(case.pool, num_heads, **options)
    backend.plan(case.batch)
    return backend.run(0, torch.cat(case.queries), case.new_k, case.new_v)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(6, 2), (7, 1)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_equals_dense_attention(reference: Reference, rows: list[tuple[int, int, bool]], page_size: int, heads: tuple[int, int]) -> None:
    case = make_case(rows, page_size, *heads, BF16)
    out = run(case, heads[0], cost=None)
    torch.testing.assert_close(out.double(), dense(case), atol=TOLERANCE[BF16], rtol=TOLERANCE[BF16])
    kinds = {is_decode for _, _, is_decode in rows}
    assert len(reference.plans) == reference.num_runs == len(kinds)


def test_half_precision_and_only_that(reference: Reference) -> None:
    case = make_case(MIXED, 4, 6, 2, torch.float16)
    out = run(case, 6)
    torch.testing.assert_close(out.double(), dense(case), atol=TOLERANCE[torch.float16], rtol=TOLERANCE[torch.float16])
    with pytest.raises(AssertionError, match="float32"):
        run(make_case(MIXED, 4, 6, 2), 6)


def stored_in_fp8(case: Case) -> Case:
    """The same step over a pool of 8 bits, NaN where nobody has written, and what its keys and values then are."""
    plain = case.pool
    case.pool = KVPool(1, plain.num_pages, plain.page_size, plain.num_kv_heads, plain.head_dim, plain.dtype, stored_dtype=FP8)
    for stored, given in ((case.pool.k(0), plain.k(0)), (case.pool.v(0), plain.v(0))):
        stored.copy_(given.to(FP8))
        stored[0] = 0.0
    case.keys, case.values = ([nearest_fp8(rows) for rows in of_rows] for of_rows in (case.keys, case.values))
    return case


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_keys_and_values_of_8_bits(reference: Reference, page_size: int, dtype: torch.dtype) -> None:
    """Rounded as they are written, read as they are stored, in every part of a step: prompts, decode rows and what these share."""
    case = make_case([(65, 1, True), (50, 1, True), (33, 5, False), (9, 9, False)], page_size, 6, 2, dtype)
    case.new_k[0, 0, 0] = case.keys[0][-1, 0, 0] = 1000.0  # more than there is
    share_pages(case, 2, 48 // page_size)
    case = stored_in_fp8(case)
    backend = FlashInferBackend(case.pool, 6, cost=ALWAYS)
    backend.plan(case.batch)
    out = backend.run(0, torch.cat(case.queries), case.new_k, case.new_v)
    assert out.dtype == dtype and reference.num_merges == 1
    torch.testing.assert_close(out.double(), dense(case), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_views_of_a_fused_projection_are_accepted(reference: Reference) -> None:
    case = make_case(MIXED, 4, 6, 2, BF16)
    expected = run(case, 6)
    fused = torch.cat([torch.cat(case.queries), case.new_k, case.new_v], dim=1)
    backend = FlashInferBackend(case.pool, 6)
    backend.plan(case.batch)
    assert torch.equal(backend.run(0, fused[:, :6], fused[:, 6:8], fused[:, 8:]), expected)


def test_page_ids_stay_on_the_device_and_offsets_on_the_host(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both are memory like any other, so the tensors themselves are followed."""
    case = make_case(MIXED, 4, 6, 2, BF16)
    seen: list[inspect.BoundArguments] = []
    for wrapper, name in (
        (flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan"),
        (flashinfer.BatchDecodeWithPagedKVCacheWrapper, "plan"),
    ):
        _spy(monkeypatch, wrapper, name, seen)
    run(case, 6)
    assert len(seen) == 2
    table = case.batch.kv_indices.untyped_storage().data_ptr()
    for call in seen:
        given = [value for value in (*call.args[1:], *call.kwargs.values()) if isinstance(value, torch.Tensor)]
        assert [tensor.untyped_storage().data_ptr() == table for tensor in given].count(True) == 1


def _spy(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seen: list[inspect.BoundArguments]) -> None:
    plain = getattr(owner, name)
    # the decode wrapper's plan hides its parameters behind *args
    signature = inspect.signature(getattr(owner, "_plan_impl", plain) if name == "plan" else plain)

    def spied(self: object, *args: Any, **kwargs: Any) -> Any:
        seen.append(signature.bind(self, *args, **kwargs))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, spied)


def test_every_call_binds_to_the_installed_package(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[inspect.BoundArguments] = []
    wrappers = (flashinfer.BatchPrefillWithPagedKVCacheWrapper, flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    for wrapper in wrappers:
        for name in ("__init__", "plan", "run"):
            _spy(monkeypatch, wrapper, name, seen)
    case = make_case([(40, 1, True), (40, 1, True), (33, 5, False)], 4, 6, 2, BF16)
    share_pages(case, 2, 5)
    run(case, 6, cost=ALWAYS, fixed_split_pages=4)
    names = [set(call.arguments) for call in seen]
    assert len(names) == 3 + 3 + 3  # three wrappers made, planned and run
    plans = [call.arguments for call in seen if "q_data_type" in call.arguments]
    assert all(plan["q_data_type"] == plan["kv_data_type"] == BF16 for plan in plans), "float16 where nothing is said"
    assert [plan.get("causal") for plan in plans] == [None, False, True]
    inspect.signature(flashinfer.merge_state_in_place).bind(*[None] * 4)


def share_pages(case: Case, num_rows: int, num_pages: int) -> None:
    """Let decode rows begin with the first row's pages, as after a hit."""
    size, batch = case.batch.page_size, case.batch
    first = batch.kv_indices[:num_pages].clone()
    for row in range(num_rows):
        at = int(batch.kv_indptr[row])
        batch.kv_indices[at : at + num_pages] = first
        batch.kv_indices_host[at : at + num_pages] = first
        case.keys[row][: num_pages * size] = case.keys[0][: num_pages * size]
        case.values[row][: num_pages * size] = case.values[0][: num_pages * size]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_shared_beginning_is_read_once(reference: Reference, page_size: int) -> None:
    case = make_case([(65, 1, True), (50, 1, True), (90, 1, True), (49, 1, True), (33, 5, False)], page_size, 6, 2, BF16)
    share_pages(case, 4, 48 // page_size)
    out = run(case, 6, cost=ALWAYS)
    torch.testing.assert_close(out.double(), dense(case), atol=TOLERANCE[BF16], rtol=TOLERANCE[BF16])
    assert reference.num_merges == 1
    own, shared, extend = reference.plans
    assert own.seq_lens.tolist() == [17, 2, 42, 1]
    assert (shared.qo_indptr.tolist(), shared.seq_lens.tolist(), shared.is_causal) == ([0, 4], [48], False)
    assert extend.seq_lens.tolist() == [33]


def test_two_groups_and_rows_of_none_in_any_order(reference: Reference) -> None:
    case = make_case([(n, 1, True) for n in (20, 9, 25, 12, 31, 18)], 1, 6, 2, BF16)
    for first, other, num_pages in ((0, 4, 15), (2, 5, 10)):
        at, to, n = int(case.batch.kv_indptr[first]), int(case.batch.kv_indptr[other]), num_pages
        for table in (case.batch.kv_indices, case.batch.kv_indices_host):
            table[to : to + n] = table[at : at + n].clone()
        case.keys[other][:n], case.values[other][:n] = case.keys[first][:n], case.values[first][:n]
    out = run(case, 6, cost=ALWAYS)
    torch.testing.assert_close(out.double(), dense(case), atol=TOLERANCE[BF16], rtol=TOLERANCE[BF16])
    own, shared = reference.plans
    assert shared.qo_indptr.tolist() == [0, 2, 4]
    assert own.seq_lens.tolist() == [5, 16, 15, 8, 9, 12]


def test_what_sharing_must_save(reference: Reference) -> None:
    """32 KV bytes times 2 a token here: two rows that share 40 tokens save 40 tokens' worth, no more."""
    case = make_case([(50, 1, True), (50, 1, True)], 1, 6, 2, BF16)
    share_pages(case, 2, 40)
    saved = 40 * 2 * 2 * 16 * 2
    for bytes_per_s, num_plans in ((saved - 1, 2), (saved, 1)):
        reference.plans.clear()
        run(case, 6, cost=SharingCost(bytes_per_s=bytes_per_s, launch_s=1.0, without_graph_s=1.0))
        assert len(reference.plans) == num_plans
    backend = FlashInferBackend(case.pool, 6, cost=SharingCost(bytes_per_s=saved, launch_s=0.5, without_graph_s=0.5))
    assert not backend.prefers_eager(case.batch)
    backend = FlashInferBackend(case.pool, 6, cost=SharingCost(bytes_per_s=saved, launch_s=0.5, without_graph_s=0.4))
    assert backend.prefers_eager(case.batch)


LARGEST = [(256, 131072, 16), (255, 16384, 16), (512, 32768, 1), (3000, 8192, 16)]


@pytest.mark.parametrize("heads", [(32, 8, 128), (40, 40, 128), (64, 64, 128), (9, 3, 64), (32, 1, 128), (71, 1, 64), (16, 16, 256)])
@pytest.mark.parametrize(("num_rows", "context_length", "page_size"), LARGEST)
def test_the_workspace_holds_the_largest_steps(heads: tuple[int, int, int], num_rows: int, context_length: int, page_size: int) -> None:
    """Of --repeatable-attention and of graphs, by the planner's arithmetic (the compiled one agrees: docs/gpu-checks.md), and no more."""
    pages_per_row, num_graph_rows = -(-context_length // page_size), min(num_rows, 512)
    for split in (None, 2048 // page_size):
        largest = {"num_rows": num_rows, "pages_per_row": pages_per_row, "num_graph_rows": num_graph_rows}
        num_bytes, pages = size_workspace(*heads, **largest, fixed_split_pages=split)
        assert num_bytes <= 512 << 20 and (split is None or (pages is not None and pages >= split))
        n = num_graph_rows if split is None else num_rows
        num_cuts = None if pages is None else torch.full((n,), -(-pages_per_row // pages))
        q_lens = torch.ones(n, dtype=torch.int32)
        reserve(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), *heads, q_lens, num_cuts, split is None)
        if num_bytes > WORKSPACE_BYTES:
            with pytest.raises(RuntimeError, match="Buffer overflow"):
                reserve(torch.empty(num_bytes - 1024, dtype=torch.uint8, device="meta"), *heads, q_lens, num_cuts, split is None)


def test_fixed_cuts_of_many_long_rows_need_their_workspace(reference: Reference) -> None:
    """32 heads over 8 of 128: what the 128 MiB that do for all else cannot hold."""
    pool = KVPool(1, 8, 64, 8, 128, BF16)
    table = PageTable(256, 256, 64)
    rows = [ScheduledRow(slot, 256 * 64 - 1, 1, array("i")) for slot in range(256)]
    for row in rows:
        table.write(row.slot, PageWrite(0, array("i", [1, 2, 3, 4, 5, 6, 7, 8] * 32)))
    batch = build_forward_batch(ScheduledBatch(0, tuple(rows)), table, torch.zeros(256, dtype=torch.int64), pool.device)
    with pytest.raises(RuntimeError, match="batch_prefill_tmp_s"):
        FlashInferBackend(pool, 32, cost=None, fixed_split_pages=32).plan(batch)
    size, pages = size_workspace(32, 8, 128, num_rows=256, pages_per_row=256, num_graph_rows=0, fixed_split_pages=32)
    FlashInferBackend(pool, 32, cost=None, fixed_split_pages=pages, workspace_bytes=size).plan(batch)


def test_a_broken_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: the package does not import .*pip install 'radixserve\[gpu\]'"):
        FlashInferBackend(KVPool(1, 1, 1, 2, 64, BF16), 2)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda case: case.batch.kv_indices.fill_(10_000), "outside of the pool"),
        (lambda case: case.batch.kv_last_page_len_host.fill_(5), "the last page has"),
        (lambda case: case.batch.kv_indptr_host[2:3].fill_(0), "offsets rise"),
    ],
)
def test_the_reference_sees_what_a_gpu_would_not(reference: Reference, harm: Callable[[Case], Any], message: str) -> None:
    case = make_case([(20, 1, True), (9, 1, True), (7, 1, True)], 4, 6, 2, BF16)
    harm(case)
    with pytest.raises(AssertionError, match=message):
        run(case, 6)
