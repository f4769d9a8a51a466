"""Wrong methods and wrong paths: what is allowed is said in full, and nobody is sent elsewhere."""

import pytest

from tests.http.conftest import Served
from tests.http.test_refusals import assert_error


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/generate", "POST, PUT"),
        ("DELETE", "/flush_cache", "GET, POST"),
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/metrics", "GET, HEAD"),
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models/echo", "GET"),
        ("POST", "/openapi.json", "GET, HEAD"),
    ],
)
async def test_a_405_lists_all_methods_of_its_path(served: Served, method: str, path: str, allowed: str) -> None:
    reply = await served.http.request(method, path)
    assert_error(reply, 405, "method_not_allowed", None)
    assert ", ".join(sorted(reply.headers["allow"].split(", "))) == allowed


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "/generate/", "/flush_cache/", "/v1/models/echo//x/"])
async def test_a_slash_at_the_end_is_another_path_and_no_redirect(served: Served, method: str, path: str) -> None:
    reply = await served.http.request(method, path, headers={"host": "elsewhere.example"}, json={"prompt": "a"})
    assert reply.status_code in (404, 405)
    assert "location" not in reply.headers
    assert reply.json().keys() == {"error"}
    assert "elsewhere" not in reply.text
