"""Who may ask what: API keys. An ASGI layer before the routes; knows paths and keys, no route's meaning."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.server.errors import ApiError, error_response

# What probes and collectors of metrics ask, which have no key; the pages of documentation tell nothing secret.
OPEN_PATHS = frozenset(
    (
        *("/health", "/ping", "/live", "/ready", "/version", "/load", "/metrics"),
        *("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"),
    )
)


class AccessControl:
    """Lets a request through if it has one of `keys`, where there are any, and for `admin_paths` one of `admin_keys`.

    An admin key opens everything.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], admin_keys: Iterable[str], admin_paths: Iterable[str]):
        self._app = app
        self._keys = [_digest(key) for key in keys]
        self._admin_keys = [_digest(key) for key in admin_keys]
        self._admin_paths = frozenset(admin_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" and scope["method"] != "OPTIONS" else None
        await (self._app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root).rstrip("/") or "/"
        needs_admin = path in self._admin_paths
        if not needs_admin and (not self._keys or path in OPEN_PATHS):
            return None
        if needs_admin and not self._admin_keys:
            return ApiError(f"{path} needs a server with --admin-api-key", status=403, code="no_admin_key")
        given = _given_key(Headers(scope=scope))
        if given is None:
            return _unauthorized(
                f"{path} needs {'an admin' if needs_admin else 'an API'} key: Authorization: Bearer KEY"
            )
        if _is_among(given, self._admin_keys):
            return None
        if _is_among(given, self._keys):
            return ApiError(f"{path} needs an admin key", status=403, code="no_admin_key") if needs_admin else None
        return _unauthorized("the API key is wrong")


def _given_key(headers: Headers) -> bytes | None:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return _digest(key.strip()) if kind.lower() == "bearer" and key.strip() else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _is_among(given: bytes, keys: Iterable[bytes]) -> bool:
    """Compares with all of them, so that the time tells nothing."""
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)


def _unauthorized(message: str) -> ApiError:
    return ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
