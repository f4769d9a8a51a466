"""What one rank of several computes of a model: whole heads, and a part of the MLP and of the vocabulary.

    q, k, v, gate, up    by output rows: each rank has the rows of its heads, or its part of the MLP          no exchange
    o, down              by input columns: each rank's product is a part of the sum                           all-reduce
    embedding, head      by tokens, in equal parts, the last padded: what a rank does not have is 0           all-reduce; gather on rank 0
    norms                whole everywhere
An all-reduce of the hidden states after each is all that the ranks exchange in a layer.
"""

from dataclasses import replace

from radixserve.errors import ConfigError
from radixserve.models.config import ModelConfig


def shard_config(config: ModelConfig, tp_size: int) -> ModelConfig:
    """One rank's model: its heads and its MLP. hidden_size and vocab_size stay whole. ConfigError names what does not divide."""
    sizes = {
        "num_key_value_heads": config.num_kv_heads,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tp_size:
            raise ConfigError(f"--tp-size: expected a divisor of the model's {name}, which is {size}, got {tp_size}")
    return replace(
        config,
        num_heads=config.num_heads // tp_size,
        num_kv_heads=config.num_kv_heads // tp_size,
        intermediate_size=config.intermediate_size // tp_size,
    )


def vocab_rows(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding and of the head on each rank, padding of the last ones included."""
    return -(-vocab_size // tp_size)
