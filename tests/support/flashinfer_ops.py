"""FlashInfer's norms, rotary and activation on the CPU: its own functions; in place of their compiled modules stands float64 torch that
checks what it is given.
"""

import types

import pytest
import torch

from radixserve.models.ops import LayerOps, flashinfer_ops


def install_ops(patch: pytest.MonkeyPatch) -> LayerOps:
    """Until the patch is undone."""
    import flashinfer
    import flashinfer.activation
    import flashinfer.norm
    import flashinfer.rope

    norm = types.SimpleNamespace(rmsnorm=_rmsnorm, fused_add_rmsnorm=_fused_add_rmsnorm)
    patch.setattr(flashinfer.norm, "get_norm_module", lambda: norm)
    patch.setattr(flashinfer.norm, "_use_cuda_norm", lambda device: True)
    activation = types.SimpleNamespace(silu_and_mul=_silu_and_mul)
    patch.setattr(flashinfer.activation, "get_act_and_mul_module", lambda name: activation)
    rope = types.SimpleNamespace(apply_rope_pos_ids_cos_sin_cache=_rope)
    patch.setattr(flashinfer.rope, "get_rope_module", lambda: rope)
    return flashinfer_ops(flashinfer)


def _rmsnorm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool) -> None:
    assert x.dim() in (2, 3) and weight.shape == x.shape[-1:] and x.stride(-1) == out.stride(-1) == weight.stride(-1) == 1
    wide = x.double()
    out.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double())


def _fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool) -> None:
    assert x.dim() == residual.dim() == 2 and x.shape == residual.shape and x.dtype == residual.dtype == weight.dtype
    residual.add_(x)
    _rmsnorm(x, residual, weight, eps, pdl)


def _silu_and_mul(out: torch.Tensor, x: torch.Tensor, pdl: bool) -> None:
    assert x.is_contiguous() and out.is_contiguous()
    gate, up = x.double().chunk(2, dim=-1)
    out.copy_(gate * gate.sigmoid() * up)


def _rope(
    q: torch.Tensor, k: torch.Tensor, q_out: torch.Tensor, k_out: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, inter: bool
) -> None:
    assert table.dtype == torch.float32 and table.is_contiguous() and positions.is_contiguous() and not inter
    assert q.dim() == k.dim() == 3 and q.stride(-1) == k.stride(-1) == 1 and len(q) == len(k) == len(positions)
    cos, sin = table[positions].double()[:, None].chunk(2, dim=-1)
    for x, out in ((q, q_out), (k, k_out)):
        first, second = x.double().chunk(2, dim=-1)
        out.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
