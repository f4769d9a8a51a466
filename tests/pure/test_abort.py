"""Abort anywhere: nothing is computed for it afterwards, its pages are back, and whoever waited on it goes on."""

from collections.abc import Callable

import pytest

from radixserve.core import FinishReason
from tests.pure.bench import Bench
from tests.pure.helpers import expected_tokens, request

PROMPT = list(range(2, 66))


def head(bench: Bench) -> str | None:
    """Who would be admitted now."""
    bench.scheduler._waiting.start_pass(bench.scheduler._running.values())
    state = bench.scheduler._waiting.head()
    return state.request.request_id if state is not None else None


def queued(bench: Bench) -> None:
    bench.add(*(request(f"filler{i}", [600 + i, 7], max_tokens=30, ignore_eos=True) for i in range(4)))
    bench.step()
    bench.add(request("a", PROMPT, max_tokens=30, ignore_eos=True))
    bench.step()
    assert "a" in bench.scheduler._waiting


def between_chunks(bench: Bench) -> None:
    bench.add(request("a", PROMPT, max_tokens=30, ignore_eos=True))
    bench.step()
    assert bench.scheduler._running["a"].num_computed < len(PROMPT)


def before_the_first_decode_step(bench: Bench) -> None:
    bench.add(request("a", PROMPT, max_tokens=30, ignore_eos=True))
    while not bench.tokens("a"):
        bench.step()
    assert len(bench.tokens("a")) == 1


def retracted_between_chunks(bench: Bench) -> None:
    between_chunks(bench)
    bench.scheduler._retractions.retract(bench.scheduler._running["a"], bench.now)


def retracted_while_decoding(bench: Bench) -> None:
    before_the_first_decode_step(bench)
    bench.step()
    bench.scheduler._retractions.retract(bench.scheduler._running["a"], bench.now)


def resumed(bench: Bench) -> None:
    retracted_while_decoding(bench)
    bench.step()
    assert "a" in bench.scheduler._running


def with_a_follower(bench: Bench) -> None:
    between_chunks(bench)
    bench.add(request("follower", PROMPT, max_tokens=4, ignore_eos=True))
    bench.step()
    assert bench.scheduler.num_waiting == 1 and head(bench) is None, "it waits for its leader"


def as_a_follower(bench: Bench) -> None:
    bench.add(request("leader", PROMPT, max_tokens=4, ignore_eos=True), request("a", PROMPT, max_tokens=30, ignore_eos=True))
    bench.step()
    assert bench.scheduler.num_waiting == 1 and head(bench) is None, "it waits for its leader"


def retracted_with_a_follower(bench: Bench) -> None:
    with_a_follower(bench)
    bench.scheduler._retractions.retract(bench.scheduler._running["a"], bench.now)
    assert head(bench) == "a", "nobody leads"


MOMENTS = [
    queued,
    between_chunks,
    before_the_first_decode_step,
    retracted_between_chunks,
    retracted_while_decoding,
    resumed,
    with_a_follower,
    as_a_follower,
    retracted_with_a_follower,
]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("moment", MOMENTS)
def test_abort_at(moment: Callable[[Bench], None], page_size: int) -> None:
    """ABORT-02, ABORT-06, ABORT-07, ABORT-09."""
    bench = Bench(num_pages=640 // page_size, page_size=page_size, chunk=16, rows=4)
    moment(bench)
    assert not bench.scheduler.flush(bench.now), "a flush is refused as long as anybody waits or runs"
    sent = bench.tokens("a")
    bench.scheduler.abort("a")
    bench.step()
    assert bench.final("a").finish_reason is FinishReason.ABORT
    assert bench.tokens("a") == sent
    assert "a" not in bench.scheduler._running and "a" not in bench.scheduler._waiting
    others = [name for name in ("leader", "follower") if name in bench.scheduler._running]
    assert others or moment not in (with_a_follower, as_a_follower, retracted_with_a_follower), "whoever waited on it runs at once"
    bench.drain()
    for name in others:
        assert bench.tokens(name) == expected_tokens(PROMPT, 4)
    assert bench.scheduler.totals.aborted_total == 1
    assert bench.scheduler.flush(bench.now)
    assert bench.cache.num_free_pages == bench.cache.num_pages
    bench.add(request("again", PROMPT, max_tokens=5, ignore_eos=True))
    bench.drain()
    assert bench.tokens("again") == expected_tokens(PROMPT, 5)


def test_an_abort_is_applied_without_another_forward() -> None:
    """ABORT-09: all are aborted; the next call plans nothing, and a flush works at once."""
    bench = Bench(rows=4)
    bench.add(*(request(f"a{i}", [5 + i, 6], max_tokens=30, ignore_eos=True) for i in range(6)))
    bench.step()
    for i in range(6):
        bench.scheduler.abort(f"a{i}")
    computed = bench.runner.num_computed
    assert bench.scheduler.flush(bench.now)
    assert bench.scheduler.schedule(bench.now) is None
    assert sum(output.is_final for output in bench.scheduler.take_outputs()) == 6
    assert bench.runner.num_computed == computed
