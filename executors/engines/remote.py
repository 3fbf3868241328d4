"""What engines behind a URL have in common: asking within deadlines, and telling apart how a leg fails.

HTTP 200 is not success: a leg has ended well only when its engine says why it ended. The deadlines are ours; no engine
is trusted to keep one. A connection belongs to one leg, so that closing it stops the leg and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeAlias

import aiohttp

from executors.deadlines import USUAL, Deadlines
from executors.engines.protocol import Ability, Facts, LegFailed, LegRequest, Load, Moves, Piece
from executors.process import EngineProcess
from policies.cluster.ids import LossCause, Role
from policies.errors import CapabilityError, EngineError
from policies.frozen import frozen

Now: TypeAlias = Callable[[], float] | None
"""A clock, in seconds."""

_POLL_S = 0.25
"""Between looks at an engine that starts, which takes tens of seconds at best."""
_REASON_CHARS = 200
_NO_ROOM = (429, 503)
"""Statuses that ask to come again, not to change the request."""


@frozen
class Attached:
    """Where an engine is, and what it does not say of itself: `max_num_seqs` and `max_batched_tokens` as it was started
    (None: it has to tell). `process` is the one that it runs in, where we started it."""

    name: str
    url: str
    role: Role = Role.MIXED
    gpus: int = 1
    on_cpu: bool = False
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    process: EngineProcess | None = None


class Remote:
    """An engine behind a URL; a kind of engine fills in how a leg is asked for, and what is read of it."""

    moves = Moves.AFTER
    kind = ""
    health_path = "/health"

    def __init__(self, at: Attached, deadlines: Deadlines = USUAL, now: Now = None) -> None:
        self.at = at
        self.deadlines = deadlines
        self.facts: Facts | None = None
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    @property
    def name(self) -> str:
        return f"{self.at.name} ({self.kind} at {self.at.url})"

    @property
    def abilities(self) -> frozenset[Ability]:
        raise NotImplementedError

    async def read_facts(self) -> Facts:
        """What the engine says of itself; raises EngineError when something is missing."""
        raise NotImplementedError

    def pieces(self, request: LegRequest) -> AsyncGenerator[Piece]:
        """The pieces of a leg as they come, the last one too; raises LegFailed."""
        raise NotImplementedError

    async def read_load(self) -> Load | None:
        """What the engine has to do; raises EngineError when it does not answer."""
        raise NotImplementedError

    async def abort(self, leg_id: str) -> None:
        """Told by the closed connection alone, where an engine has no route for it."""

    def now(self) -> float:
        """The world's clock; the loop's where none was given."""
        return self._now() if self._now is not None else asyncio.get_running_loop().time()

    def meeting_point(self) -> Mapping[str, object]:
        raise CapabilityError(f"legs of {self.kind} do not meet: one hands over to the other")

    # ------------------------------------------------------------ coming and going

    async def ready(self, deadline_s: float) -> Facts:
        if self.at.process is not None:
            await self.at.process.wait_ready(self.alive, deadline_s)
        else:
            await self._wait_alive(deadline_s)
        self.facts = await self.read_facts()
        return self.facts

    async def _wait_alive(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not await self.alive():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineError(f"{self.name} is not ready after {deadline_s:g} s") from None

    async def alive(self) -> bool:
        if self.at.process is not None and self.at.process.ended is not None:
            return False
        with contextlib.suppress(EngineError):
            await self.get(self.health_path)
            return True
        return False

    async def load(self) -> Load | None:
        with contextlib.suppress(EngineError):  # too busy to say: health checks find out about worse
            return await self.read_load()
        return None

    async def drain(self, deadline_s: float) -> None:
        """Ends the process where it is ours; an engine that somebody else started goes on."""
        if self.at.process is not None:
            await self.at.process.stop(deadline_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self.at.process is not None:
            await self.at.process.stop(0)

    # ------------------------------------------------------------ legs

    async def generate(self, request: LegRequest) -> AsyncGenerator[Piece]:
        over = False
        try:
            async with contextlib.aclosing(self.pieces(request)) as pieces:
                async for piece in pieces:
                    over = bool(piece.finish or piece.handoff or piece.prefilled)
                    yield piece
                    if over:
                        return
            raise LegFailed(LossCause.INCOMPLETE, f"{self.at.name}: the answer ended without a reason to end")
        except LegFailed as failed:
            over = failed.cause is not LossCause.RESPONSE_TIMEOUT  # else it may still be at work
            raise
        finally:
            if not over:
                await asyncio.shield(self._give_up(request.leg_id))

    async def _give_up(self, leg_id: str) -> None:
        with contextlib.suppress(EngineError):
            await self.abort(leg_id)

    # ------------------------------------------------------------ HTTP

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.deadlines.connect_s)
            # A kept connection may be closed by the engine just as a leg goes out on it: none is kept.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(self.at.url, timeout=timeout, connector=connector)
        return self._session

    async def get(self, path: str) -> str:
        """The body of a page. Raises EngineError when it does not come in time, or not with status 200."""
        return await self._ask("GET", path)

    async def get_json(self, path: str) -> Any:
        return self._parsed(path, await self._ask("GET", path))

    async def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        text = await self._ask("POST", path, body)
        return self._parsed(path, text) if text else None

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        try:
            async with asyncio.timeout(self.deadlines.control_s):
                async with self.session.request(method, path, json=body) as response:
                    text = await response.text()
        except TimeoutError:
            raise EngineError(f"{self.name}: no answer on {path} in {self.deadlines.control_s:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.name}: {path} cannot be asked ({_short(str(error))})") from error
        if response.status != 200:
            raise EngineError(f"{self.name}: {path} answers {response.status} ({_short(text)})")
        return text

    def _parsed(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise EngineError(f"{self.name}: {path} does not answer in JSON ({_short(text)})") from error

    async def answer(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        """The whole answer of a leg that does not stream, within the deadline to a first token. Raises LegFailed."""
        try:
            async with asyncio.timeout(self.deadlines.first_token_s):
                async with self.session.post(path, json=body, headers=headers) as response:
                    text = await response.text()
                    if response.status != 200:
                        raise self._refusal(response.status, text)
            return json.loads(text)
        except TimeoutError as error:
            raise self._late(error, self.deadlines.first_token_s, "no answer") from None
        except aiohttp.ClientError as error:
            raise self._broken(error) from error
        except ValueError as error:
            raise LegFailed(LossCause.INCOMPLETE, f"{self.at.name}: the answer is no JSON") from error

    async def events(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> AsyncGenerator[Any]:
        """Server-sent events of a leg, parsed, up to the end mark; each within its deadline. Raises LegFailed."""
        limit_s, what = self.deadlines.first_token_s, "no first token"
        try:
            async with contextlib.AsyncExitStack() as open_until:
                async with asyncio.timeout(limit_s):
                    response = await open_until.enter_async_context(self.session.post(path, json=body, headers=headers))
                    if response.status != 200:
                        raise self._refusal(response.status, await response.text())
                    lines = await open_until.enter_async_context(contextlib.aclosing(_data(response.content)))
                    data = await anext(lines, None)
                while data is not None and data != b"[DONE]":
                    event = json.loads(data)
                    if isinstance(event, dict) and event.get("error"):
                        raise self._refusal(*_error(event["error"]))
                    yield event
                    limit_s, what = self.deadlines.between_tokens_s, "no further token"
                    async with asyncio.timeout(limit_s):
                        data = await anext(lines, None)
        except TimeoutError as error:
            raise self._late(error, limit_s, what) from None
        except aiohttp.ClientError as error:
            raise self._broken(error) from error
        except ValueError as error:
            raise LegFailed(LossCause.INCOMPLETE, f"{self.at.name}: part of the answer is no JSON") from error

    # ------------------------------------------------------------ how a leg fails

    def _late(self, error: TimeoutError, limit_s: float | None, what: str) -> LegFailed:
        if limit_s is None or isinstance(error, aiohttp.ConnectionTimeoutError):
            limit_s = self.deadlines.connect_s
            return LegFailed(LossCause.CONNECT_TIMEOUT, f"{self.at.name}: no connection in {limit_s:g} s")
        return LegFailed(LossCause.RESPONSE_TIMEOUT, f"{self.at.name}: {what} in {limit_s:g} s")

    def _broken(self, error: aiohttp.ClientError) -> LegFailed:
        if isinstance(error, aiohttp.ClientConnectorError):
            return LegFailed(LossCause.CONNECT, f"{self.at.name}: cannot be reached")
        return LegFailed(LossCause.DISCONNECTED, f"{self.at.name}: the connection broke")

    def refused(self, what: str) -> LegFailed:
        """What this kind of engine cannot be asked for: nothing is sent."""
        return LegFailed(LossCause.ENGINE_ERROR, f"{self.at.name}: {self.kind} {what}", refused=True)

    def _refusal(self, status: int, text: str) -> LegFailed:
        why = f"{self.at.name}: {status} ({_short(text)})"
        if status in _NO_ROOM:
            return LegFailed(LossCause.OVERLOAD, why, refused=True)
        return LegFailed(LossCause.ENGINE_ERROR, why, refused=400 <= status < 500)

    def ended(self, reason: object, message: object = "") -> LegFailed:
        """The failure behind a reason to end that is none of success. An abort that nobody here has asked for is the
        engine's own: it shuts down."""
        cause = LossCause.SHUTDOWN if reason == "abort" else LossCause.ENGINE_ERROR
        said = f" ({_short(str(message))})" if message else ""
        return LegFailed(cause, f"{self.at.name}: the engine ended it with {reason!r}{said}")


async def _data(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """The `data:` lines of a stream, of any length; comments that only keep it alive are no data."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _error(error: Any) -> tuple[int, str]:
    """Status and text of an error inside a stream; 500 where it does not say."""
    if not isinstance(error, dict):
        return 500, str(error)
    code = error.get("code")
    return code if isinstance(code, int) else 500, str(error.get("message", ""))


def _short(text: str) -> str:
    """What an engine says, on one line. An error page may repeat the request, so little of it is kept."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error.get("message", text)) if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:_REASON_CHARS]
