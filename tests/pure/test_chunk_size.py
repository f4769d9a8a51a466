"""--target-step-ms: prompt chunks become so long that a step takes about as long as it should."""

import random
from collections.abc import Callable

import pytest

from radixserve.scheduler.chunk_size import MIN_PROMPT_TOKENS, ChunkSize
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, request


def settle(chunk_size: ChunkSize, seconds: Callable[[int], float], num_steps: int = 60) -> float:
    """Seconds of the last step, prompts being endless and every fifth step being without them."""
    for step in range(num_steps):
        if step % 5 == 4:
            chunk_size.after_step(0, seconds(0))
        else:
            chunk_size.after_step(chunk_size.num_tokens, seconds(chunk_size.num_tokens))
    return seconds(chunk_size.num_tokens)


@pytest.mark.parametrize("base_s", [0.0, 0.002, 0.02])
@pytest.mark.parametrize("token_s", [1e-5, 1e-4, 5e-4])
def test_it_settles_at_the_target(base_s: float, token_s: float) -> None:
    assert settle(ChunkSize(0.05, 8192), lambda n: base_s + token_s * n) == pytest.approx(0.05, rel=0.02)


def test_it_learns_without_any_step_of_decode_rows_alone() -> None:
    chunk_size = ChunkSize(0.05, 8192)
    for _ in range(40):
        chunk_size.after_step(chunk_size.num_tokens, 0.02 + 1e-4 * chunk_size.num_tokens)
    assert chunk_size.num_tokens == pytest.approx(300, rel=0.05)


def test_it_follows_a_machine_that_becomes_slower_and_faster() -> None:
    chunk_size = ChunkSize(0.05, 8192)
    settle(chunk_size, lambda n: 0.001 + 1e-5 * n)
    assert chunk_size.num_tokens > 4000
    assert settle(chunk_size, lambda n: 0.001 + 2e-4 * n) == pytest.approx(0.05, rel=0.1)
    assert settle(chunk_size, lambda n: 0.001 + 1e-5 * n) == pytest.approx(0.05, rel=0.1)


def test_noise_does_not_throw_it_off() -> None:
    rng = random.Random(1)
    chunk_size = ChunkSize(0.05, 8192)
    settle(chunk_size, lambda n: (0.005 + 1e-4 * n) * rng.uniform(0.8, 1.3), 200)
    assert 250 < chunk_size.num_tokens < 650


def test_its_bounds() -> None:
    slow, fast, tiny = ChunkSize(0.001, 512), ChunkSize(10.0, 512), ChunkSize(0.001, 4)
    assert tiny.num_tokens == 4
    settle(slow, lambda n: 1.0 + n)
    settle(fast, lambda n: 1e-9 * n)
    settle(tiny, lambda n: 1.0 + n)
    assert (slow.num_tokens, fast.num_tokens, tiny.num_tokens) == (MIN_PROMPT_TOKENS, 512, 4)


def test_steps_of_a_scheduler_last_as_long_as_they_should() -> None:
    """A virtual machine of 2 ms a step and 0.5 ms a token: 4 streams run on while 12 long prompts come in."""
    bench = Bench(num_pages=8000, chunk=512, rows=16, target_step_ms=40.0, eos_token_ids=())
    streams = [request(f"s{i}", range(20 * i + 2, 20 * i + 12), max_tokens=200, ignore_eos=True) for i in range(4)]
    prompts = [[*range(1000 * i + 2, 1000 * i + 602)] for i in range(12)]
    bench.add(*streams)
    lasted: list[tuple[int, float]] = []
    for step in range(4000):
        if not bench.scheduler.has_work:
            break
        if step == 10:
            bench.add(*(request(f"p{i}", prompt, max_tokens=2, ignore_eos=True) for i, prompt in enumerate(prompts)))
        batch = bench.scheduler.schedule(bench.now)
        assert batch is not None
        seconds = 0.002 + 0.0005 * batch.num_tokens
        bench.now += seconds
        bench.outputs += bench.scheduler.update(bench.runner.execute(batch), bench.now)
        bench.scheduler.check_account()
        if batch.num_tokens > batch.num_decode_rows:
            lasted.append((batch.num_tokens, seconds))
    assert all(seconds < 0.05 for _, seconds in lasted[5:])
    middle = sorted(seconds for _, seconds in lasted[5:])[len(lasted) // 2]
    assert middle == pytest.approx(0.04, rel=0.15)
    assert bench.tokens("s0") == expected_tokens(range(2, 12), 200)
    assert bench.tokens("p7") == expected_tokens(prompts[7], 2)


def test_off_by_default() -> None:
    assert Bench(chunk=16).scheduler.max_prompt_tokens == 16
