"""Decoder: one forward for Llama, Mistral, Qwen2 and Qwen3, which differ by fields of ModelConfig alone.

Knows nothing of requests, pages or sampling: tokens and positions come in a ForwardBatch, attention is an argument.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch
from radixserve.models.config import ModelConfig
from radixserve.models.layers import RotaryTable
from radixserve.models.ops import Rotate, choose_ops
from radixserve.models.rank_group import RankGroup


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
    """The model of one process. Immutable after loading; needs no autograd, so call it under torch.inference_mode().

    With a group it is one rank's part (models/sharding.py): config and weights are that part's, and all ranks call forward and
    compute_logits with the same rows.
    """

    linear_backend = "torch"
    quantization = "none"

    def __init__(self, config: ModelConfig, weights: DecoderWeights, group: RankGroup | None = None) -> None:
        self.config = config
        self.weights = weights
        self._group = group
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._rotary = RotaryTable(config, self.dtype, self.device)
        self._ops = choose_ops(config, self._rotary, self.dtype, self.device)

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
        hidden = self._embed(batch.input_ids)
        ops, layers = self._ops, self.weights.layers
        rotate = ops.rotation(self._rotary, batch.positions)
        normed = ops.rms_norm(hidden, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            attended = self._attend(index, layer, normed, rotate, attention)
            normed = ops.add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
            next_norm = layers[index + 1].input_norm if index + 1 < len(layers) else self.weights.final_norm
            mlp = self._sum(F.linear(ops.silu_and_mul(F.linear(normed, layer.gate_up)), layer.down))
            normed = ops.add_rms_norm(mlp, hidden, next_norm, eps)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32; on ranks other than 0 only a part comes back, of no use to anybody."""
        logits = F.linear(hidden, self.weights.lm_head)
        if self._group is not None:
            logits = self._group.gather(logits)[:, : self.config.vocab_size]
        return logits.float()

    def seconds(self) -> tuple[float, float, float, float]:
        """Torch's operations are not timed one by one: see PackedDecoder.seconds."""
        return 0.0, 0.0, 0.0, 0.0

    def attends_natively(self, attention: AttentionBackend) -> bool:
        """See PackedDecoder.attends_natively."""
        return False

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] int64 -> [n, hidden_size]"""
        embedding = self.weights.embedding
        if self._group is None:
            return F.embedding(ids, embedding)
        local = ids - self._group.rank * embedding.shape[0]
        is_elsewhere = (local < 0) | (local >= embedding.shape[0])
        hidden = F.embedding(local.masked_fill(is_elsewhere, 0), embedding)
        return self._group.sum(hidden.masked_fill_(is_elsewhere[:, None], 0.0))

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        return part if self._group is None else self._group.sum(part)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        rotate: Rotate,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        # heads of q, k and v side by side: [n, num_heads + 2 num_kv_heads, head_dim]
        heads = F.linear(hidden, layer.qkv, layer.qkv_bias).view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            qk = self._ops.qk_norm(qk, layer.qk_norm, config.num_heads, config.rms_norm_eps)
        qk = rotate(qk, config.num_heads)
        attended = attention.run(index, qk[:, : config.num_heads], qk[:, config.num_heads :], v)
        return self._sum(F.linear(attended.reshape(-1, config.num_heads * config.head_dim), layer.output))
