"""CpuBackend against dense attention in float64, and its bits against each other: alone, in a batch, in chunks, shared, on two threads."""

import itertools
import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from radixserve.attention.cpu_backend import CpuBackend
from radixserve.core import PageWrite, ScheduledBatch, ScheduledRow
from radixserve.kv import KVPool, PageTable
from radixserve.runner.batch_builder import build_forward_batch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@dataclass
class Sequence:
    """Numbers of one sequence and the pages where they lie or will lie."""

    q: torch.Tensor  # [n, num_heads, head_dim]
    k: torch.Tensor  # [n, num_kv_heads, head_dim]
    v: torch.Tensor
    pages: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.k)


class World:
    """A pool in which every place that no sequence has written is NaN, page 0 included."""

    def __init__(
        self, num_pages: int, page_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype = torch.bfloat16, seed: int = 5
    ) -> None:
        self.heads, self.head_dim, self.dtype = heads, head_dim, dtype
        self.pool = KVPool(1, num_pages, page_size, heads[1], head_dim, dtype)
        self.pool.k(0).fill_(math.nan)
        self.pool.v(0).fill_(math.nan)
        self.free = random.Random(seed).sample(range(1, num_pages + 1), num_pages)
        self.generator = torch.Generator().manual_seed(seed)

    def sequence(self, length: int, prefix: Sequence | None = None, num_shared: int = 0) -> Sequence:
        """Of `length` tokens; the first num_shared of them, whole pages, are those of `prefix`."""
        page_size = self.pool.page_size
        assert num_shared % page_size == 0
        made = Sequence(*(self._random(length, heads) for heads in (self.heads[0], self.heads[1], self.heads[1])))
        if prefix is not None:
            made.k[:num_shared], made.v[:num_shared] = prefix.k[:num_shared], prefix.v[:num_shared]
            made.pages = prefix.pages[: num_shared // page_size]
        made.pages = made.pages + [self.free.pop() for _ in range(-(-length // page_size) - len(made.pages))]
        return made

    def _random(self, length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, self.head_dim, generator=self.generator).to(self.dtype)

    def put(self, sequence: Sequence, start: int, end: int) -> None:
        for position in range(start, end):
            page, offset = sequence.pages[position // self.pool.page_size], position % self.pool.page_size
            self.pool.k(0)[page, offset] = sequence.k[position]
            self.pool.v(0)[page, offset] = sequence.v[position]

    def step(
        self, rows: list[tuple[Sequence, int, int]], *, reads_shared_once: bool = True, expect_shared: bool | None = None
    ) -> list[torch.Tensor]:
        """Run rows (sequence, start, end), decode rows first; one result per row."""
        page_size = self.pool.page_size
        table = PageTable(len(rows), max(len(sequence.pages) for sequence, _, _ in rows), page_size)
        scheduled = []
        for slot, (sequence, start, end) in enumerate(rows):
            table.write(slot, PageWrite(0, array("i", sequence.pages[: -(-end // page_size)])))
            token_ids = array("i") if end - start == 1 else array("i", [0] * (end - start))
            scheduled.append(ScheduledRow(slot, start, end - start, token_ids))
        last_ids = torch.zeros(len(rows), dtype=torch.int64)
        batch = build_forward_batch(ScheduledBatch(0, tuple(scheduled)), table, last_ids, self.pool.device)
        backend = CpuBackend(self.pool, self.heads[0], reads_shared_once=reads_shared_once)
        backend.plan(batch)
        if expect_shared is not None:
            assert (backend.num_shared_tiles > 0) == expect_shared
        # as the decoder hands them over: views of one tensor
        fused = torch.cat([torch.cat([s.q[a:b], s.k[a:b], s.v[a:b]], dim=1) for s, a, b in rows])
        h, kv = self.heads
        out = backend.run(0, fused[:, :h], fused[:, h : h + kv], fused[:, h + kv :])
        return list(out.split([end - start for _, start, end in rows]))

    def dense(self, sequence: Sequence, start: int, end: int) -> torch.Tensor:
        """[end - start, num_heads, head_dim] float64"""
        group = self.heads[0] // self.heads[1]
        k, v = (x[:end].double().repeat_interleave(group, dim=1) for x in (sequence.k, sequence.v))
        scores = torch.einsum("qhd,khd->hqk", sequence.q[start:end].double(), k) / math.sqrt(self.head_dim)
        future = torch.arange(end)[None] > torch.arange(start, end)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check_mixed_step(world: World) -> None:
    """Decode rows and chunks of every kind in one step, some of them over the same prefix."""
    page_size = world.pool.page_size
    shared = 512 // page_size * page_size + page_size  # a block or two, and an end inside the next
    base = world.sequence(shared + 5)
    world.put(base, 0, len(base) - 1)
    rows = [(base, len(base) - 1, len(base))]
    for length in (1, 2, 255, 256, 257, 700):
        rows.append((world.sequence(length), length - 1, length))
    for length in (shared + 1, shared + 40, shared + 300):
        rows.append((world.sequence(length, base, shared), length - 1, length))
    for start, end in ((0, 2), (0, 300), (250, 259), (300, 333), (511, 514)):
        rows.append((world.sequence(end), start, end))
    rows.append((world.sequence(shared + 50, base, shared), shared, shared + 50))
    for sequence, start, _ in rows[1:]:
        world.put(sequence, 0, start)
    for (sequence, start, end), out in zip(rows, world.step(rows, expect_shared=True)):
        tolerance = TOLERANCE[world.dtype]
        torch.testing.assert_close(out.double(), world.dense(sequence, start, end), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_dense_attention(page_size: int, dtype: torch.dtype, threads: int) -> None:
    check_mixed_step(World(10000 // page_size, page_size, (6, 2), 64, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", [8, 80, 96, 128, 256])
def test_any_head(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    world = World(1000, 1, heads, head_dim, dtype)
    rows = [(world.sequence(300), 299, 300), (world.sequence(290), 250, 290)]
    for sequence, start, _ in rows:
        world.put(sequence, 0, start)
    for (sequence, start, end), out in zip(rows, world.step(rows)):
        torch.testing.assert_close(out.double(), world.dense(sequence, start, end), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_page_size_that_does_not_divide_the_block() -> None:
    check_mixed_step(World(3000, 6, (6, 2), 64, torch.float32))


def test_writes_this_steps_keys_and_nothing_else() -> None:
    world = World(100, 4, (6, 2), 64)
    sequence = world.sequence(30)
    world.put(sequence, 0, 20)
    before = world.pool.k(0).clone()
    world.step([(sequence, 20, 30)])
    expected = before.flatten(0, 1)
    for position in range(20, 30):
        expected[sequence.pages[position // 4] * 4 + position % 4] = sequence.k[position]
    torch.testing.assert_close(world.pool.k(0).flatten(0, 1), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(dtype: torch.dtype, head_dim: int, threads: int) -> None:
    world = World(3000, 1, (9, 3), head_dim, dtype)
    sequence = world.sequence(700)
    (whole,) = world.step([(sequence, 0, 700)])
    for cuts in ([0, 1, 2, 5, 38, 255, 256, 257, 600, 699, 700], [0, 256, 512, 700], [0, 333, 700]):
        pieces = [world.step([(sequence, start, end)])[0] for start, end in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), whole), cuts


@pytest.mark.parametrize("head_dim", [34, 96])
@pytest.mark.parametrize("group", [1, 2, 5, 6, 7, 11, 12, 13])
def test_bits_of_few_queries_are_those_of_many(group: int, head_dim: int) -> None:
    """Up to twelve rows of queries are multiplied with the pool's rows where they lie, more with packed ones."""
    world = World(400, 1, (2 * group, 2), head_dim)
    sequence = world.sequence(300)
    (whole,) = world.step([(sequence, 0, 300)])
    for end in (1, 2, 17, 31, 255, 256, 257, 289, 300):
        assert torch.equal(world.step([(sequence, end - 1, end)])[0], whole[end - 1 : end]), end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_batch_its_groups_or_threads(dtype: torch.dtype) -> None:
    """A tree of prefixes: all rows share 300 tokens, half of them 900, two 1100; each decodes alone, in the batch, shared or not."""
    world = World(20000, 1, (9, 3), 64, dtype)
    base = world.sequence(1100)
    world.put(base, 0, 1100)
    half = world.sequence(1300, base, 300)
    world.put(half, 0, 1300)
    decoding = [world.sequence(n, base, s) for n, s in ((1101, 1100), (1500, 1099), (1025, 900), (901, 900), (301, 300), (1024, 300))]
    decoding += [world.sequence(n, half, s) for n, s in ((1301, 1300), (1340, 1280), (512, 511), (513, 512))]
    decoding += [world.sequence(n) for n in (1, 2, 800)]
    chunks = [(world.sequence(1200, base, 1100), 1100, 1200), (world.sequence(70), 0, 70)]
    rows = [(sequence, len(sequence) - 1, len(sequence)) for sequence in decoding] + chunks
    for sequence, start, _ in rows:
        world.put(sequence, 0, start)
    torch.set_num_threads(2)
    shared = world.step(rows, expect_shared=True)
    flat = world.step(rows, reads_shared_once=False, expect_shared=False)
    torch.set_num_threads(1)
    alone = [world.step([row], expect_shared=False)[0] for row in rows]
    for i, row in enumerate(rows):
        assert torch.equal(shared[i], flat[i]) and torch.equal(shared[i], alone[i]), (i, row[1:])
        torch.testing.assert_close(shared[i].double(), world.dense(*row), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_group_larger_than_a_tile() -> None:
    world = World(2000, 4, (6, 1), 32)
    base = world.sequence(600)
    world.put(base, 0, 600)
    rows = [(world.sequence(600 + 1 + i, base, 600), 600 + i, 600 + 1 + i) for i in range(40)]
    for sequence, start, _ in rows:
        world.put(sequence, 0, start)
    for row, shared, flat in zip(rows, world.step(rows, expect_shared=True), world.step(rows, reads_shared_once=False)):
        assert torch.equal(shared, flat)
        torch.testing.assert_close(shared.double(), world.dense(*row), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_that_is_nan_reaches_all_that_see_it_and_nobody_else(dtype: torch.dtype) -> None:
    """Values are whole, so that nothing but the key's own score can tell; also where it is the only key of its block."""
    world = World(1000, 1, (6, 2), 64, dtype)
    sequence = world.sequence(600)
    (clean,) = world.step([(sequence, 0, 600)])
    # with bits in its payload that arithmetic on exponents must not read as numbers
    nan = torch.tensor([0x7FC001FF], dtype=torch.int32).view(torch.float32).to(dtype)
    for place in (0, 200, 256, 599):
        kept = sequence.k[place].clone()
        sequence.k[place, 0, 3] = nan
        rows = [(sequence, 0, 600)] + [(sequence, end - 1, end) for end in {place + 1, 600}]
        for row in rows:
            (got,) = world.step([row])
            expected = clean[row[1] : row[2]].clone()
            expected[max(0, place - row[1]) :, :3] = math.nan
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        sequence.k[place] = kept
        world.put(sequence, 0, 600)


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, (6, 2)), (torch.bfloat16, (6, 2)), (torch.bfloat16, (16, 1))])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_value_changes_a_bit_of_what_comes_before_it(dtype: torch.dtype, heads: tuple[int, int], bad: float) -> None:
    world = World(1000, 1, heads, 64, dtype)
    sequence = world.sequence(600)
    (clean,) = world.step([(sequence, 0, 600)])
    for place in (0, 1, 31, 200, 256, 541, 599):
        kept = sequence.v[place].clone()
        sequence.v[place] = bad
        for start in {0, max(0, place - 3), max(0, place - 40)}:
            (got,) = world.step([(sequence, start, 600)])
            assert torch.equal(got[: place - start], clean[start:place])
            assert not got[place - start :].isfinite().any()
        sequence.v[place] = kept
        world.put(sequence, 0, 600)


def test_what_is_no_pool_for_it_is_refused() -> None:
    with pytest.raises(AssertionError, match="at most 1024 heads to a KV head, got 1025"):
        CpuBackend(KVPool(1, 1, 1, 1, 4, torch.float32), 1025)
    with pytest.raises(AssertionError, match="multiple of num_kv_heads = 2, got 3"):
        CpuBackend(KVPool(1, 1, 1, 2, 4, torch.float32), 3)
    with pytest.raises(AssertionError, match=r"got torch\.float16 on cpu"):
        CpuBackend(KVPool(1, 1, 1, 2, 4, torch.float16), 2)
