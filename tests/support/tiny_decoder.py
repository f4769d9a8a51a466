"""The smallest model that obeys the Decoder contract and whose tokens depend on every earlier token and on its position."""

import torch

from radixserve.attention import AttentionBackend, ForwardBatch


class TinyDecoder:
    """Random weights: two attention layers, grouped-query, sinusoidal positions, a head of its own."""

    num_layers, num_heads, num_kv_heads, head_dim, vocab_size = 2, 4, 2, 8, 97

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        hidden = self.num_heads * self.head_dim
        self._embedding = torch.randn(self.vocab_size, hidden, generator=generator)
        num_heads_of_all = self.num_heads + 2 * self.num_kv_heads
        self._qkv = torch.randn(self.num_layers, num_heads_of_all * self.head_dim, hidden, generator=generator) / hidden**0.5 * 2
        self._head = torch.randn(self.vocab_size, hidden, generator=generator) / hidden**0.5 * 3
        self._mlp = torch.randn(self.num_layers, hidden, hidden, generator=generator) / hidden**0.5

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        x = self._embedding[batch.input_ids]
        frequencies = 0.5 ** torch.arange(x.shape[1])
        x = x + torch.sin(batch.positions[:, None] * frequencies * 2)
        for layer in range(self.num_layers):
            normed = x / x.square().mean(-1, keepdim=True).sqrt()
            heads = (normed @ self._qkv[layer].T).view(len(x), -1, self.head_dim)
            q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            x = 0.3 * x + 2 * attention.run(layer, q, k, v).flatten(1)
            x = x + torch.tanh(x @ self._mlp[layer].T)
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._head.T
