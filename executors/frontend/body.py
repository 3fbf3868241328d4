"""Reading the body of a request: as much as is allowed, as fast as is demanded, never more in memory than that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from executors.frontend.errors import CANCELLED, LATE, MEDIA, TOO_LARGE, ApiError
from executors.frontend.json_text import read_object
from executors.frontend.services import Services

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_SMALL_BYTES: Final = 128 * 1024
"""Larger bodies are parsed beside the event loop."""


class Incoming:
    """`receive` of a request, which remembers whether its body is `over`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.over = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.over = not message.get("more_body", False)
        return message


def left() -> ApiError:
    """The client is gone; nobody will read this."""
    return ApiError(CANCELLED, "the client left", code="client")


async def read_json(services: Services, headers: Mapping[str, str], receive: Receive) -> dict[str, object]:
    """The object in the body. Raises ApiError for another type, a body too large or too slow, and what is not JSON."""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(MEDIA, f"content-type {media[:64]!r} is not taken; send application/json", param="content-type")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(MEDIA, f"content-encoding {coding[:64]!r} is not taken", param="content-encoding")
    body = await _read(services, headers, receive)
    services.metrics.body_bytes.observe(len(body))
    if len(body) <= _SMALL_BYTES:
        return read_object(body, services.settings.limits)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(services.pool, read_object, body, services.settings.limits)


async def _read(services: Services, headers: Mapping[str, str], receive: Receive) -> bytes:
    most, deadlines = services.settings.limits.body_bytes, services.settings.deadlines
    said = headers.get("content-length")
    if said is not None and int(said) > most:
        raise _too_large(most)
    body = bytearray()
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    try:
        while True:
            async with asyncio.timeout_at(begun_s + deadlines.body_s + len(body) / deadlines.body_bytes_per_s):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise left()
            body += message.get("body", b"")
            if len(body) > most:
                raise _too_large(most)
            if not message.get("more_body", False):
                return bytes(body)
    except TimeoutError:
        raise ApiError(LATE, "the body came too slowly", code="body_timeout", close=True) from None


def _too_large(most: int) -> ApiError:
    return ApiError(TOO_LARGE, f"the body is larger than {most} bytes", close=True)
