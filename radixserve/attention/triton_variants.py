"""Which variants of the Triton kernels a pool needs: compile-time constants and tiles, for the backend and for who compiles them."""

from dataclasses import dataclass

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MAX_GROUP_SIZE = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """How a variant of the attention kernel is cut and launched."""

    block_m: int  # packed rows: tokens times heads of a group
    block_n: int  # keys read at once
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Variant:
    """Sizes that the kernels know when they are compiled."""

    num_kv_heads: int
    group_size: int  # num_heads / num_kv_heads
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def narrow(self) -> Tile:
        """For decode rows and rows of a few tokens: little to compute, much to read."""
        block_m = max(16, next_power_of_2(self.group_size))
        if self.dtype == torch.float32:
            return Tile(block_m, 32 if self.head_dim <= 64 else 16, 4, 2)
        return Tile(block_m, 32 if self.head_dim > 128 else 64, 4, 3)

    @property
    def wide(self) -> Tile:
        """For prompt chunks. Sizes at which nothing spills (tests/cpu/test_triton_codegen.py); their speed was never measured on a GPU."""
        at_least = next_power_of_2(self.group_size)
        if self.dtype == torch.float32:  # no tensor cores: tiles are registers of plain multiply-adds
            return Tile(max(32, at_least), 32 if self.head_dim <= 64 else 16, 8, 2)
        if self.head_dim > 128:
            return Tile(max(64, at_least), 32, 8, 2)
        return Tile(128, 64, 8, 2) if self.head_dim <= 64 else Tile(128, 32, 8, 3)

    @property
    def write_constants(self) -> dict[str, int]:
        return {**self._heads, "BLOCK": next_power_of_2(self.num_kv_heads * self.head_dim)}

    def attend_constants(self, tile: Tile) -> dict[str, int]:
        blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": self._block_d}
        return {**self._heads, "GROUP_SIZE": self.group_size, "PAGE_SIZE": self.page_size, **blocks}

    @property
    def merge_constants(self) -> dict[str, int]:
        return {**self._heads, "GROUP_SIZE": self.group_size, "BLOCK_G": next_power_of_2(self.group_size), "BLOCK_D": self._block_d}

    @property
    def _heads(self) -> dict[str, int]:
        return {"NUM_KV_HEADS": self.num_kv_heads, "HEAD_DIM": self.head_dim}

    @property
    def _block_d(self) -> int:
        return max(16, next_power_of_2(self.head_dim))  # 16: the least that a matrix instruction takes


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
