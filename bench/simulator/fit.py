"""Measure steps of the default model on this machine, for a cost model. The only part of the simulator that needs torch and a model."""

import random
import time
from array import array
from collections.abc import Callable, Iterator

from bench.hardware import describe_hardware
from bench.simulator.cost import CostModel, StepShape, fit
from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig
from radixserve.core import Request, SamplingParams, ScheduledBatch, StepOutput
from radixserve.engine.engine import Engine
from radixserve.engine.pipeline import OneByOne, Runner

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
    """Steps of chunks at many depths, decode alone and in batches, and both mixed; the time of Engine.step for each.

    Every repeat runs the same steps, and the shortest time of each counts. On a CPU it is the CPU time of the engine's thread, which works
    in every parallel loop of the model: alone on the machine that is the wall time, and it does not grow when others need the cores.
    """
    # a step that is planned ahead would be timed beside another one
    config = EngineConfig(
        overlap_schedule="off", cache=CacheConfig(max_total_tokens=POOL_TOKENS), scheduler=SchedulerConfig(max_running_requests=16)
    )
    engine = Engine.build(config)
    pipeline = engine._pipeline
    assert isinstance(pipeline, OneByOne)
    pipeline.runner = watched = _Watched(pipeline.runner)  # the one place where the shape of a step and its time meet
    is_cpu = engine.info.device == "cpu"
    clock = time.thread_time if is_cpu else time.perf_counter
    runs = [_run(engine, watched, seed, clock) for _ in range(1 + repeats)][1:]  # the first one warms up
    shapes = [shape for shape, _ in runs[0]]
    assert all([shape for shape, _ in run] == shapes for run in runs), "expected the same steps in every repeat"
    seconds = [min(times) for times in zip(*([time_s for _, time_s in run] for run in runs), strict=True)]
    info = engine.info
    origin = f"fitted: {info.model_name}, {info.dtype}, {info.attention_backend}; {describe_hardware()}"
    origin += f"; {'thread CPU' if is_cpu else 'wall'} time, shortest of {repeats} repeats"
    return fit(name, origin, shapes, seconds)


def _run(engine: Engine, watched: _Watched, seed: int, clock: Callable[[], float]) -> list[tuple[StepShape, float]]:
    measured = []
    for requests in _waves(engine.info.vocab_size, random.Random(f"fit/{seed}")):
        for request in requests:
            engine.add(request)
        while engine.has_work:
            started = clock()
            engine.step()
            measured.append((watched.shape, clock() - started))
        engine.flush_cache()
    return measured


def _waves(vocab_size: int, rng: random.Random) -> Iterator[list[Request]]:
    def prompts(*lengths: int) -> list[Request]:
        sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
        drawn = [array("i", [rng.randrange(vocab_size) for _ in range(length)]) for length in lengths]
        return [Request(f"{rng.getrandbits(64)}", prompt, sampling) for prompt in drawn]

    for length in ALONE:
        yield prompts(length)
    for count in TOGETHER:
        yield prompts(*(rng.randrange(64, 640) for _ in range(count)))
