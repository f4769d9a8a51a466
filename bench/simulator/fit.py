"""Measure steps of the default model on this machine, for a cost model. The only part of the simulator that needs torch and a model."""

import random
import time
from array import array
from collections.abc import Iterator

from bench.hardware import describe_hardware
from bench.simulator.cost import CostModel, StepShape, fit
from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig
from radixserve.core import Request, SamplingParams, ScheduledBatch, StepOutput
from radixserve.engine.engine import Engine, Runner

ALONE = (48, 200, 512, 1200, 2500)  # prompt lengths
TOGETHER = (2, 4, 8, 16)  # prompts at once, of 64 to 640 tokens
OUTPUT_LEN = 16
POOL_TOKENS = 16384


class _Watched:
    """A runner that remembers the shape of its last batch."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.shape = StepShape(0, 0, 0, 0)

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.shape = StepShape.of(batch)
        return self._runner.execute(batch)


def measure(name: str, repeats: int, seed: int = 0) -> CostModel:
    """Steps of chunks at many depths, decode alone and in batches, and both mixed; the wall time of Engine.step for each."""
    config = EngineConfig(cache=CacheConfig(max_total_tokens=POOL_TOKENS), scheduler=SchedulerConfig(max_running_requests=16))
    engine = Engine.build(config)
    watched = _Watched(engine._runner)
    engine._runner = watched  # the one place where the shape of a step and its time meet
    shapes: list[StepShape] = []
    seconds: list[float] = []
    for is_warm_up, requests in _waves(engine.info.vocab_size, repeats, random.Random(f"fit/{seed}")):
        for request in requests:
            engine.add(request)
        while engine.has_work:
            started = time.perf_counter()
            engine.step()
            if not is_warm_up:
                shapes.append(watched.shape)
                seconds.append(time.perf_counter() - started)
        engine.flush_cache()
    origin = f"fitted: {engine.info.model_name}, {engine.info.dtype}, {engine.info.attention_backend}; {describe_hardware()}"
    return fit(name, origin, shapes, seconds)


def _waves(vocab_size: int, repeats: int, rng: random.Random) -> Iterator[tuple[bool, list[Request]]]:
    def prompts(*lengths: int) -> list[Request]:
        sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        drawn = [array("i", [rng.randrange(vocab_size) for _ in range(length)]) for length in lengths]
        return [Request(f"{rng.getrandbits(64)}", prompt, sampling) for prompt in drawn]

    yield True, prompts(300, 300)
    for _ in range(repeats):
        for length in ALONE:
            yield False, prompts(length)
        for count in TOGETHER:
            yield False, prompts(*(rng.randrange(64, 640) for _ in range(count)))
