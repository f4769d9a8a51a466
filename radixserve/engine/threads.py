"""How many threads compute, torch's and the native kernels' alike: what there is, a container's quota allows, and ranks leave over."""

import os
from collections.abc import Mapping

import torch

from radixserve.processors import num_cores


def limit_threads(num_ranks: int, environment: Mapping[str, str] = os.environ, quota: int | None = None) -> None:
    """Take fewer threads than torch would, never more. Whoever sets OMP_NUM_THREADS has counted for himself, and no quota is looked at."""
    allowed = num_cores()
    if "OMP_NUM_THREADS" not in environment and quota is not None:
        allowed = min(allowed, quota)
    if allowed < num_cores() or num_ranks > 1:
        torch.set_num_threads(min(torch.get_num_threads(), max(1, allowed // num_ranks)))
