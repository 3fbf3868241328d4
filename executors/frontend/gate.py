"""What every HTTP request passes before anything else looks at it: framing, host, its id, its key.

Every answer gets the request's id, errors of the framework included; nothing of a client's headers is sent on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from executors.frontend.access import Role, demand
from executors.frontend.body import Incoming, Receive, Send
from executors.frontend.errors import AUTHENTICATION, INTERNAL, NOT_FOUND, VALIDATION, ApiError, Family
from executors.frontend.line import Line
from executors.frontend.services import CALL, Call, Services, new_request_id

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ADMIN_PATHS: Final = ("/busy_threshold", "/debug", "/dashboard/data")
_OPEN_PATHS: Final = ("/live", "/ready", "/health", "/dashboard")
_ONCE: Final = ("host", "content-length", "content-type", "authorization", "x-api-key", "x-request-id")
_SERVER_HEADERS: Final = ((b"x-content-type-options", b"nosniff"),)


class Gate:
    """ASGI middleware. `admin_only`: this listener has the paths of administrators and nothing else; `admin` False: it
    has everything but them."""

    def __init__(self, app: App, services: Services, *, admin: bool = True, admin_only: bool = False) -> None:
        self._app = app
        self._services = services
        self._admin = admin
        self._admin_only = admin_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received_s = self._services.now()
        raw = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = dict(raw)
        request_id = new_request_id(headers.get("x-request-id"))
        family = family_of(scope["path"])
        told = _with_id(send, request_id, headers.get("traceparent"))
        incoming = Incoming(receive)
        line = Line(told, self._services.settings, scope.setdefault("state", {}))
        try:
            self._check(scope, raw, headers)
            principal = self._services.keys.who(headers.get("authorization"), headers.get("x-api-key"))
            scope[CALL] = Call(request_id, received_s, family, principal, headers)
            self._may(scope["path"], scope[CALL])
        except ApiError as error:
            if not (error.kind is AUTHENTICATION and (self._is_open(scope["path"]) or self._is_preflight(scope))):
                self._count(error)
                await line.error(error, family, incoming)
                return
        await self._within(scope, incoming, told, line, family)

    async def _within(self, scope: Scope, incoming: Incoming, send: Send, line: Line, family: Family) -> None:
        started = False

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, incoming, noting)
        except ApiError as error:
            if not started:
                await line.error(error, family, incoming)
        except Exception:
            log.exception("%s %s failed", scope["method"], family)
            if not started:
                await line.error(ApiError(INTERNAL, "the request failed inside the server"), family, incoming)

    def _check(self, scope: Scope, raw: list[tuple[str, str]], headers: Mapping[str, str]) -> None:
        """What the server below would let pass, and another reader might take differently."""
        names = [name for name, _ in raw]
        for name in _ONCE:
            if names.count(name) > 1:
                raise _malformed(f"the header {name} stands twice")
        if "transfer-encoding" in headers and "content-length" in headers:
            raise _malformed("a body has a length or is chunked, not both")
        if not scope.get("raw_path", b"/").startswith(b"/"):
            raise _malformed("the target of a request is a path")
        allowed = self._services.settings.access.allowed_hosts
        if allowed and _host(headers.get("host", "")) not in allowed:
            raise _malformed("this host is not served here")

    def _may(self, path: str, call: Call) -> None:
        is_admin = path.startswith(ADMIN_PATHS)
        if is_admin:
            demand(call.principal, Role.ADMIN)
        elsewhere = not self._admin if is_admin else self._admin_only and not self._is_open(path)
        if elsewhere:
            raise ApiError(NOT_FOUND, f"{path[:128]}: there is no such path on this port", code="not_found")

    def _is_open(self, path: str) -> bool:
        if path.startswith(ADMIN_PATHS):
            return False
        return path.startswith(_OPEN_PATHS) or (path == "/metrics" and self._services.settings.access.metrics_open)

    def _is_preflight(self, scope: Scope) -> bool:
        """A browser's question whether it may ask, which never carries a key."""
        return scope["method"] == "OPTIONS" and bool(self._services.settings.access.cors_origins)

    def _count(self, error: ApiError) -> None:
        metrics = self._services.metrics
        if error.kind.status in (401, 403):
            metrics.auth_failures.labels(error.code or error.kind.type).inc()
        metrics.failures.labels(error.kind.counted, error.code or "").inc()


def family_of(path: str) -> Family:
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"


def _malformed(message: str) -> ApiError:
    return ApiError(VALIDATION, message, code="malformed_request", close=True)


def _host(value: str) -> str:
    """A Host header without its port."""
    if value.startswith("["):
        return value.partition("]")[0] + "]"
    return value.partition(":")[0].lower()


def _with_id(send: Send, request_id: str, traceparent: str | None) -> Send:
    added = [*_SERVER_HEADERS, (b"x-request-id", request_id.encode())]
    if traceparent is not None and traceparent.isascii() and traceparent.isprintable() and len(traceparent) <= 128:
        added.append((b"traceparent", traceparent.encode()))

    async def send_with_id(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return send_with_id
