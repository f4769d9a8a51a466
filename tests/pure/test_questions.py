"""Questions to the engine: an asker that is cancelled is gone, even when the answer comes in the same moment."""

import asyncio

import pytest

from radixserve.engine import wire
from radixserve.engine.questions import Questions


@pytest.mark.parametrize("kind", [wire.Flush, wire.GetStats])
@pytest.mark.parametrize("num_turns", range(5))  # of the loop, between the answer and the cancellation
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(kind: type[wire.Flush] | type[wire.GetStats], num_turns: int) -> None:
    sent: list[wire.ClientMessage] = []
    questions = Questions(sent.append)

    async def ask_again_and_again() -> None:
        while True:
            await questions.ask(kind, 60.0)
            await asyncio.sleep(60)

    asking = asyncio.create_task(ask_again_and_again())
    while not sent:  # noqa: ASYNC110 - one turn of this loop
        await asyncio.sleep(0)
    questions.answer(wire.Flushed(1, False))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking}, timeout=5)
    assert asking.cancelled()


async def test_who_asks_too_long_withdraws_a_flush() -> None:
    sent: list[wire.ClientMessage] = []
    with pytest.raises(TimeoutError):
        await Questions(sent.append).ask(wire.Flush, 0.01)
    assert sent == [wire.Flush(1), wire.WithdrawFlush(1)]
