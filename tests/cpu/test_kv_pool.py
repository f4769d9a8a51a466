"""KVPool: shape, size, and where a write lands."""

import pytest
import torch

from radixserve.kv import KVPool, bytes_per_token
from tests.support.flashinfer_reference import FP8, fp8_numbers, nearest_fp8


def test_write_lands_in_the_named_places_only() -> None:
    pool = KVPool(num_layers=2, num_pages=3, page_size=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
    k, v = torch.arange(1, 9.0).view(2, 1, 4), torch.arange(11, 19.0).view(2, 1, 4)
    pool.write(1, torch.tensor([6, 3]), k, v)
    assert pool.k(1).shape == (4, 2, 1, 4)
    assert torch.equal(pool.k(1)[3, 0], k[0])
    assert torch.equal(pool.k(1)[1, 1], k[1])
    assert torch.equal(pool.v(1)[3, 0], v[0])
    assert pool.k(1).count_nonzero() == pool.v(1).count_nonzero() == 8
    assert pool.k(0).count_nonzero() == pool.v(0).count_nonzero() == 0


def test_size_counts_every_tensor() -> None:
    pool = KVPool(num_layers=3, num_pages=5, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert pool.size_bytes == sum(pool.k(layer).nbytes + pool.v(layer).nbytes for layer in range(3))
    assert pool.bytes_per_token == bytes_per_token(3, 2, 8, torch.bfloat16) == 3 * 2 * 2 * 8 * 2


def test_wrong_shape_or_dtype_is_refused() -> None:
    pool = KVPool(1, 2, 1, 1, 4, torch.float32)
    good = torch.zeros(1, 1, 4)
    with pytest.raises(AssertionError, match=r"expected k and v of shape \(1, 1, 4\)"):
        pool.write(0, torch.tensor([1]), good, torch.zeros(1, 2, 4))
    with pytest.raises(AssertionError, match=r"expected k and v in torch\.float32"):
        pool.write(0, torch.tensor([1]), good, good.bfloat16())
    with pytest.raises(AssertionError, match="expected num_pages >= 1, got 0"):
        KVPool(1, 0, 1, 1, 4, torch.float32)


def test_numbers_of_8_bits_are_the_nearest_ones() -> None:
    """Against the format's own definition: ties to even, what is too large as the largest, half of the bytes."""
    pool = KVPool(1, 200, 4, 2, 8, torch.bfloat16, stored_dtype=FP8)
    assert pool.bytes_per_token == 2 * 2 * 8 and pool.dtype == torch.bfloat16 and pool.k(0).dtype == FP8
    generator = torch.Generator().manual_seed(0)
    given = (torch.randn(2, 800, 2, 8, generator=generator) * torch.logspace(-4, 4, 800)[:, None, None]).bfloat16()
    given[:, 0] = torch.tensor([0.0, -0.0, 448.0, 464.0, 1e30, -1e30, 17.0, 19.0])  # 17 and 19 lie between 16, 18 and 20
    pool.write(0, torch.arange(4, 804), *given)
    for stored, values in zip((pool.k(0), pool.v(0)), given, strict=True):
        numbers = fp8_numbers()[stored.view(torch.uint8).flatten(0, 1)[4:].long()]
        assert torch.equal(numbers, nearest_fp8(values)) and not bool(numbers.isnan().any())
        assert numbers[0, 0].tolist() == [0.0, -0.0, 448.0, 448.0, 448.0, -448.0, 16.0, 20.0]
    for number in (torch.nan, torch.inf, -torch.inf):
        pool.write(0, torch.tensor([4]), torch.full((1, 2, 8), number).bfloat16(), given[1, :1])
        assert bool(pool.k(0)[1, 0].float().isnan().all()), "what is no number stays none"
