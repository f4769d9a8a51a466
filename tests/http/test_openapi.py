"""The served OpenAPI description: every body is in it, and calls made from it by schemathesis find no 5xx and no foreign error shape."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.http.conftest import Served
from tests.support.live_server import server_process

NO_BODY = {"/flush_cache", "/reset_prefix_cache"}
MAX_EXAMPLES = 10  # per operation, of valid and of broken calls each
NOT_CALLED = {"/health_generate"}  # it may say 503, and other tests hold it to when


async def test_every_route_and_every_body_is_described(served: Served) -> None:
    document = (await served.http.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert ("requestBody" in operation) == (method in ("post", "put") and path not in NO_BODY), (method, path)
            assert "422" not in operation["responses"]
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
    assert {"/v1/completions", "/v1/models", "/metrics", "/health"} <= document["paths"].keys()


async def test_calls_made_from_the_description_find_no_5xx(model_dir: Path) -> None:
    async with server_process(model_dir, 0.0) as url:
        await asyncio.to_thread(call_everything, url)
        async with httpx.AsyncClient(base_url=url) as http:
            metrics = (await http.get("/metrics")).text
    assert 'status="5' not in metrics
    assert 'radixserve_engine_restarts_total{model_name="echo"} 0.0' in metrics


def call_everything(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 7
    with httpx.Client(base_url=url, timeout=20) as http:
        for operation in operations:
            if operation.path in NOT_CALLED:
                continue
            call_operation(http, operation, schemathesis.GenerationMode.POSITIVE)
            if "requestBody" in operation.definition.raw:
                call_operation(http, operation, schemathesis.GenerationMode.NEGATIVE)


def call_operation(http: httpx.Client, operation: Any, mode: Any) -> None:
    @settings(
        max_examples=MAX_EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        kwargs = case.as_transport_kwargs(base_url=str(http.base_url))
        reply = http.request(
            kwargs["method"],
            kwargs["url"],
            headers={name: value for name, value in kwargs["headers"].items() if value.isascii()},
            json=kwargs.get("json"),
        )
        assert reply.status_code < 500, (operation.label, kwargs.get("json"), reply.text[:500])
        if reply.status_code >= 400:
            assert reply.json()["error"].keys() == {"message", "type", "param", "code"}

    call()
