"""The gap that long prompts tear into a running stream, with and without --target-step-ms: `python -m bench.gap`.

In process, engine only: no HTTP, no detokenizer. One stream decodes; prompts of random tokens arrive at a steady rate, each for one token.
"""

import argparse
import math
import os
import random
import time
from array import array
from collections import deque
from dataclasses import dataclass, field

from radixserve.core import Request, SamplingParams
from radixserve.engine.engine import Engine
from radixserve.engine.llm import engine_config

STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS = 6000
POOL_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class Load:
    prompt_tokens: int
    interval_s: float  # between arrivals, whether or not the earlier ones are done


@dataclass(slots=True)
class Gaps:
    """Of all slices of one arm; seconds."""

    gaps_s: list[float] = field(default_factory=list)
    num_arrived: int = 0
    num_answered: int = 0  # of those, before the slice ended
    prompt_tokens: int = 0  # computed
    seconds: float = 0.0

    def percentile(self, share: float) -> float:
        """The smallest gap that is not below `share` of all; 0 < share <= 1."""
        return sorted(self.gaps_s)[math.ceil(share * len(self.gaps_s)) - 1]

    def line(self, name: str) -> str:
        p50, p99, worst = (f"{self.percentile(share) * 1e3:.0f}" for share in (0.5, 0.99, 1.0))
        rate = self.prompt_tokens / self.seconds
        return f"| {name} | {len(self.gaps_s)} | {p50} | {p99} | {worst} | {self.num_answered} of {self.num_arrived} | {rate:.0f} |"


class Arm:
    """One engine; each slice starts and ends with nothing running."""

    def __init__(self, engine: Engine, load: Load | None, seed: int) -> None:
        self._engine = engine
        self._load = load
        self._rng = random.Random(seed)
        self._num_sent = 0
        self.gaps = Gaps()

    def _send(self, kind: str, num_tokens: int, max_tokens: int) -> None:
        prompt = array("i", (self._rng.randrange(self._engine.info.vocab_size) for _ in range(num_tokens)))
        self._num_sent += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(Request(f"{kind}-{self._num_sent}", prompt, sampling))

    def warm_up(self) -> None:
        self._send("warm", 1000, 8)
        while self._engine.has_work:
            self._engine.step()
        self._engine.flush_cache()

    def run_slice(self, seconds: float) -> None:
        """The clock starts at the stream's first token. An arrival counts from the step that it falls into, as in the engine's own loop."""
        self._send("stream", STREAM_PROMPT_TOKENS, STREAM_TOKENS)
        while not self._engine.step():
            pass
        computed_before = self._engine.stats().prefill_tokens_total
        start = last = time.perf_counter()
        arrivals: deque[float] = deque()
        if self._load is not None:
            arrivals.extend(start + i * self._load.interval_s for i in range(int(seconds / self._load.interval_s)))
        while last < start + seconds:
            while arrivals and arrivals[0] <= time.perf_counter():
                arrivals.popleft()
                assert self._load is not None
                self._send("prompt", self._load.prompt_tokens, 1)
                self.gaps.num_arrived += 1
            for output in self._engine.step():
                if output.request_id.startswith("prompt"):
                    self.gaps.num_answered += output.is_final
                    continue
                if output.is_final or len(output.token_ids) != 1:
                    raise RuntimeError(f"expected one token of the stream in a step, got {len(output.token_ids)}: {output.finish_reason}")
                now = time.perf_counter()
                self.gaps.gaps_s.append(now - last)
                last = now
        self.gaps.seconds += last - start
        self.gaps.prompt_tokens += self._engine.stats().prefill_tokens_total - computed_before
        self._end_all()

    def _end_all(self) -> None:
        for number in range(1, self._num_sent + 1):
            for kind in ("stream", "prompt"):
                self._engine.abort(f"{kind}-{number}")
        while self._engine.has_work:
            self._engine.step()
        self._engine.flush_cache()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gap", description="Gaps of a running stream while long prompts arrive.")
    parser.add_argument("--model-path", default=None, help="default: the default model")
    parser.add_argument("--target-step-ms", type=float, default=100.0)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--interval-s", type=float, default=1.0, help="between two prompts")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each arm, all its slices together")
    parser.add_argument("--slices", type=int, default=2, help="the arms take turns, so often")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    load = Load(args.prompt_tokens, args.interval_s)

    def make_arm(load: Load | None, target_step_ms: float | None) -> Arm:
        config = engine_config(args.model_path, {"max_total_tokens": POOL_TOKENS, "target_step_ms": target_step_ms})
        return Arm(Engine.build(config), load, args.seed)

    targeted = f"--target-step-ms {args.target_step_ms:g}"
    arms = {"stream alone": make_arm(None, None), "no target": make_arm(load, None), targeted: make_arm(load, args.target_step_ms)}
    for arm in arms.values():
        arm.warm_up()
    print(f"load average before: {os.getloadavg()[0]:.2f}", flush=True)
    for turn in range(args.slices):
        for arm in list(arms.values())[:: 1 if turn % 2 == 0 else -1]:
            arm.run_slice(args.seconds / args.slices)
    print(f"load average after: {os.getloadavg()[0]:.2f}")
    print("| arm | gaps | p50 ms | p99 ms | max ms | prompts answered | prompt tokens/s |\n|---|---|---|---|---|---|---|")
    for name, arm in arms.items():
        print(arm.gaps.line(name))


if __name__ == "__main__":
    main()
