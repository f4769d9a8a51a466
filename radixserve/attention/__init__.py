"""Attention over paged K and V: one description of a step (ForwardBatch), one contract (AttentionBackend), several kernels."""

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch
from radixserve.attention.registry import make_attention_backend

__all__ = ["AttentionBackend", "ForwardBatch", "make_attention_backend"]
