"""One request for answers from its body to its last byte: read, understand, encode, submit, tell.

The four HTTP APIs differ in how they read a body and how they write events; everything between is here, once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final

from executors.frontend.access import Role
from executors.frontend.account import Account, Endpoint
from executors.frontend.answers.anthropic import MessagesWriter
from executors.frontend.answers.openai import ChatWriter, CompletionWriter
from executors.frontend.answers.responses import ResponsesWriter
from executors.frontend.answers.writer import Result, Writer, dump
from executors.frontend.body import Incoming, Receive, Send, read_json
from executors.frontend.encode import encode
from executors.frontend.errors import CANCELLED, INTERNAL, OVERLOAD, ApiError, invalid
from executors.frontend.line import Line
from executors.frontend.requests.anthropic import read_messages
from executors.frontend.requests.openai import read_chat, read_completion
from executors.frontend.requests.responses import read_responses
from executors.frontend.requests.rules import Rules
from executors.frontend.requests.wanted import Wanted
from executors.frontend.run import Done, Run, Text
from executors.frontend.services import ABORT, CALL, Call, Services
from policies.frozen import frozen

log = logging.getLogger(__name__)

_TIMEOUT_HEADER: Final = "x-request-timeout-ms"


@frozen
class Api:
    """How one endpoint reads and writes."""

    endpoint: Endpoint
    read: Callable[[Mapping[str, object], Rules], Wanted]
    writer: type[Writer]


CHAT: Final = Api(endpoint="chat_completions", read=read_chat, writer=ChatWriter)
COMPLETIONS: Final = Api(endpoint="completions", read=read_completion, writer=CompletionWriter)
RESPONSES: Final = Api(endpoint="responses", read=read_responses, writer=ResponsesWriter)
MESSAGES: Final = Api(endpoint="anthropic_messages", read=read_messages, writer=MessagesWriter)


class Exchange:
    """An ASGI answer to one request."""

    def __init__(self, services: Services, api: Api) -> None:
        self._services = services
        self._api = api

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        call: Call = scope[CALL]
        incoming = Incoming(receive)
        line = Line(send, self._services.settings, scope["state"])
        account = Account(self._services, call, self._api.endpoint)
        try:
            with self._services.open:
                await self._converse(call, account, line, incoming)
        except Exception as raised:
            error = raised if isinstance(raised, ApiError) else inside(call)
            account.fail(error)
            if not line.started and error.kind is not CANCELLED:
                await line.error(error, call.family, incoming)
            elif error.code == "slow_reader":
                self._services.metrics.slow_reader.inc()
                await hang_up(scope)
        finally:
            account.close()

    async def _converse(self, call: Call, account: Account, line: Line, receive: Receive) -> None:
        services = self._services
        services.stopping.check()
        admit(services)
        services.rate.request(call.principal)
        document = await read_json(services, call.headers, receive)
        async with line.attended(receive):
            wanted = self._api.read(document, rules(services, call))
            async with running(services, call, account, wanted) as run:
                await (self._stream if wanted.stream else self._unary)(run, line)

    async def _stream(self, run: Run, line: Line) -> None:
        writer = self._api.writer(run)
        try:
            event = await run.next_event()  # an error that comes before has a status of its own
            await line.chunk(writer.start())
            while True:
                await line.chunk(_written(writer, event))
                if run.open == 0:
                    line.complete()
                    break
                event = await run.next_event(self._services.settings.deadlines.keep_alive_s)
            await line.chunk(writer.end())
        except ApiError as error:
            if not line.started or error.kind is CANCELLED:
                raise
            run.account.fail(error)
            await line.chunk(writer.error(error))
        await line.end()

    async def _unary(self, run: Run, line: Line) -> None:
        parts: dict[int, list[Text]] = {}
        done: dict[int, Done] = {}
        while run.open:
            match await run.next_event():
                case Text() as event:
                    parts.setdefault(event.choice, []).append(event)
                case Done() as event:
                    done[event.choice] = event
        results = [_result(parts.get(index, []), done[index]) for index in sorted(done)]
        await line.whole(200, dump(self._api.writer(run).body(results)))


@asynccontextmanager
async def running(services: Services, call: Call, account: Account, wanted: Wanted) -> AsyncIterator[Run]:
    """A run that has started; when the block is left, nothing of it goes on."""
    account.begin(wanted)
    total_s, client_deadline = deadline(services, call)
    model = services.model(wanted.model)
    run = Run(services, call, model, wanted, await encode(services, model, wanted), account)
    services.stopping.check_begun()
    try:
        run.start(total_s, client_deadline=client_deadline)
        yield run
    finally:
        await run.close()


def inside(call: Call) -> ApiError:
    """For an exception that is a fault of ours: its insides are for the log."""
    log.exception("request %s failed", call.request_id)
    return ApiError(INTERNAL, "the request failed inside the server")


async def hang_up(scope: MutableMapping[str, Any]) -> None:
    """Close the connection although what was written is not read; the server below says how (`wire.py`)."""
    abort = scope.get("state", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server takes note


def rules(services: Services, call: Call) -> Rules:
    settings = services.settings
    return Rules(
        limits=settings.limits,
        abilities=settings.abilities,
        trusted=call.principal.role >= Role.TRUSTED,
        ignore_pins=settings.access.untrusted_pins == "ignore",
        allow_unknown=settings.allow_unknown,
        headers=call.headers,
        count=services.metrics.let_by,
    )


def admit(services: Services) -> None:
    """Raises ApiError where as many requests are open as may be."""
    most = services.settings.limits.in_flight
    if services.open.count > most:
        raise ApiError(OVERLOAD, f"{most} requests are open, which is the limit", code="queue_limit")


def deadline(services: Services, call: Call) -> tuple[float | None, bool]:
    """Seconds from arrival for the whole answer, and whether the client set them."""
    ours = services.settings.deadlines.total_s
    text = call.headers.get(_TIMEOUT_HEADER)
    if text is None:
        return ours, False
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise invalid(_TIMEOUT_HEADER, "must be a whole number of milliseconds above 0")
    theirs = int(text) / 1e3
    return (theirs, True) if ours is None or theirs < ours else (ours, False)


def _written(writer: Writer, event: Text | Done | None) -> bytes:
    match event:
        case Text():
            return writer.text(event)
        case Done():
            return writer.done(event)
        case None:
            return writer.keep_alive


def _result(parts: list[Text], done: Done) -> Result:
    text = "".join(part.text for part in parts)
    return Result(text=text, logprobs=tuple(one for part in parts for one in part.logprobs), done=done)
