"""Every error that a client may see: its status, its words in the envelopes of OpenAI and Anthropic, what it counts as.

A message never holds a path, an address of a worker, a stack or a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from executors.backend import End
from executors.frontend.settings import Settings
from policies.router.refusals import REFUSALS, Counted

Family = Literal["openai", "anthropic"]


class Kind(NamedTuple):
    """A class of errors. `counted` is its `error_type` in the metrics; `again`: the client may come back later."""

    status: int
    type: str
    code: str | None
    anthropic: str
    counted: str
    again: bool = False


_INVALID = "invalid_request_error"
VALIDATION: Final = Kind(400, _INVALID, None, _INVALID, "validation")
AUTHENTICATION: Final = Kind(401, _INVALID, "invalid_api_key", "authentication_error", "validation")
FORBIDDEN: Final = Kind(403, "permission_error", None, "permission_error", "validation")
NOT_FOUND: Final = Kind(404, "not_found_error", None, "not_found_error", "not_found")
METHOD: Final = Kind(405, _INVALID, "method_not_allowed", _INVALID, "validation")
LATE: Final = Kind(408, "timeout", "timeout", "api_error", "response_timeout")
TOO_LARGE: Final = Kind(413, _INVALID, "request_too_large", "request_too_large", "validation")
MEDIA: Final = Kind(415, _INVALID, "unsupported_media_type", _INVALID, "validation")
HEADERS: Final = Kind(431, _INVALID, "headers_too_large", _INVALID, "validation")
RATE_LIMIT: Final = Kind(429, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error", "overload", True)
OVERLOAD: Final = Kind(529, "overloaded_error", None, "overloaded_error", "overload", True)
UNAVAILABLE: Final = Kind(503, "service_unavailable", None, "api_error", "unavailable", True)
QUEUE_TIMEOUT: Final = UNAVAILABLE._replace(counted="overload")
ENGINE_TIMEOUT: Final = Kind(504, "timeout", "engine_timeout", "api_error", "response_timeout")
NOT_IMPLEMENTED: Final = Kind(501, "unsupported", "unsupported", "api_error", "not_implemented")
INTERNAL: Final = Kind(500, "server_error", None, "api_error", "internal")
CANCELLED: Final = Kind(499, "cancelled", "cancelled", "api_error", "cancelled")
"""Only counted and logged: nobody is there to read it."""

_BY_STATUS: Final[Mapping[int | None, Kind]] = {None: OVERLOAD, 400: VALIDATION, 404: NOT_FOUND, 503: UNAVAILABLE}
_BY_CODE: Final[Mapping[str, Kind]] = {
    "kv_capacity": OVERLOAD,
    "deadline_unmeetable": OVERLOAD,
    "too_many_connections": OVERLOAD,
    "worker_overload": OVERLOAD,
    "draining": UNAVAILABLE,
    "engine_shutdown": UNAVAILABLE,
    "worker_lost": UNAVAILABLE,
    "cannot_connect": UNAVAILABLE,
    "connection_timeout": UNAVAILABLE,
    "incomplete_stream": UNAVAILABLE,
    "response_timeout": ENGINE_TIMEOUT,
    "engine_timeout": ENGINE_TIMEOUT,
    "deadline": ENGINE_TIMEOUT,
    "unsupported": NOT_IMPLEMENTED,
}


class ApiError(Exception):
    """What a client is told instead of an answer. `param` names the field or header that is wrong."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code or kind.code
        self.retry_after_s = retry_after_s
        self.close = close
        """The connection ends with this answer."""


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A field that is wrong: `message` says what, and the limit."""
    return ApiError(VALIDATION, f"{param}: {message}", param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(
        VALIDATION, f"{param}: not supported by this server ({why})", param=param, code="unsupported_parameter"
    )


def of_end(end: End) -> ApiError:
    """The error that tells of an end which is not an answer."""
    message = end.reason or end.code or "the request did not complete"
    return ApiError(_kind(end), message, code=end.code or None, retry_after_s=end.retry_after_s)


def _kind(end: End) -> Kind:
    refusal = REFUSALS.get(end.code)
    if refusal is not None:
        kind = _BY_STATUS[refusal.status]
        return QUEUE_TIMEOUT if kind is UNAVAILABLE and refusal.counted is Counted.OVERLOAD else kind
    return _BY_CODE.get(end.code, UNAVAILABLE if end.outcome == "rejected" else INTERNAL)


def status(error: ApiError, settings: Settings) -> int:
    return settings.overload_status if error.kind is OVERLOAD else error.kind.status


def body(error: ApiError, family: Family) -> dict[str, object]:
    """The envelope that clients of `family` read."""
    if family == "anthropic":
        return {"type": "error", "error": {"type": error.kind.anthropic, "message": error.message}}
    told = {"message": error.message, "type": error.kind.type, "param": error.param, "code": error.code}
    return {"error": told}


def headers(error: ApiError, settings: Settings) -> list[tuple[bytes, bytes]]:
    """Beside those of every answer."""
    told: list[tuple[bytes, bytes]] = []
    if error.kind.again:
        after_s = settings.retry_after_s if error.retry_after_s is None else error.retry_after_s
        told.append((b"retry-after", str(max(1, math.ceil(after_s))).encode()))
    if error.close:
        told.append((b"connection", b"close"))
    return told
