"""create_app: the HTTP application over an engine and a tokenizer, both arguments. It starts and stops nothing."""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route

from radixserve.config import ServerConfig
from radixserve.core import RequestError
from radixserve.engine.client import AsyncEngine
from radixserve.errors import RadixServeError
from radixserve.server.access import AccessGuard
from radixserve.server.admin import admin_router
from radixserve.server.context import ServerContext
from radixserve.server.control import control_router
from radixserve.server.early_answer import BodyMiddleware
from radixserve.server.exporter import EngineCollector
from radixserve.server.http_metrics import HttpMetrics, MetricsRegistry
from radixserve.server.info_routes import info_router
from radixserve.server.latency import LatencyMetrics
from radixserve.server.middleware import Cors, DoorMiddleware, EdgeMiddleware
from radixserve.server.native import native_router
from radixserve.server.openai import openai_router
from radixserve.server.openapi import add_description
from radixserve.server.pin import pin_router
from radixserve.server.replies import RequestFailedError, describe, error_reply
from radixserve.server.tokenizing import tokenizing_router
from radixserve.tokenizer.tokenizer import Tokenizer

_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(engine: AsyncEngine, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """The app's ServerContext is at app.state.context: whoever drains the server closes its gate."""
    served_name = config.served_model_name or engine.info.model_name
    registry = MetricsRegistry()
    registry.register(EngineCollector(engine, served_name))
    context = ServerContext(engine, tokenizer, config, registry, LatencyMetrics(registry, served_name), served_name)
    app = FastAPI(title="radixserve", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.context = context
    app.add_exception_handler(RadixServeError, _our_error)
    app.add_exception_handler(RequestFailedError, _our_error)
    makers = (openai_router, native_router, tokenizing_router, info_router, control_router, admin_router, pin_router)
    routers = [make_router(context) for make_router in makers]
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes if isinstance(route, Route)]
    app.add_exception_handler(HTTPException, _make_http_error(routes))
    _add_edge(app, context, [route.path for route in routes])
    add_description(app, config)
    return app


def _add_edge(app: FastAPI, context: ServerContext, paths: list[str]) -> None:
    """What was added last is outermost."""
    config = context.config
    app.add_middleware(DoorMiddleware, guard=AccessGuard(config.api_key, config.admin_api_key), gate=context.gate)
    if config.cors_allow_origin:
        app.add_middleware(Cors, origins=config.cors_allow_origin)
    app.add_middleware(BodyMiddleware, body_timeout_s=config.body_timeout_s)
    metrics = HttpMetrics(context.registry, [*paths, "/openapi.json"])
    app.add_middleware(EdgeMiddleware, metrics=metrics, logs_requests=config.log_requests)


async def _our_error(request: HttpRequest, error: Exception) -> Response:
    return error_reply(describe(error))


def _make_http_error(routes: Sequence[Route]) -> Callable[[HttpRequest, Exception], Awaitable[Response]]:
    async def http_error(request: HttpRequest, error: Exception) -> Response:
        """What the framework itself raises: an unknown route, a wrong method."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        reply = RequestError(message, error.status_code, "invalid_request_error", _CODES.get(error.status_code))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # the framework names the methods of one route; a path may have several
            same_path = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
            methods = {method for route in same_path for method in route.methods or ()}
            headers = {"allow": ", ".join(sorted(methods))} if methods else headers
        return error_reply(reply, headers)

    return http_error
