"""The small pieces of a decoder layer. Each matches transformers' arithmetic, roundings included, so that tokens can be compared."""

import math
from functools import cached_property

import torch

from radixserve.models.config import Llama3RopeScaling, ModelConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., d] in any float type, weight [d] or broadcastable to x. Computed in float32, rounded to x's type before the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def inverse_frequencies(head_dim: int, theta: float, scaling: Llama3RopeScaling | None) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each rotary pair."""
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling is None:
        return inv_freq
    low_wavelen = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high_wavelen = scaling.original_max_position_embeddings / scaling.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    smooth = (scaling.original_max_position_embeddings / wavelen - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    stretched = torch.where(wavelen > low_wavelen, inv_freq / scaling.factor, inv_freq)
    is_medium = (wavelen >= high_wavelen) & (wavelen <= low_wavelen)
    return torch.where(is_medium, blended, stretched)


class RotaryTable:
    """cos and sin of every position, computed once: a position's values then never depend on the batch that asks for them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * inv_freq
        self.table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype=dtype, device=device)

    @cached_property
    def wide(self) -> torch.Tensor:
        """[max_position_embeddings, head_dim] float32: the same values, for kernels that want them so."""
        return self.table.float()

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [n] int64 -> cos, sin [n, 1, head_dim / 2], ready to broadcast over heads."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [n, heads, head_dim] rotated in the half-split layout: dimension i is paired with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
