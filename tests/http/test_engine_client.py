"""AsyncEngine towards the rest of the server: what submitting leaves behind when it fails, and turns for others in a long message."""

import asyncio
from array import array
from collections import Counter

import pytest

from radixserve.core import Request, RequestOutput, SamplingParams
from radixserve.engine import wire
from radixserve.engine.open_streams import OUTPUTS_PER_TURN
from radixserve.engine.streams import RequestStream
from tests.http.conftest import Served
from tests.support.thread_link import ThreadLink


@pytest.fixture
def max_queued_requests() -> int:
    return 1


async def test_a_request_that_could_not_be_sent_leaves_nothing_behind(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("mine", array("i", [97]), SamplingParams(max_tokens=1))
    num_slots = served.engine.info.max_running_requests

    def fail(link: ThreadLink, message: wire.ClientMessage) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ThreadLink, "send", fail)
        with pytest.raises(OSError, match="no room"):
            served.engine.submit(request)
    assert served.engine.num_tokens_without_news == 0
    served.engine.room.require(num_slots + 1)
    outputs = [output async for output in served.engine.submit(request)]
    assert outputs[-1].num_output_tokens == 1


@pytest.mark.parametrize("step_s", [0.05], indirect=True)
async def test_others_have_their_turn_in_the_middle_of_a_long_message(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pushes: Counter[int] = Counter()  # turn of the loop -> outputs that were pushed in it
    turn = 0
    decode, push = wire.decode_engine_message, RequestStream.push

    def noting_decode(data: bytes) -> wire.EngineMessage:
        message = decode(data)
        if isinstance(message, wire.Outputs):
            sizes.append(len(message.outputs))
        return message

    def noting_push(stream: RequestStream, output: RequestOutput) -> None:
        pushes[turn] += 1
        push(stream, output)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(wire, "decode_engine_message", noting_decode)
    monkeypatch.setattr(RequestStream, "push", noting_push)
    counting = asyncio.create_task(count_turns())
    assert (await served.complete(prompt="abc", n=4 * OUTPUTS_PER_TURN, max_tokens=3)).status_code == 200
    counting.cancel()
    assert max(sizes) == 4 * OUTPUTS_PER_TURN
    assert max(pushes.values()) <= OUTPUTS_PER_TURN
