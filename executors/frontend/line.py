"""The way back to a client: whole answers, streams, errors. A client that does not read is given up on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from executors.frontend import errors
from executors.frontend.answers.writer import dump
from executors.frontend.body import Incoming, Receive, Send, left
from executors.frontend.errors import CANCELLED, TOO_LARGE, ApiError, Family
from executors.frontend.services import STREAMING
from executors.frontend.settings import Settings

_JSON: Final = (b"content-type", b"application/json")
_STREAM: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_LINGER_BYTES: Final = 64 * 1024 * 1024
_LINGER_S: Final = 5.0


class Line:
    """One answer. `started`: its status is sent, and nothing but its own end can follow."""

    def __init__(self, send: Send, settings: Settings, state: MutableMapping[str, object]) -> None:
        """`state` is that of the connection: whoever holds the socket sees there that a stream is under way."""
        self._send = send
        self._state = state
        self._settings = settings
        self._watch: asyncio.Task[None] | None = None
        self.started = False

    @asynccontextmanager
    async def attended(self, receive: Receive) -> AsyncIterator[None]:
        """While it lasts, the client's leaving cancels the task within, which becomes an ApiError (`left`)."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def until_gone() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        self._watch = asyncio.create_task(until_gone())
        try:
            yield
        except asyncio.CancelledError:
            if gone and task.uncancel() == 0:
                raise left() from None
            raise
        finally:
            self.complete()

    def complete(self) -> None:
        """The answer is whole, though not all of it sent: who leaves now has not cancelled it."""
        if self._watch is not None:
            self._watch.cancel()

    async def whole(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (_JSON,)) -> None:
        self.started = True
        self.complete()
        await self._write({"type": "http.response.start", "status": status, "headers": _sized(headers, body)})
        await self._write({"type": "http.response.body", "body": body})

    async def chunk(self, data: bytes) -> None:
        """More of a stream; the first brings the status."""
        if not self.started:
            self.started = self._state[STREAMING] = True
            await self._write({"type": "http.response.start", "status": 200, "headers": list(_STREAM)})
        if data:
            await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        self.complete()
        await self._write({"type": "http.response.body", "body": b""})

    async def error(self, error: ApiError, family: Family, incoming: Incoming) -> None:
        """An error instead of an answer. Where the body is too large it is read on for a while and thrown away: a
        client that is cut off while it sends never sees why."""
        status, body = errors.status(error, self._settings), dump(errors.body(error, family))
        headers = [_JSON, *errors.headers(error, self._settings)]
        if error.kind is not TOO_LARGE:
            await self.whole(status, body, headers)
            return
        self.started = True
        await self._write({"type": "http.response.start", "status": status, "headers": _sized(headers, body)})
        await self._write({"type": "http.response.body", "body": body, "more_body": True})
        await _throw_away(incoming)
        await self.end()

    async def _write(self, message: Mapping[str, object]) -> None:
        try:
            async with asyncio.timeout(self._settings.deadlines.stall_s):
                await self._send(dict(message))
        except TimeoutError:
            raise ApiError(CANCELLED, "the client does not read", code="slow_reader") from None


async def _throw_away(incoming: Incoming) -> None:
    seen = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while seen < _LINGER_BYTES and not incoming.over:
                seen += len((await incoming()).get("body", b""))


def _sized(headers: Sequence[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    return [*headers, (b"content-length", str(len(body)).encode())]
