"""Model shapes with random weights for bench.gpu_check, and engines over them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig
from radixserve.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    context: int = 32768

    def config_json(self) -> str:
        return json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "max_position_embeddings": self.context,
                "rope_theta": 500000.0,
                "tie_word_embeddings": False,
            }
        )

    @property
    def matrix_weights(self) -> int:
        """Of all layers and the head: what a token's products read and multiply."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Of one token over all layers, in 16 bits."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2


SMALL = Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152)
LARGE = Shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256)


def shrunk(shape: Shape) -> Shape:
    """For a dry run on a CPU: the heads stay, everything else is small."""
    return replace(shape, name=f"{shape.name}, shrunk", num_layers=2, hidden=64, intermediate=96, vocab=512, context=2048)


@contextmanager
def engine_of(shape: Shape, device: torch.device, **options: Any) -> Iterator[Engine]:
    """Freed at the end, so that the next finds the memory. options: fields of EngineConfig, CacheConfig and SchedulerConfig."""
    parts = {
        part: {name: options.pop(name) for name in part.__dataclass_fields__ if name in options} for part in (CacheConfig, SchedulerConfig)
    }
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(shape.config_json())
        config = EngineConfig(
            model_path=directory,
            load_format="dummy",
            dtype="bfloat16",
            device=device.type,
            linear_backend="torch",
            cache=CacheConfig(**parts[CacheConfig]),
            scheduler=SchedulerConfig(**parts[SchedulerConfig]),
            **options,
        )
        engine = Engine.build(config)
    try:
        yield engine
    finally:
        vars(engine).clear()  # whoever wrote `as engine` still has a name for it, and with it all of its memory
        if device.type == "cuda":
            import gc

            gc.collect()
            torch.cuda.empty_cache()
