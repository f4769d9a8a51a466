"""One request at a time: what a hit saves in time to first token, beside the floor that the arithmetic sets."""

import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

from bench.client import completion_body, stream_completion
from bench.load import Target, flush
from bench.words import Words


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the floor depends on: N parameters, L layers, width d."""

    num_params: int
    num_layers: int
    width: int

    def prefill_flops(self, n: int, p: int) -> float:
        """F(n, p) = 2 N (n - p) + 2 L d (n^2 - p^2): FLOPs of a prompt of n tokens of which p are re-used."""
        return 2.0 * self.num_params * (n - p) + 2.0 * self.num_layers * self.width * (n * n - p * p)

    def floor(self, n: int, p: int) -> float:
        """F(n, p) / F(n, 0)."""
        return self.prefill_flops(n, p) / self.prefill_flops(n, 0)


def read_model_shape(model_dir: Path) -> ModelShape:
    """From config.json and the heads of the *.safetensors files; no weight is read. Raises FileNotFoundError without them."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    shards = sorted(model_dir.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"expected *.safetensors in {model_dir}")
    return ModelShape(sum(map(_count_params, shards)), config["num_hidden_layers"], config["hidden_size"])


def _count_params(shard: Path) -> int:
    # the file begins with the length of its JSON head, 8 bytes, little-endian
    with shard.open("rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    total = 0
    for name, tensor in head.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total


@dataclass(frozen=True, slots=True)
class TtftPair:
    """Medians over `repeats` of a cold prompt of n tokens and of one that shares its first p; seconds."""

    n: int
    p: int
    repeats: int
    cold_s: float
    hit_s: float
    cached_tok: float  # of the hits, as the server tells; below p where its page size is above 1
    floor: float  # F(n, p) / F(n, 0)

    @property
    def ratio(self) -> float:
        return self.hit_s / self.cold_s

    @property
    def over_floor(self) -> float:
        return self.ratio / self.floor

    def describe(self) -> str:
        return (
            f"n {self.n} p {self.p}: TTFT cold {self.cold_s * 1e3:.1f} ms, hit {self.hit_s * 1e3:.1f} ms ({self.cached_tok:.0f} cached), "
            f"ratio {self.ratio:.3f}, floor {self.floor:.3f}, ratio/floor {self.over_floor:.2f} (goal: at most 1.30), {self.repeats} pairs"
        )


async def measure_ttft(
    target: Target, words: Words, shape: ModelShape, n: int, p: int, *, repeats: int, seed: int, flush_path: str = "/flush_cache"
) -> TtftPair:
    """Cold, then hit, `repeats` times, on an empty tree each time.

    Raises ValueError unless 0 < p < n; RequestFailedError, also if a cold prompt was not cold.
    """
    if not 0 < p < n:
        raise ValueError(f"expected 0 < p < n, got p = {p}, n = {n}")
    rng = random.Random(f"ttft/{seed}/{n}/{p}")
    cold_s, hit_s, cached = [], [], []
    for _ in range(repeats):
        await flush(target.url, flush_path)
        cold_ids = [rng.choice(words.ids) for _ in range(n)]
        own_ids = [rng.choice([word for word in words.ids if word != cold_ids[p]]), *(rng.choice(words.ids) for _ in range(n - p - 1))]
        cold = await stream_completion(target.url, completion_body(target.model, cold_ids, 2, target.extra), target.path)
        hit = await stream_completion(target.url, completion_body(target.model, cold_ids[:p] + own_ids, 2, target.extra), target.path)
        if cold.num_cached_tokens:
            raise ValueError(f"expected a cold prompt after a flush, got {cold.num_cached_tokens} cached tokens")
        cold_s.append(cold.ttft)
        hit_s.append(hit.ttft)
        cached.append(hit.num_cached_tokens or 0)
    return TtftPair(n, p, repeats, statistics.median(cold_s), statistics.median(hit_s), statistics.median(cached), shape.floor(n, p))
