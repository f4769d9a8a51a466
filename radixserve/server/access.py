"""Who may call which route: API keys, compared in constant time, in front of every route, known or not.

No key configured: everything is open. A key is never logged and never in an error message.
"""

import dataclasses
import hmac
from collections.abc import Mapping, Sequence

from radixserve.config import ServerConfig
from radixserve.errors import ForbiddenError, UnauthorizedError

API_KEY_VARIABLE = "RADIXSERVE_API_KEY"
ADMIN_API_KEY_VARIABLE = "RADIXSERVE_ADMIN_API_KEY"

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no key; both say nothing but a state
ADMIN_PATHS = frozenset({"/abort_request", "/flush_cache", "/pin", "/reset_prefix_cache"})  # what one client could do to all others
ADMIN_PREFIX = "/admin/"


def with_keys_of(environ: Mapping[str, str], config: ServerConfig) -> ServerConfig:
    """The config with keys from the environment where no flag gave one: a flag is in the process list, a variable is not."""
    return dataclasses.replace(
        config,
        api_key=config.api_key if config.api_key is not None else environ.get(API_KEY_VARIABLE),
        admin_api_key=config.admin_api_key if config.admin_api_key is not None else environ.get(ADMIN_API_KEY_VARIABLE),
    )


class AccessGuard:
    """With an admin key, admin routes take it alone; without one, the API key guards them too. The admin key opens every route."""

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        self._api_key = None if api_key is None else api_key.encode()
        self._admin_key = None if admin_api_key is None else admin_api_key.encode()

    def check(self, path: str, authorization: Sequence[bytes]) -> None:
        """`authorization`: the values of all such headers. Raises UnauthorizedError, ForbiddenError."""
        needs_admin = self._admin_key is not None and is_admin_path(path)
        if path in OPEN_PATHS or (self._api_key is None and not needs_admin):
            return
        given = _bearer(authorization)
        # both are compared in every case: the time tells nothing of which one was nearly right
        is_admin = self._admin_key is not None and hmac.compare_digest(given, self._admin_key)
        is_user = self._api_key is not None and hmac.compare_digest(given, self._api_key)
        if is_admin or (is_user and not needs_admin):
            return
        if is_user:
            raise ForbiddenError(f"{path} needs the admin key")
        if not given:
            raise UnauthorizedError("expected an API key in the header 'Authorization: Bearer KEY', got none")
        raise UnauthorizedError("the API key is not correct")


def is_admin_path(path: str) -> bool:
    return path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX)


def _bearer(authorization: Sequence[bytes]) -> bytes:
    """The key, or b"" for no header, another scheme, or several headers."""
    if len(authorization) != 1:
        return b""
    scheme, _, key = authorization[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
