"""Every error status as the real openai package sees it: the class that it raises, the code, and whether it tries again."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from radixserve.config import ServerConfig
from radixserve.core import FinishReason, Request, RequestError, RequestOutput
from radixserve.errors import QueueFullError, QueueTimeoutError, RadixServeError, RequestTimeoutError
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.support.echo_engine import EchoEngine, _Running
from tests.support.live_server import Live, live_app
from tests.support.waiting import until

KEY, ADMIN_KEY = "users", "admins"


class LimitedEngine(EchoEngine):
    """Its queue is full for the prompt "full", `num_refusals` times.

    "late" waits too long `num_late` times, "slow" takes too long each time.
    """

    num_refusals = 1
    num_late = 2
    num_slow = 0  # counted

    def add(self, request: Request) -> None:
        if list(request.prompt_ids) == list(b"full"):
            self.num_refusals -= 1
            if self.num_refusals >= 0:
                raise QueueFullError("8 requests wait already (--max-queued-requests)")
        super().add(request)

    def _advance(self, running: _Running) -> RequestOutput:
        output = super()._advance(running)
        prompt = bytes(list(running.request.prompt_ids))
        error: RadixServeError
        if prompt == b"late" and self.num_late > 0:
            self.num_late -= 1
            error = QueueTimeoutError("it waited too long")
        elif prompt == b"slow":
            self.num_slow += 1
            error = RequestTimeoutError("it took too long")
        else:
            return output
        return dataclasses.replace(output, token_ids=(), finish_reason=FinishReason.ERROR, error=RequestError.of(error))


@pytest.fixture
async def live(tokenizer: Tokenizer) -> AsyncIterator[Live]:
    config = ServerConfig(api_key=KEY, admin_api_key=ADMIN_KEY, max_body_bytes=50_000)
    async with live_app(tokenizer, config, lambda config: LimitedEngine(config, 0.002)) as live:
        yield live


def client_of(live: Live, key: str = KEY, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=max_retries)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("body", "kind", "status", "code"),
    [
        ({"temperature": -1}, openai.BadRequestError, 400, "invalid_value"),
        ({"prompt": "a" * 1001}, openai.BadRequestError, 400, "context_length_exceeded"),
        ({"suffix": "x"}, openai.BadRequestError, 400, "unsupported_parameter"),
        ({"model": "other"}, openai.NotFoundError, 404, "model_not_found"),
        ({"prompt": "a" * 60_000}, openai.APIStatusError, 413, "request_too_large"),
        ({"prompt": "full"}, openai.RateLimitError, 429, "queue_full"),
    ],
)
async def test_statuses_raise_their_classes(
    live: Live, body: dict[str, object], kind: type[openai.APIStatusError], status: int, code: str, is_stream: bool
) -> None:
    async with client_of(live) as client:
        with pytest.raises(kind) as failed:
            await client.completions.create(**{"model": "echo", "prompt": "a", "stream": is_stream, **body})
    assert (failed.value.status_code, failed.value.code) == (status, code)
    assert failed.value.request_id
    if status == 429:
        assert failed.value.type == "rate_limit_error"
        assert int(failed.value.response.headers["retry-after"]) >= 1


async def test_who_never_ran_is_tried_again_and_who_took_too_long_is_not(live: Live) -> None:
    async with client_of(live, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(model="echo", prompt="late", max_tokens=4)
    assert (failed.value.status_code, failed.value.code) == (503, "queue_timeout")
    assert (failed.value.response.headers["x-should-retry"], failed.value.response.headers["retry-after"]) == ("true", "2")
    async with client_of(live, max_retries=2) as client:
        assert (await client.completions.create(model="echo", prompt="late", max_tokens=4)).choices[0].text == "late"
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(model="echo", prompt="slow", max_tokens=4)
    assert (failed.value.status_code, failed.value.code) == (503, "request_timeout")
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert isinstance(live.echo, LimitedEngine) and live.echo.num_slow == 1


async def test_a_full_queue_is_tried_again_and_a_bad_request_is_not(live: Live) -> None:
    async with client_of(live, max_retries=2) as client:
        answer = await client.completions.create(model="echo", prompt="full", max_tokens=4)
        assert answer.choices[0].text == "full"
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="echo", prompt="")
    async with httpx.AsyncClient(base_url=live.url, headers={"authorization": f"Bearer {KEY}"}) as http:
        text = (await http.get("/metrics")).text
    assert 'route="/v1/completions",status="429"} 1.0' in text
    assert 'route="/v1/completions",status="400"} 1.0' in text


async def test_keys(live: Live) -> None:
    async with client_of(live, "wrong") as client:
        with pytest.raises(openai.AuthenticationError) as failed:
            await client.models.list()
        assert failed.value.code == "invalid_api_key"
    async with client_of(live) as client:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await client.post("../flush_cache", cast_to=object)
        assert refused.value.code == "admin_key_required"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.post("/nothing", cast_to=object)
        assert missing.value.code == "not_found"


async def test_an_abort_is_499_and_not_tried_again(live: Live) -> None:
    async with client_of(live, max_retries=2) as client:
        asking = asyncio.create_task(client.completions.create(model="echo", prompt="abc", max_tokens=900))
        await until(lambda: live.echo.running_ids)
        for request_id in live.echo.running_ids:
            live.engine.abort(request_id)
        with pytest.raises(openai.APIStatusError) as failed:
            await asking
    assert (failed.value.status_code, failed.value.code) == (499, "request_aborted")
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert not live.echo.running_ids


async def test_a_draining_server_and_a_dead_engine_are_503_with_a_time_to_try_again(live: Live) -> None:
    async with client_of(live) as client:
        with pytest.raises(openai.InternalServerError) as dead:
            await client.completions.create(model="echo", prompt="<crash>")
        assert (dead.value.status_code, dead.value.code) == (503, "engine_dead")
        live.app.state.context.gate.close()
        with pytest.raises(openai.InternalServerError) as draining:
            await client.completions.create(model="echo", prompt="a")
        assert (draining.value.status_code, draining.value.code) == (503, "shutting_down")
    for error in (dead, draining):
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 10
        assert error.value.response.headers["x-should-retry"] == "true"
