"""POST /pin: compute a prompt where it is not cached yet, and keep it for a time. The body field cache_control does the same on the way."""

import dataclasses
import time
import uuid
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.core import RequestError, SamplingParams
from radixserve.server import sampling_fields as shared
from radixserve.server.call import Call, Prompt, limits_of, start_generation
from radixserve.server.context import ServerContext
from radixserve.server.fields import Fields, read_object
from radixserve.server.generation import Generation
from radixserve.server.replies import RequestFailedError, json_reply
from radixserve.server.stream import until_gone


def pin_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/pin")
    async def pin(http: HttpRequest) -> Response:
        """The reply says how many tokens, from the start of the prompt in whole pages, are kept until when (in seconds since 1970)."""
        fields = Fields(await read_object(http, context.config.max_body_bytes))
        call = _parse(fields, limits_of(context))
        generation = await start_generation(context, call, f"pin-{uuid.uuid4().hex}", time.monotonic())
        try:
            await until_gone(http.receive, _finish(generation))
        except RequestFailedError as failure:
            raise RequestFailedError(_in_terms_of_this_route(failure.error)) from failure
        assert call.pin_ttl_s is not None
        num_pinned = generation.num_pinned(0) or 0
        body = {
            "prompt_tokens": generation.counts(0).prompt,
            "cached_tokens": generation.counts(0).cached,
            "pinned_tokens": num_pinned,
            "expires_at": time.time() + call.pin_ttl_s if num_pinned else None,
        }
        return json_reply(body, headers=context.ignored_header(call.ignored))

    return router


def _parse(fields: Fields, limits: shared.Limits) -> Call:
    content = fields.raw("prompt")
    if isinstance(content, list):
        content = shared.read_token_ids(fields, limits, "prompt", content, 0)
    elif not isinstance(content, str):
        raise fields.wrong("prompt", "a string or a list of token ids", content)
    return Call(
        model=fields.string("model") or None,
        prompts=(Prompt(content, SamplingParams(max_tokens=0)),),
        namespace=shared.read_namespace(fields),
        priority=shared.read_priority(fields),
        pin_ttl_s=shared.check_ttl(fields),
        ignored=tuple(fields.unread()),  # read last: the arguments above are read in order
    )


def _in_terms_of_this_route(error: RequestError) -> RequestError:
    """The engine speaks of the body field that asks for pins everywhere else."""
    if error.param != "cache_control":
        return error
    return dataclasses.replace(error, message=error.message.replace("cache_control", "/pin", 1), param=None)


async def _finish(generation: Generation) -> None:
    async with aclosing(generation.deltas()) as deltas:
        async for _ in deltas:
            pass
