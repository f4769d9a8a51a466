"""The operations between a decoder's matrix products: torch's on any device, FlashInfer's on an NVIDIA GPU, each after it has shown on a
small example that it computes the same.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from radixserve.attention.flashinfer_package import load_flashinfer
from radixserve.errors import ConfigError
from radixserve.kv import device_state
from radixserve.models.config import ModelConfig
from radixserve.models.layers import RotaryTable, apply_rotary, rms_norm

logger = logging.getLogger(__name__)
Rotate = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerOps:
    """What they take they may overwrite, but for weights."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # x [n, d], weight [d], eps
    # x, residual [n, d], weight [d], eps: residual += x, in place; returns its norm
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]  # [n, 2 d]: silu of the first half times the second
    # q and k [n, heads, d], weight [heads, d], number of q heads, eps
    qk_norm: Callable[[torch.Tensor, torch.Tensor, int, float], torch.Tensor]
    # of positions [n] int64: what rotates q and k [n, heads, d], given the number of q heads
    rotation: Callable[[RotaryTable, torch.Tensor], Rotate]


def _torch_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual += x  # in place: fresh memory costs more than the sum
    return rms_norm(residual, weight, eps)


def _torch_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _torch_rotation(table: RotaryTable, positions: torch.Tensor) -> Rotate:
    cos, sin = table.at(positions)
    return lambda qk, num_heads: apply_rotary(qk, cos, sin)


TORCH_OPS = LayerOps(
    rms_norm=rms_norm,
    add_rms_norm=_torch_add_rms_norm,
    silu_and_mul=_torch_silu_and_mul,
    qk_norm=lambda qk, weight, num_heads, eps: rms_norm(qk, weight, eps),
    rotation=_torch_rotation,
)


def flashinfer_ops(flashinfer: Any) -> LayerOps:
    """FlashInfer's, for bfloat16 and float16; compiled by it at the first call where its cache does not have them."""

    def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        flashinfer.fused_add_rmsnorm(x, residual, weight, eps)
        return x

    def qk_norm(qk: torch.Tensor, weight: torch.Tensor, num_heads: int, eps: float) -> torch.Tensor:
        out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
        for heads, first in ((slice(0, num_heads), 0), (slice(num_heads, None), num_heads)):
            flashinfer.rmsnorm(qk[:, heads], weight[first], eps, out=out[:, heads])
        return out

    def rotation(table: RotaryTable, positions: torch.Tensor) -> Rotate:
        def rotate(qk: torch.Tensor, num_heads: int) -> torch.Tensor:
            q, k = qk[:, :num_heads].flatten(1), qk[:, num_heads:].flatten(1)
            assert q.data_ptr() == qk.data_ptr(), "expected the heads of a token side by side: it is rotated in place"
            flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, qk.shape[-1], table.wide)
            return qk

        return rotate

    return LayerOps(
        rms_norm=lambda x, weight, eps: flashinfer.rmsnorm(x, weight, eps),
        add_rms_norm=add_rms_norm,
        silu_and_mul=lambda gate_up: flashinfer.silu_and_mul(gate_up),
        qk_norm=qk_norm,
        rotation=rotation,
    )


def choose_ops(config: ModelConfig, table: RotaryTable, dtype: torch.dtype, device: torch.device) -> LayerOps:
    """FlashInfer's where it is installed and right here; torch's for each that is not, with a line that says so."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return TORCH_OPS
    try:
        ops = flashinfer_ops(load_flashinfer())
    except ConfigError as error:
        logger.warning("norms, rotary and activation run on plain torch, slower: %s", error.message)
        return TORCH_OPS
    return checked_ops(ops, config, table, dtype, device)


@torch.inference_mode()
def checked_ops(ops: LayerOps, config: ModelConfig, table: RotaryTable, dtype: torch.dtype, device: torch.device) -> LayerOps:
    """`ops`, each that fails or differs from torch's by more than rounding replaced by torch's.

    DeviceError where torch's would fail too, since the device is gone; an allocator's error is the caller's.
    """
    device_state.settle(device, "loading the model")
    for field in fields(LayerOps):
        try:
            one = _example(field.name, ops, config, table, dtype, device)
            device_state.synchronize(device)
            other = _example(field.name, TORCH_OPS, config, table, dtype, device)
            torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)
        except Exception as error:  # whatever a compiler, a driver or a kernel raises
            if device_state.is_out_of_memory(error):
                raise
            device_state.check_usable(device, error, f"FlashInfer's {field.name}", "without the package flashinfer-python")
            reason = f"{type(error).__name__}: {device_state.first_line(error)}"
            logger.warning("%s runs on plain torch: FlashInfer's does not work here: %s", field.name, reason)
            ops = replace(ops, **{field.name: getattr(TORCH_OPS, field.name)})
    return ops


def _example(name: str, ops: LayerOps, config: ModelConfig, table: RotaryTable, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same numbers for whichever ops; all that the operation writes."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    n, num_heads = 3, config.num_heads
    x, weight, eps = random(n, config.hidden_size), random(config.hidden_size), config.rms_norm_eps
    # heads as a view of a fused projection, as a layer hands them over
    heads = random(n, num_heads + 2 * config.num_kv_heads, config.head_dim)[:, : num_heads + config.num_kv_heads]
    if name == "rms_norm":
        return ops.rms_norm(x, weight, eps)
    if name == "add_rms_norm":
        residual = random(n, config.hidden_size)
        return torch.cat([ops.add_rms_norm(x, residual, weight, eps), residual])
    if name == "silu_and_mul":
        return ops.silu_and_mul(random(n, 2 * config.intermediate_size))
    if name == "qk_norm":
        by_head = torch.cat([random(1, config.head_dim).expand(num_heads, -1), random(1, config.head_dim).expand(config.num_kv_heads, -1)])
        return ops.qk_norm(heads, by_head, num_heads, eps)
    assert name == "rotation", name
    positions = torch.tensor([0, 1, config.max_position_embeddings - 1], device=device)
    return ops.rotation(table, positions)(heads, num_heads)
