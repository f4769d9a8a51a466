"""bench.kernels: what it calls this machine's limit is one."""

import time

import pytest
import torch

from bench.kernels import linear_rate, product_rate
from radixserve.models.packed_decoder import can_compute


def test_no_library_multiplies_faster_than_the_limit() -> None:
    if not can_compute(torch.bfloat16):
        pytest.skip("no native products of bfloat16 here")
    limit = product_rate(time.thread_time, num_threads=1)
    assert 0.9 * linear_rate(time.thread_time) < limit
    assert product_rate(time.perf_counter, num_threads=2) > 0.1 * limit  # other work may have the cores
