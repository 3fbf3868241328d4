"""Leaving, draining, closing: T1-T6 of the contract on a clock that the test turns by hand."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from frontend_builders import (
    ANSWER,
    MODEL,
    Script,
    ScriptedBackend,
    Served,
    block_encoding,
    chat,
    frames,
    ids_of,
    run,
    served,
    tokenizer,
)

from executors.frontend.server import EXIT_CUT, Frontend
from executors.frontend.settings import Deadlines, Settings
from executors.frontend.stopping import Phase, Stopping

CHAT = "/v1/chat/completions"
BOUNDS = Settings(deadlines=replace(Deadlines(), grace_s=5.0, drain_s=30.0))


class HandClock:
    """`sleep` lasts until `turn` has gone so far."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waits: list[tuple[float, asyncio.Event]] = []
        self._slept = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self._waits.append((self.now_s + seconds, event))
        self._slept.set()
        await event.wait()

    async def turn(self, to_s: float) -> None:
        """Go on to `to_s`; whoever was to wake up by then has, and sleeps again."""
        while due := sorted(at_s for at_s, event in self._waits if at_s <= to_s and not event.is_set()):
            self.now_s = due[0]
            self._slept.clear()
            for at_s, event in self._waits:
                if at_s <= self.now_s:
                    event.set()
            for _ in range(5):  # tasks that end wake those that wait for them
                await asyncio.sleep(0)
        self.now_s = to_s

    async def asked(self) -> None:
        await self._slept.wait()


@asynccontextmanager
async def stopping(script: Script) -> AsyncIterator[tuple[Served, HandClock, Stopping]]:
    clock = HandClock()
    phases = Stopping(clock.sleep)
    async with served(ScriptedBackend(script), BOUNDS, stopping=phases, stop=False) as it:
        yield it, clock, phases


@run
async def test_new_requests_are_served_within_the_grace_and_refused_after_it() -> None:
    soon, never = asyncio.Event(), asyncio.Event()
    async with stopping(Script(says=ids_of(ANSWER), before={2: soon})) as (it, clock, phases):
        first = asyncio.create_task(it.post(CHAT, chat(stream=True)))
        await it.backend.arrived.wait()
        it.backend.script = Script(says=ids_of(ANSWER), before={2: never})
        it.backend.arrived.clear()
        second = asyncio.create_task(it.post(CHAT, chat(stream=True)))
        await it.backend.arrived.wait()
        it.backend.script = Script(says=ids_of(ANSWER))
        stopped = asyncio.create_task(it.frontend.stop())
        await clock.asked()
        await clock.turn(1)
        ready = await it.http.get("/ready")
        assert (ready.status_code, ready.json()["missing"]) == (503, ["this server is shutting down"])
        assert (await it.http.get("/live")).status_code == 200
        assert (await it.post(CHAT, chat())).status_code == 200
        soon.set()
        assert frames((await first).text)[-1] == "[DONE]"
        await clock.turn(6)
        assert phases.phase is Phase.DRAINING
        refused = await it.post(CHAT, chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        anthropic = await it.post("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": chat()["messages"]})
        assert anthropic.json()["error"]["type"] == "api_error"
        await clock.turn(34)
        assert not second.done()
        await clock.turn(35)
        told = frames((await second).text)
        assert json.loads(told[-2])["error"]["code"] == "engine_shutdown"
        assert told[-1] == "[DONE]"
        assert await stopped == EXIT_CUT
        assert it.backend.answers[1].cancelled


@run
async def test_a_stop_that_cuts_nothing_ends_as_soon_as_all_is_done_with_0() -> None:
    soon = asyncio.Event()
    async with stopping(Script(says=ids_of(ANSWER), before={2: soon})) as (it, clock, _):
        first = asyncio.create_task(it.post(CHAT, chat()))
        await it.backend.arrived.wait()
        stopped = asyncio.create_task(it.frontend.stop())
        await clock.asked()
        await clock.turn(5)
        soon.set()
        assert (await first).status_code == 200
        assert await stopped == 0
        assert clock.now_s == 5


@run
async def test_a_second_signal_cuts_everything_at_once() -> None:
    never = asyncio.Event()
    async with stopping(Script(says=ids_of(ANSWER), before={2: never})) as (it, clock, phases):
        streams = [asyncio.create_task(it.post(CHAT, chat(stream=at == 0))) for at in range(2)]
        while len(it.backend.answers) < 2:
            await asyncio.sleep(0)
        stopped = asyncio.create_task(it.frontend.stop())
        await clock.asked()
        await clock.turn(10)
        phases.hurry()
        stream, whole = [await one for one in streams]
        assert json.loads(frames(stream.text)[-2])["error"]["code"] == "engine_shutdown"
        assert whole.status_code == 503
        assert await stopped == EXIT_CUT
        assert phases.cut == 2


@run
async def test_what_has_not_begun_when_everything_is_cut_does_not_begin() -> None:
    async with stopping(Script(says=ids_of(ANSWER))) as (it, clock, phases):
        free = block_encoding(it)
        late = asyncio.create_task(it.post(CHAT, chat()))
        while not it.frontend.services.open.count:
            await asyncio.sleep(0)
        stopped = asyncio.create_task(it.frontend.stop())
        await clock.asked()
        phases.hurry()
        while phases.phase < Phase.CUTTING:
            await asyncio.sleep(0)
        free.set()
        answer = await late
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_shutdown")
        await stopped
        assert it.backend.asks == []


@run
async def test_an_idle_server_ends_with_its_grace() -> None:
    async with stopping(Script()) as (it, clock, phases):
        stopped = asyncio.create_task(it.frontend.stop())
        await clock.asked()
        await clock.turn(4.9)
        assert not stopped.done()
        await clock.turn(5)
        assert await stopped == 0
        assert phases.phase is Phase.CLOSED


@run
async def test_signals_lead_through_the_same_phases() -> None:
    clock = HandClock()
    settings = replace(BOUNDS, port=0)
    frontend = Frontend(ScriptedBackend(), {MODEL: tokenizer()}, settings, Stopping(clock.sleep))
    code = asyncio.create_task(frontend.run())
    while not frontend.ports:
        await asyncio.sleep(0)
    signal.raise_signal(signal.SIGTERM)
    await clock.asked()
    assert frontend.stopping.phase is Phase.LEAVING
    signal.raise_signal(signal.SIGTERM)
    assert await code == 0
