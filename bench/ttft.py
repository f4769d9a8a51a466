"""One request at a time: what a hit saves in time to first token, beside the floor that the arithmetic sets."""

import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

from bench.client import Completion, completion_body, stream_completion
from bench.load import Target, flush
from bench.metrics import growth, read_metrics
from bench.pauses import Pauses
from bench.words import Words

STEP_SECONDS = "radixserve_prefill_step_seconds_total"
SERVER_SECONDS = "sglang:time_to_first_token_seconds_sum"


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
    """Medians over `repeats` of a cold prompt of n tokens and of one that shares its first p; seconds.

    *_step_s: in the engine's steps that computed the prompt; hit_server_s: from the request's arrival to the first token's leaving, by the
    server's own clock. None where the server does not tell.
    """

    n: int
    p: int
    repeats: int
    cold_s: float
    hit_s: float
    cached_tok: float  # of the hits, as the server tells; below p where its page size is above 1
    floor: float  # F(n, p) / F(n, 0)
    cold_step_s: float | None = None
    hit_step_s: float | None = None
    hit_server_s: float | None = None

    @property
    def ratio(self) -> float:
        return self.hit_s / self.cold_s

    @property
    def over_floor(self) -> float:
        return self.ratio / self.floor

    def describe(self) -> str:
        steps = ""
        if self.cold_step_s and self.hit_step_s is not None:
            steps = f", of the steps alone {self.hit_step_s / self.cold_step_s / self.floor:.2f}"
        over = f"ratio/floor {self.over_floor:.2f} (goal: at most 1.30){steps}"
        return (
            f"n {self.n} p {self.p}: TTFT cold {self.cold_s * 1e3:.1f} ms, hit {self.hit_s * 1e3:.1f} ms ({self.cached_tok:.0f} cached), "
            f"ratio {self.ratio:.3f}, floor {self.floor:.3f}, {over}, {self.repeats} pairs"
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
    colds, hits = [], []
    for _ in range(repeats):
        await flush(target.url, flush_path)
        cold_ids = [rng.choice(words.ids) for _ in range(n)]
        own_ids = [rng.choice([word for word in words.ids if word != cold_ids[p]]), *(rng.choice(words.ids) for _ in range(n - p - 1))]
        colds.append(await _ask(target, cold_ids))
        hits.append(await _ask(target, cold_ids[:p] + own_ids))
        if colds[-1].completion.num_cached_tokens:
            raise ValueError(f"expected a cold prompt after a flush, got {colds[-1].completion.num_cached_tokens} cached tokens")
    return TtftPair(
        n,
        p,
        repeats,
        cold_s=statistics.median(one.completion.ttft for one in colds),
        hit_s=statistics.median(one.completion.ttft for one in hits),
        cached_tok=statistics.median(one.completion.num_cached_tokens or 0 for one in hits),
        floor=shape.floor(n, p),
        cold_step_s=_median([one.step_s for one in colds]),
        hit_step_s=_median([one.step_s for one in hits]),
        hit_server_s=_median([one.server_s for one in hits]),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    completion: Completion
    step_s: float | None
    server_s: float | None


async def _ask(target: Target, ids: list[int]) -> _Asked:
    """One request alone, and what the server's counters gained by it."""
    body = completion_body(target.model, ids, 2, target.extra)
    before = await read_metrics(target.url, headers=target.headers)
    with Pauses():
        completion = await stream_completion(target.url, body, target.path, headers=target.headers)
    after = await read_metrics(target.url, headers=target.headers)
    return _Asked(completion, growth(before, after, STEP_SECONDS), growth(before, after, SERVER_SECONDS))


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
