"""API keys, admin keys, CORS: who may call what, and that no key ever shows."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from radixserve.cli import config_from, make_parser
from radixserve.config import EngineConfig, ServerConfig
from radixserve.engine.client import AsyncEngine
from radixserve.errors import ConfigError
from radixserve.server.access import ADMIN_PATHS, with_keys_of
from radixserve.server.app import create_app
from radixserve.tokenizer.tokenizer import Tokenizer
from tests.support.echo_engine import EchoEngine
from tests.support.thread_link import ThreadLink

KEY = "key-of-users"
ADMIN_KEY = "key-of-admins"


@pytest.fixture
async def http(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with the parametrized ServerConfig arguments."""
    async with serving(tokenizer, **request.param) as client:
        yield client


@asynccontextmanager
async def serving(tokenizer: Tokenizer, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    engine = await AsyncEngine.start(EngineConfig(), make_link=lambda: ThreadLink(EchoEngine(EngineConfig())))
    app = create_app(engine, tokenizer, ServerConfig(**options))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client
    await engine.stop()


def with_options(**options: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("http", [options], indirect=True, ids=[",".join(options) or "none"])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


CALLS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/echo"),
    ("HEAD", "/v1/models"),
    ("POST", "/v1/completions"),
    ("GET", "/metrics"),
    ("HEAD", "/metrics"),
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/no/such/route"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("POST", "/health%2f..%2fmetrics"),
    ("OPTIONS", "/v1/completions"),
    ("DELETE", "/v1/completions"),
    ("BREW", "/pot"),
]


@with_options(api_key=KEY)
@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_every_route_known_or_not_asks_for_the_key(http: httpx.AsyncClient, method: str, path: str) -> None:
    wrong: list[dict[str, str]] = [
        {},
        bearer("wrong"),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(KEY.upper()),
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"x-api-key": KEY},
        {"authorization": f"Bearer {KEY}, Bearer {KEY}"},
    ]
    for headers in wrong:
        reply = await http.request(method, path, headers=headers, content=b"no json" if method == "POST" else None)
        assert reply.status_code == 401, headers
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.headers["x-request-id"]
        if method != "HEAD":
            assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert KEY not in reply.text
    assert (await http.request(method, path, headers=bearer(KEY))).status_code not in (401, 403)


@with_options(api_key=KEY)
async def test_two_authorization_headers_are_none(http: httpx.AsyncClient) -> None:
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
    assert (await http.get("/v1/models", headers=headers)).status_code == 401
    assert (await http.get("/v1/models", headers={b"authorization": b"Bearer \xff\xfe"})).status_code == 401
    assert (await http.get("/v1/models", headers={"authorization": f"bearer   {KEY}"})).status_code == 200


@with_options(api_key=KEY, admin_api_key=ADMIN_KEY)
async def test_liveness_needs_no_key(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.head("/health")).status_code == 200
    assert (await http.get("/health", headers=bearer("wrong"))).status_code == 200
    assert (await http.get("/ready")).status_code != 401


@with_options(api_key=KEY, admin_api_key=ADMIN_KEY)
async def test_admin_routes_take_the_admin_key_alone(http: httpx.AsyncClient) -> None:
    for path in (*sorted(ADMIN_PATHS), "/admin/anything"):
        refused = await http.post(path, headers=bearer(KEY))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
        assert (await http.post(path)).status_code == 401
        assert (await http.post(path, headers=bearer("wrong"))).status_code == 401
    assert (await http.post("/flush_cache", headers=bearer(ADMIN_KEY))).status_code == 200
    assert (await http.get("/v1/models", headers=bearer(ADMIN_KEY))).status_code == 200
    assert (await http.get("/metrics", headers=bearer(KEY))).status_code == 200


@with_options(admin_api_key=ADMIN_KEY)
async def test_an_admin_key_alone_guards_the_admin_routes_alone(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models")).status_code == 200
    assert (await http.post("/flush_cache")).status_code == 401
    assert (await http.post("/flush_cache", headers=bearer(ADMIN_KEY))).status_code == 200


@with_options(api_key=KEY)
async def test_without_an_admin_key_the_api_key_guards_admin_routes(http: httpx.AsyncClient) -> None:
    assert (await http.post("/flush_cache")).status_code == 401
    assert (await http.post("/flush_cache", headers=bearer(KEY))).status_code == 200


@with_options(api_key=KEY, admin_api_key=ADMIN_KEY)
async def test_no_key_is_logged_or_shown(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for key in (KEY, ADMIN_KEY):
        for path in ("/metrics", "/v1/models", "/openapi.json", "/server_info", "/get_server_info", "/nothing"):
            reply = await http.get(path, headers=bearer(key))
            assert KEY not in reply.text
            assert ADMIN_KEY not in reply.text
    assert KEY not in caplog.text
    assert ADMIN_KEY not in caplog.text
    assert KEY not in repr(ServerConfig(api_key=KEY))


def test_keys_come_from_flags_or_the_environment() -> None:
    environ = {"RADIXSERVE_API_KEY": "a", "RADIXSERVE_ADMIN_API_KEY": "b"}
    config = with_keys_of(environ, ServerConfig())
    assert (config.api_key, config.admin_api_key) == ("a", "b")
    assert with_keys_of(environ, ServerConfig(api_key="flag")).api_key == "flag"
    assert with_keys_of({}, ServerConfig()).api_key is None
    for value in ("", "two words", "tab\t", "é"):
        with pytest.raises(ConfigError, match="--api-key") as refused:
            with_keys_of({"RADIXSERVE_API_KEY": value}, ServerConfig())
        assert not value or value not in str(refused.value)
    with pytest.raises(ConfigError, match="--admin-api-key"):
        ServerConfig(api_key="same", admin_api_key="same")


def test_cors_flag_is_repeatable_or_comma_separated() -> None:
    args = make_parser().parse_args(["serve", "--cors-allow-origin", "https://a.example,http://b:8080", "--cors-allow-origin", "*"])
    assert config_from(args, ServerConfig).cors_allow_origin == ("https://a.example", "http://b:8080", "*")
    for origin in ("example.org", "https://a.example/", "https://a.example/path", "null"):
        with pytest.raises(ConfigError, match="--cors-allow-origin"):
            ServerConfig(cors_allow_origin=(origin,))


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


@with_options()
async def test_cors_is_off_by_default(http: httpx.AsyncClient) -> None:
    reply = await http.options("/v1/completions", headers={"origin": "https://a.example", **PREFLIGHT})
    assert reply.status_code == 405
    reply = await http.get("/v1/models", headers={"origin": "https://a.example"})
    assert not any(name.startswith("access-control") for name in reply.headers)


@with_options(api_key=KEY, cors_allow_origin=("https://a.example",))
async def test_cors_lets_a_page_of_an_allowed_origin_in_and_shows_it_errors(http: httpx.AsyncClient) -> None:
    """API-15. A browser sends no key with a preflight."""
    headers = {"origin": "https://a.example"}
    preflight = await http.options("/v1/chat/completions", headers=headers | PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert preflight.headers["x-request-id"]
    for extra, status in ((bearer(KEY), 200), ({}, 401)):
        reply = await http.get("/v1/models", headers=headers | extra)
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in reply.headers["access-control-expose-headers"]


@with_options(cors_allow_origin=("https://a.example",))
async def test_cors_tells_other_origins_nothing(http: httpx.AsyncClient) -> None:
    preflight = await http.options("/v1/completions", headers={"origin": "https://b.example"} | PREFLIGHT)
    assert preflight.status_code == 400
    assert preflight.json()["error"]["code"] == "cors_refused"
    for reply in (preflight, await http.get("/v1/models", headers={"origin": "https://b.example"})):
        assert "access-control-allow-origin" not in reply.headers


@with_options(accept_any_model=True)
async def test_any_model_name_is_served_where_asked_for(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", json={"model": "gpt-9", "prompt": "a", "max_tokens": 1})
    assert (reply.status_code, reply.json()["model"]) == (200, "echo")


@with_options(api_key=KEY)
async def test_answers_are_counted_by_route_and_status_with_few_labels(http: httpx.AsyncClient) -> None:
    for number in range(300):
        await http.get(f"/random/{number}", headers=bearer(KEY) if number % 2 else {})
        await http.get(f"/v1/models/{number}", headers=bearer(KEY))
    await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=bearer(KEY))
    await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    lines = [line for line in (await http.get("/metrics", headers=bearer(KEY))).text.splitlines() if line.startswith("radixserve_http_req")]
    totals = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if "_total{" in line}
    assert totals == {
        'radixserve_http_requests_total{route="other",status="401"}': 150,
        'radixserve_http_requests_total{route="other",status="404"}': 150,
        'radixserve_http_requests_total{route="/v1/models/{name:path}",status="404"}': 300,
        'radixserve_http_requests_total{route="/v1/completions",status="200"}': 1,
        'radixserve_http_requests_total{route="/v1/completions",status="401"}': 1,
    }
