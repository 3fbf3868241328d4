"""HTTP/1.1 heads as one server reads them, and connections that are held: uvicorn's h11 protocol, made stricter.

A head that two readers could take differently, that is too large or comes too slowly is refused before a request is
made of it. A client that only stopped sending is told from one that is gone by a harmless byte: who is gone answers it
with a reset.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from executors.frontend import errors
from executors.frontend.answers.writer import dump
from executors.frontend.errors import HEADERS, LATE, OVERLOAD, VALIDATION, ApiError
from executors.frontend.gate import family_of
from executors.frontend.metrics import Metrics
from executors.frontend.services import ABORT, STREAMING
from executors.frontend.settings import Settings

_BARE_CR: Final = re.compile(rb"\r(?!\n)")
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")
_FOLDED: Final = re.compile(rb"\r\n[ \t]")
_SPACE_BEFORE_COLON: Final = re.compile(rb"\r\n[^:\r\n]*[ \t]:")
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([^\r]*)", re.IGNORECASE)
_CODING: Final = re.compile(rb"\r\ntransfer-encoding:[ \t]*([^\r]*)", re.IGNORECASE)
_END: Final = b"\r\n\r\n"
_PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_COMMENT: Final = b":\n\n"
_PROBE_FIRST_S: Final = 0.01
_PROBE_LAST_S: Final = 1.0
_TCP_CLOSE: Final = 7
"""State of a Linux socket after a reset (TCP_CLOSE of netinet/tcp.h)."""


def check_head(buffered: bytes, settings: Settings) -> None:
    """Raises ApiError for the beginning of a request, complete or not, that must not be answered."""
    head, end, _ = buffered.partition(_END)
    if len(head) > settings.limits.header_bytes:
        raise ApiError(HEADERS, f"the head is larger than {settings.limits.header_bytes} bytes", close=True)
    for pattern, what in (
        (_BARE_LF, "a bare line feed"),
        (_FOLDED, "a folded line"),
        (_SPACE_BEFORE_COLON, "a space before a colon"),
    ):
        if pattern.search(head):
            raise _malformed(f"the head has {what}")
    if _BARE_CR.search(head if end else head[:-1]):
        raise _malformed("the head has a bare carriage return")
    if not end:
        return
    if head.count(b"\r\n") > settings.limits.headers:
        raise ApiError(HEADERS, f"there are more than {settings.limits.headers} headers", close=True)
    lengths, codings = _LENGTH.findall(head), _CODING.findall(head)
    if len(lengths) > 1 or any(not length.strip().isdigit() for length in lengths):
        raise _malformed("the length of the body is not one number")
    if codings and (lengths or [coding.strip().lower() for coding in codings] != [b"chunked"]):
        raise _malformed("a body has a length, or is chunked and nothing else")


class Doors:
    """How many connections are open, in all and by address."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._open = 0
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Whether one more may come in."""
        limits = self.settings.limits
        if self._open >= limits.connections or self._by_address[address] >= limits.connections_per_address:
            self.metrics.refused_connections.labels("too_many_connections").inc()
            return False
        self._open += 1
        self._by_address[address] += 1
        return True

    def leave(self, address: str) -> None:
        self._open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class StrictConnection(h11.Connection):
    """Looks at a head before h11 does. What it refused is in `refusal`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=settings.limits.header_bytes + 1024)
        self._settings = settings
        self.refusal: ApiError | None = None

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            try:
                check_head(self.trailing_data[0], self._settings)
            except ApiError as error:
                self.refusal = error
                raise h11.RemoteProtocolError(error.message) from None
        return super().next_event()


class StrictProtocol(H11Protocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        doors: Doors,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self._strict = StrictConnection(doors.settings)
        self._doors = doors
        self._address: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: self._hang_up}
        address = self.client[0] if self.client else ""
        if not self._doors.enter(address):
            self._refuse(ApiError(OVERLOAD, "too many connections", code="too_many_connections", close=True))
            return
        self._address = address
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        if self._address is not None:
            self._doors.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it for whatever is no HTTP."""
        self._refuse(self._strict.refusal or _malformed("this is no HTTP/1.1 request"))

    # --- heads that come slowly ------------------------------------------------------------

    def _watch_head(self) -> None:
        """A head that has begun must end in time; what is idle between requests has a longer time of its own."""
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun:
            self._forget_head()
        elif self._head_timer is None:
            self._await_head()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._doors.settings.deadlines.header_s, self._too_slow)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._refuse(ApiError(LATE, "the head came too slowly", code="header_timeout", close=True))

    # --- clients that stop sending ------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for its answer; asyncio can keep none open that is TLS."""
        waiting = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not waiting or self.scheme == "https":
            return False
        self._probe()
        return True

    def _probe(self) -> None:
        """Write what no client minds: between chunks of a stream a comment, before an answer an interim one."""
        if not self.cycle.response_started:
            self.transport.write(_PROBE)
        elif STREAMING in self.scope["state"]:
            self.transport.write(self.conn.send(h11.Data(data=_COMMENT)) or b"")
        self._look(_PROBE_FIRST_S)

    def _look(self, again_s: float) -> None:
        """Whether a reset has come. asyncio does not see it, because nothing is left to read."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if _was_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        after = self.loop.call_later(again_s, self._look, min(2 * again_s, _PROBE_LAST_S))
        self._probe_timer = after

    def _cancel_timers(self) -> None:
        self._forget_head()
        if self._probe_timer is not None:
            self._probe_timer.cancel()

    def _hang_up(self) -> None:
        """Close, and let the kernel forget what was not read."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    # --- refusals ------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Answer without an application, and close. A request that is being answered gets no second answer; one whose
        answer has not begun gets this one, and its application is told that the client is gone."""
        self._cancel_timers()
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_answer(error, self._doors.settings))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


def protocol(doors: Doors) -> Callable[..., StrictProtocol]:
    """What uvicorn calls for each connection."""

    def make(**given: Any) -> StrictProtocol:
        return StrictProtocol(**given, doors=doors)

    return make


def _answer(error: ApiError, settings: Settings) -> bytes:
    status = errors.status(error, settings)
    body = dump(errors.body(error, family_of("")))
    told = [*errors.headers(error, settings), (b"content-type", b"application/json")]
    told += [(b"content-length", str(len(body)).encode()), (b"x-request-id", secrets.token_hex(16).encode())]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in told)
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, STATUS_PHRASES.get(status, b""), lines, body)


def _malformed(message: str) -> ApiError:
    return ApiError(VALIDATION, message, code="malformed_request", close=True)


def _was_reset(sock: socket.socket) -> bool:
    """Whether the other side has answered with a reset; where that cannot be told, False until a write fails."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, option, 1)[0] == _TCP_CLOSE
    except OSError:
        return True
