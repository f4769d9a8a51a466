"""How much FlashInfer's partial results take, before any plan asks for them, and where keys are cut when they are cut at fixed places.

The planner (scheduler.cuh, PrefillPlan) reserves a tile of queries' results in float32 for each part that a row's keys are cut into. It
limits their number by the GPU's multiprocessors only where it chooses the cuts itself. With fixed cuts it takes what the rows' lengths make
of them, and for a CUDA graph a tile a row and more; what does not fit is an error of the step. So both are counted at start.
"""

from typing import NamedTuple

WORKSPACE_BYTES = 128 << 20  # FlashInfer's own advice: for all that it cuts itself
MAX_FIXED_BYTES = 512 << 20  # for fixed cuts; beyond it they lie farther apart
_ALIGNMENT = 256


class Workspace(NamedTuple):
    num_bytes: int  # on the device
    fixed_split_pages: int | None  # pages of a row's keys up to each cut; None: the planner cuts


def size_workspace(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    num_rows: int,
    pages_per_row: int,
    num_graph_rows: int,
    fixed_split_pages: int | None,
) -> Workspace:
    """num_rows: decode rows of a step, at most, each of at most pages_per_row. num_graph_rows: of the largest CUDA graph, 0 for none."""
    group = num_heads // num_kv_heads
    tile = _queries_of_tile(group, head_dim)

    def size(num_tiles: int) -> int:
        num_queries = -(-num_tiles * tile // group)
        return num_heads * num_queries * (head_dim + 1) * 4 + 2 * _ALIGNMENT

    if fixed_split_pages is None:
        # a grid of one size for all batches: as if queries lay across rows in the worst way
        num_tiles = -(-num_graph_rows * group // tile) + num_graph_rows - 1
        return Workspace(max(WORKSPACE_BYTES, size(num_tiles) if num_graph_rows else 0), None)
    # graphs do not cut then
    most_cuts = max(1, MAX_FIXED_BYTES // (num_rows * size(1)))
    split_pages = max(fixed_split_pages, -(-pages_per_row // most_cuts))
    num_cuts = -(-pages_per_row // split_pages)
    return Workspace(max(WORKSPACE_BYTES, size(num_rows * num_cuts) if num_cuts > 1 else 0), split_pages)


def _queries_of_tile(group: int, head_dim: int) -> int:
    """FA2DetermineCtaTileQ for one token a row: its heads of one KV head are what a tile holds."""
    if group <= 16:
        return 16
    return 128 if group > 64 and head_dim < 256 else 64
