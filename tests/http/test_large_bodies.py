"""Work that grows with a body is not the loop's: other streams would stand still meanwhile."""

import dataclasses
import threading

import pytest

from radixserve.config import ServerConfig
from radixserve.server import fields, tokenizing
from radixserve.tokenizer import ChatTemplate
from tests.http.conftest import Served


class Threads:
    """Which threads did a piece of work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.seen: list[threading.Thread] = []
        work = getattr(owner, name)

        def noting(*args: object, **kwargs: object) -> object:
            self.seen.append(threading.current_thread())
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("num_messages", [1, 9000])
async def test_many_short_messages_are_rendered_off_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, num_messages: int
) -> None:
    """Their texts together are short: it is the body that is large."""
    monkeypatch.setattr(served.app.state.context.tokenizer, "chat_template", ChatTemplate("{{ messages | length }}", {}))
    threads = Threads(monkeypatch, ChatTemplate, "render")
    served.app.state.context.config = _with_large_bodies(served)
    await served.http.post(path, json={"messages": [{"role": "user", "content": ""}] * num_messages})
    (thread,) = threads.seen
    assert (thread is threading.main_thread()) == (num_messages == 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"])
async def test_a_large_body_is_parsed_off_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    threads = Threads(monkeypatch, fields, "_parse")
    served.app.state.context.config = _with_large_bodies(served)
    for size, is_on_loop in ((10, True), (50_000, False)):
        reply = await served.http.post(path, content=b'{"prompt": [' + b"[]," * size + b"[]]}")
        assert reply.status_code == 400
        assert (threads.seen.pop() is threading.main_thread()) == is_on_loop


@pytest.mark.parametrize("num_ids", [1, 20_000])
async def test_many_ids_are_checked_off_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch, num_ids: int) -> None:
    threads = Threads(monkeypatch, tokenizing, "token_array")
    for tokens in ([97] * num_ids, [[97] * num_ids]):
        reply = await served.http.post("/detokenize", json={"tokens": tokens})
        assert reply.status_code == 200
        assert (threads.seen.pop() is threading.main_thread()) == (num_ids == 1)


def _with_large_bodies(served: Served) -> ServerConfig:
    config: ServerConfig = served.app.state.context.config
    return dataclasses.replace(config, max_body_bytes=20_000_000)
