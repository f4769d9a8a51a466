"""What this server says about itself, to load generators, routers and people: GET /, /model_info, /server_info, /v1/loads."""

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixserve.metrics import EngineStats
from radixserve.server.context import ServerContext
from radixserve.server.replies import json_reply

_STATS_TIMEOUT_S = 1.0  # in a longer step the last snapshot is served


def info_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    throughput = _Throughput()

    @router.get("/")
    async def root(http: HttpRequest) -> Response:
        return json_reply(
            {
                "name": "radixserve",
                "description": "a serving runtime for language models with a radix tree over token ids",
                "model": context.served_name,
                "routes": routes_of(http.app),
            }
        )

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        return json_reply(_model_info(context))

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        stats = await context.engine.stats(_STATS_TIMEOUT_S)
        return json_reply(_server_info(context, throughput.of(stats)))

    @router.get("/v1/loads")
    async def loads() -> Response:
        stats = await context.engine.stats(_STATS_TIMEOUT_S)
        load = _load(context, stats, throughput.of(stats))
        return json_reply({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load]})

    return router


def routes_of(app: FastAPI) -> list[str]:
    """One line per path, as "POST|PUT /generate"."""
    paths: dict[str, dict[str, Any]] = app.openapi()["paths"]
    return [f"{'|'.join(method.upper() for method in sorted(methods))} {path}" for path, methods in sorted(paths.items())]


class _Throughput:
    """Generated tokens per second between two looks; 0 at the first."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def of(self, stats: EngineStats) -> float:
        now, num_tokens = time.monotonic(), stats.generation_tokens_total
        last, self._last = self._last, (now, num_tokens)
        return 0.0 if last is None or now <= last[0] else (num_tokens - last[1]) / (now - last[0])


def _model_info(context: ServerContext) -> dict[str, Any]:
    info = context.engine.info
    return {
        "model_path": info.model_path,
        "tokenizer_path": info.model_path,
        "served_model_name": context.served_name,
        "is_generation": True,
        "has_image_understanding": False,
        "max_model_len": info.context_length,
        "vocab_size": info.vocab_size,
    }


def _server_info(context: ServerContext, throughput: float) -> dict[str, Any]:
    """Names are chosen one by one: a config may hold keys."""
    info = context.engine.info
    return {
        **_model_info(context),
        "version": _version(),
        "dtype": info.dtype,
        "device": info.device,
        "attention_backend": info.attention_backend,
        "linear_backend": info.linear_backend,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
        "context_length": info.context_length,
        "max_total_tokens": info.max_total_tokens,
        "max_total_num_tokens": info.max_total_tokens,
        "max_running_requests": info.max_running_requests,
        "chunked_prefill_size": info.chunked_prefill_size,
        "page_size": info.page_size,
        "schedule_policy": info.schedule_policy,
        "radix_eviction_policy": info.radix_eviction_policy,
        "overlap_schedule": info.overlap_schedule,
        "disable_radix_cache": info.is_radix_cache_disabled,
        "dp_size": 1,
        "tp_size": info.tp_size,
        "internal_states": [{"last_gen_throughput": throughput, "effective_max_running_requests_per_dp": info.max_running_requests}],
    }


def _load(context: ServerContext, stats: EngineStats, throughput: float) -> dict[str, Any]:
    info = context.engine.info
    num_used = stats.locked_tokens + stats.private_tokens
    num_prompt = stats.prompt_tokens_total
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        # an upper bound: what the tree holds of them is known at admission
        "num_waiting_uncached_tokens": context.engine.num_tokens_without_news,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_used_tokens": num_used,
        "max_total_num_tokens": info.max_total_tokens,
        "max_running_requests": info.max_running_requests,
        "token_usage": stats.token_usage,
        "gen_throughput": throughput,
        "cache_hit_rate": stats.cached_tokens_total / num_prompt if num_prompt else 0.0,
        "utilization": max(stats.token_usage, stats.num_running / info.max_running_requests),
    }


def _version() -> str | None:
    try:
        return version("radixserve")
    except PackageNotFoundError:  # run from a source tree
        return None
