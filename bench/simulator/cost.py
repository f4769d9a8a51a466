"""How long a step takes: a linear model of what is in it, with coefficients fitted to measured steps, or derived from stated figures.

seconds = step + prefill_token * prompt tokens + prefill_pair * (query, key) pairs of prompt tokens
        + decode_row * decode rows + decode_context * keys that decode rows read
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from radixserve.core import ScheduledBatch

COSTS_DIR = Path(__file__).resolve().parent / "costs"


class StepShape(NamedTuple):
    """What a step computes. A prompt token at position p makes p + 1 pairs; so does a decode row, where they are called context."""

    prefill_tokens: int
    prefill_pairs: int
    decode_rows: int
    decode_context: int

    @classmethod
    def of(cls, batch: ScheduledBatch) -> "StepShape":
        tokens = pairs = rows = context = 0
        for row in batch.rows:
            if row.is_decode:
                rows += 1
                context += row.start + 1
            else:
                tokens += row.count
                pairs += row.count * row.start + row.count * (row.count + 1) // 2
        return cls(tokens, pairs, rows, context)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds. `origin` says where they come from: hardware, date, and how well they fit, or "modelled" and from what."""

    name: str
    origin: str
    step_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_row_s: float
    decode_context_s: float

    def seconds(self, shape: StepShape) -> float:
        return (
            self.step_s
            + self.prefill_token_s * shape.prefill_tokens
            + self.prefill_pair_s * shape.prefill_pairs
            + self.decode_row_s * shape.decode_rows
            + self.decode_context_s * shape.decode_context
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name_or_path: str) -> "CostModel":
        """A file, or the name of one in bench/simulator/costs/, or "h100-8b". ValueError names what there is."""
        if name_or_path == "h100-8b":
            return modelled_h100_8b()
        path = Path(name_or_path)
        if not path.is_file():
            path = COSTS_DIR / f"{name_or_path}.json"
        if not path.is_file():
            names = sorted(one.stem for one in COSTS_DIR.glob("*.json"))
            raise ValueError(f"cost: expected a file or one of {', '.join([*names, 'h100-8b'])}, got {name_or_path!r}")
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def modelled_h100_8b() -> CostModel:
    """An 8B Llama in bf16 on an H100 SXM, derived and not measured: 8.03e9 weights, 32 layers, 32 heads and 8 KV heads of 128.

    Data sheet: 989 TFLOP/s dense bf16, 3.35 TB/s. Assumed: half of the former, 80 % of the latter, and that reading the weights (once a
    step) does not overlap with arithmetic, which is on the careful side for steps full of prompt tokens.
    """
    flops, bandwidth = 0.5 * 989e12, 0.8 * 3.35e12
    weights, num_layers, width, kv_width = 8.03e9, 32, 32 * 128, 8 * 128
    token_s = 2 * weights / flops
    return CostModel(
        name="h100-8b",
        origin="modelled: 8.03e9 bf16 weights on 989 TFLOP/s at 50 % and 3.35 TB/s at 80 %, no overlap of the two",
        step_s=2 * weights / bandwidth,
        prefill_token_s=token_s,
        prefill_pair_s=4 * num_layers * width / flops,
        decode_row_s=token_s,
        decode_context_s=2 * 2 * num_layers * kv_width / bandwidth,
    )


def fit(name: str, origin: str, shapes: Sequence[StepShape], seconds: Sequence[float]) -> CostModel:
    """Least squares of relative errors, no coefficient below zero. The model's origin gets the number of steps and the errors.

    ValueError where there are fewer steps than coefficients.
    """
    if len(shapes) < 5 or len(shapes) != len(seconds):
        raise ValueError(f"fit: expected at least 5 steps and a time for each, got {len(shapes)} and {len(seconds)}")
    measured = np.asarray(seconds, dtype=np.float64)
    features = np.column_stack([np.ones(len(shapes)), np.asarray(shapes, dtype=np.float64)])
    weighted = features / measured[:, None]
    free = list(range(features.shape[1]))
    solution = np.zeros(features.shape[1])
    while free:
        # scaled columns: pairs are millions where rows are units
        scale = np.abs(weighted[:, free]).max(axis=0)
        scale[scale == 0] = 1
        part = np.linalg.lstsq(weighted[:, free] / scale, np.ones(len(shapes)), rcond=None)[0] / scale
        if (part >= 0).all():
            solution[free] = part
            break
        free = [index for index, value in zip(free, part, strict=True) if value >= 0]
    errors = np.abs(features @ solution / measured - 1)
    fitted = f"{origin}; {len(shapes)} steps, relative error median {np.median(errors):.3f}, 90th percentile {np.quantile(errors, 0.9):.3f}"
    return CostModel(name, fitted, *(float(value) for value in solution))
