"""A proxy that keeps one request of every shape that a tool sends, made small: what CI replays without the tool."""

import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE"]
MAX_CHARS = 160
MAX_ITEMS = 48
# hop by hop, or made anew for every connection
NOT_PASSED = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}


def shape(value: Any) -> Any:
    """The names and types of a body: two bodies of one shape differ in values alone. Booleans and null are part of the shape."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(shape(item)) for item in value})
    return value if value is None or isinstance(value, bool) else type(value).__name__


def shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value[:MAX_ITEMS]]
    return value[:MAX_CHARS] if isinstance(value, str) else value


class Recorder:
    """Passes everything on to `target` from a thread of its own; `requests` are the distinct ones so far, in order of arrival."""

    def __init__(self, target: str, model_dir: Path, model_name: str) -> None:
        self._model_dir, self._model_name = str(model_dir), model_name
        self._seen: set[str] = set()
        self.requests: list[dict[str, Any]] = []
        app = Starlette(routes=[Route("/{path:path}", self._pass_on, methods=METHODS)])
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._http = httpx.AsyncClient(base_url=target, timeout=600, limits=httpx.Limits(max_connections=None))

    def start(self) -> str:
        """The address."""
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    async def _pass_on(self, request: Request) -> Response:
        body = await request.body()
        headers = [(name, value) for name, value in request.headers.items() if name not in NOT_PASSED]
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        outgoing = self._http.build_request(request.method, path, headers=headers, content=body)
        try:
            reply = await self._http.send(outgoing, stream=True)
        except httpx.TransportError:
            return Response(status_code=502)
        self._keep(request, body, reply.status_code)
        kept = {name: value for name, value in reply.headers.items() if name not in NOT_PASSED}
        return StreamingResponse(self._chunks(reply), reply.status_code, kept, background=BackgroundTask(reply.aclose))

    async def _chunks(self, reply: httpx.Response) -> AsyncIterator[bytes]:
        async for chunk in reply.aiter_raw():
            yield chunk

    def _keep(self, request: Request, raw: bytes, status: int) -> None:
        """A body that was refused is no example of what the tool needs; a route that is not there may be a question of its own."""
        if status >= 400 and raw:
            return
        try:
            # a tool that calls the model by its folder would have this machine's path in it
            body = json.loads(raw.decode().replace(self._model_dir, self._model_name)) if raw else None
        except ValueError:
            return
        query = sorted(request.query_params.keys())
        key = json.dumps([request.method, request.url.path, query, shape(body)])
        if key in self._seen:
            return
        self._seen.add(key)
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.requests.append({"method": request.method, "path": path, "status": status, "body": shortened(body)})


def write_requests(requests: list[dict[str, Any]], path: Path) -> None:
    lines = [json.dumps(request, ensure_ascii=False, separators=(",", ":")) + "\n" for request in requests]
    path.write_text("".join(lines), encoding="utf-8")
