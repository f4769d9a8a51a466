"""Decoder: one forward for Llama, Mistral, Qwen2 and Qwen3, which differ by fields of ModelConfig alone.

Knows nothing of requests, pages or sampling: tokens and positions come in a ForwardBatch, attention is an argument.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch
from radixserve.models.config import ModelConfig
from radixserve.models.layers import RotaryTable, apply_rotary, rms_norm


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Q = num_heads * head_dim, KV = num_kv_heads * head_dim; linear weights are [out, in]."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [Q + 2 KV, hidden]: q rows, then k, then v
    qkv_bias: torch.Tensor | None  # [Q + 2 KV]
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]: q's weight repeated per head, then k's
    output: torch.Tensor  # [hidden, Q]
    post_attention_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 intermediate, hidden]: gate rows, then up
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]; the embedding itself when tied


class Decoder:
    """The model of one process. Immutable after loading; needs no autograd, so call it under torch.inference_mode()."""

    linear_backend = "torch"
    quantization = "none"

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._rotary = RotaryTable(config, self.dtype, self.device)

    @property
    def size_bytes(self) -> int:
        """Memory of the weights, a tied head counted once."""
        tensors: list[torch.Tensor | None] = [self.weights.embedding, self.weights.final_norm]
        if self.weights.lm_head is not self.weights.embedding:
            tensors.append(self.weights.lm_head)
        for layer in self.weights.layers:
            tensors += [layer.input_norm, layer.qkv, layer.qkv_bias, layer.qk_norm, layer.output]
            tensors += [layer.post_attention_norm, layer.gate_up, layer.down]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """[num_tokens, hidden_size] after the final norm. The caller has called attention.plan(batch)."""
        eps = self.config.rms_norm_eps
        hidden = F.embedding(batch.input_ids, self.weights.embedding)
        cos, sin = self._rotary.at(batch.positions)
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(hidden, layer.input_norm, eps)
            hidden += self._attend(index, layer, normed, cos, sin, attention)  # in place: fresh memory costs more than the sum
            normed = rms_norm(hidden, layer.post_attention_norm, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden += F.linear(F.silu(gate).mul_(up), layer.down)
        return rms_norm(hidden, self.weights.final_norm, eps)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32."""
        return F.linear(hidden, self.weights.lm_head).float()

    def seconds(self) -> tuple[float, float, float, float]:
        """Torch's operations are not timed one by one: see PackedDecoder.seconds."""
        return 0.0, 0.0, 0.0, 0.0

    def attends_natively(self, attention: AttentionBackend) -> bool:
        """See PackedDecoder.attends_natively."""
        return False

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        # heads of q, k and v side by side: [n, num_heads + 2 num_kv_heads, head_dim]
        heads = F.linear(hidden, layer.qkv, layer.qkv_bias).view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, config.rms_norm_eps)
        qk = apply_rotary(qk, cos, sin)
        attended = attention.run(index, qk[:, : config.num_heads], qk[:, config.num_heads :], v)
        return F.linear(attended.reshape(-1, config.num_heads * config.head_dim), layer.output)
