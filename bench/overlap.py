"""What --overlap-schedule does to decode steps: `python -m bench.overlap`. In process, engine only; the arms take turns.

A slice: so many equal-sized requests at once, all to their ends. Two arms that are the same show what the machine's own noise is.
"""

import argparse
import os
import random
import time
from array import array
from statistics import median
from typing import NamedTuple

from radixserve.core import Request, SamplingParams
from radixserve.engine.engine import Engine
from radixserve.engine.llm import engine_config

POOL_TOKENS = 32768


class Cost(NamedTuple):
    wall_ms: float  # per step
    cpu_ms: float  # of all threads


class Arm:
    def __init__(self, model_path: str | None, overlap_schedule: str) -> None:
        self._engine = Engine.build(engine_config(model_path, {"max_total_tokens": POOL_TOKENS, "overlap_schedule": overlap_schedule}))
        self.costs: list[Cost] = []

    def run_slice(self, num_rows: int, prompt_tokens: int, output_tokens: int, seed: int) -> Cost:
        """The clock runs while all rows decode."""
        engine, rng = self._engine, random.Random(seed)
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        for number in range(num_rows):
            prompt = array("i", (rng.randrange(engine.info.vocab_size) for _ in range(prompt_tokens)))
            engine.add(Request(f"{seed}-{number}", prompt, sampling))
        while engine.stats().generation_tokens_total % (num_rows * output_tokens) < num_rows:
            engine.step()
        steps_before, wall, cpu = engine.stats().decode_steps_total, time.perf_counter(), time.process_time()
        while engine.has_work:
            engine.step()
        num_steps = engine.stats().decode_steps_total - steps_before
        engine.flush_cache()
        return Cost((time.perf_counter() - wall) / num_steps * 1e3, (time.process_time() - cpu) / num_steps * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description="Decode steps with and without planning ahead.")
    parser.add_argument("--model-path", default=None, help="default: the default model")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=6)
    args = parser.parse_args()
    arms = {name: Arm(args.model_path, name.split()[0]) for name in ("off", "off again", "on")}
    print(f"load average before: {os.getloadavg()[0]:.2f}", flush=True)
    print("| rows | arm | wall ms a step | CPU ms a step | wall, off / arm: median of pairs | least, largest |\n|---|---|---|---|---|---|")
    for num_rows in (int(text) for text in args.rows.split(",")):
        for arm in arms.values():
            arm.costs = []
            arm.run_slice(num_rows, args.prompt_tokens, 8, seed=0)
        for pair in range(1, args.pairs + 1):
            for arm in list(arms.values())[:: 1 if pair % 2 else -1]:
                arm.costs.append(arm.run_slice(num_rows, args.prompt_tokens, args.output_tokens, seed=pair))
        for name, arm in arms.items():
            ratios = [off.wall_ms / one.wall_ms for off, one in zip(arms["off"].costs, arm.costs, strict=True)]
            wall, cpu = median(one.wall_ms for one in arm.costs), median(one.cpu_ms for one in arm.costs)
            print(
                f"| {num_rows} | {name} | {wall:.2f} | {cpu:.2f} | {median(ratios):.3f} | {min(ratios):.3f}, {max(ratios):.3f} |",
                flush=True,
            )
    print(f"load average after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
