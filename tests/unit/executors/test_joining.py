"""Workers that a frontend finds: who joins, drains and leaves as a store says; who is refused, and why."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_engines import FakeVllm
from live_builders import First

from executors.backend import Ask
from executors.clock import WallClock
from executors.deadlines import Deadlines
from executors.discovery.folder import FolderDiscovery
from executors.discovery.protocol import Registration
from executors.discovery.record import WorkerRecord
from executors.engines.remote import Attached
from executors.engines.vllm import Vllm
from executors.joining import Expected, Joiner
from executors.requests import Stream
from executors.world import LiveWorld
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller
from policies.cluster.events import Event, WorkerDraining, WorkerLost, WorkerRecalled, WorkerUp
from policies.cluster.ids import RequestId, Role
from policies.resilience.migration import Migration, MigrationSettings
from twin.config import EngineConfig, WorkerGroup

LIMIT_S = 30.0
LOOK_S = 0.02
AMPLE = Deadlines(connect_s=LIMIT_S, first_token_s=LIMIT_S, between_tokens_s=LIMIT_S, control_s=LIMIT_S)
GROUPS = {"pool": WorkerGroup(name="pool", engine=EngineConfig(block_size=32))}


class Found:
    """A world whose workers come from a folder. `heard` are the events that came in."""

    def __init__(self, place: Path) -> None:
        self.heard: asyncio.Queue[Event] = asyncio.Queue()
        policies = [First(), Migration(MigrationSettings(limit=1, max_seq_len=None))]
        self.world = LiveWorld(Controller(policies, self), WallClock(asyncio.get_running_loop()), ContentTree(32, 32))
        self.world.fleet.looks_after = False
        self.world.reads_blocks = True  # as with a router that compares blocks
        self.place = place
        self.joiner = Joiner(
            self.world, FolderDiscovery(place, LOOK_S), GROUPS, Expected(model="tiny", fingerprint="f"), self._engine
        )
        self._entries: list[Registration] = []

    def _engine(self, group: WorkerGroup, record: WorkerRecord) -> Vllm:
        at = Attached(name=record.name, url=record.url, role=Role(group.role), max_num_seqs=8)
        return Vllm(at, AMPLE, self.world.clock.now)

    def note(self, event: Event, _: Any) -> None:
        self.heard.put_nowait(event)

    async def next(self, kind: type[Event]) -> Any:
        while not isinstance(event := await self.heard.get(), kind):
            pass
        return event

    async def register(self, server: FakeVllm, name: str = "w0", incarnation: int = 1, **more: Any) -> Registration:
        record = WorkerRecord(
            name=name, incarnation=incarnation, engine="vllm", url=server.url, role=Role.MIXED, block_size=32,
            host=socket.gethostname(), fingerprint="f",
        )  # fmt: skip
        made = await FolderDiscovery(self.place).register(replace(record, **more), lease_s=LIMIT_S)
        self._entries.append(made)
        return made

    async def refused(self, name: str) -> str:
        while name not in self.joiner.refused:
            await asyncio.sleep(LOOK_S)
        return self.joiner.refused[name]

    def ask(self, name: str) -> Stream:
        return self.world.submit(Ask(request_id=RequestId(name), token_ids=list(range(1, 50)), max_tokens=3, model="m"))

    async def close(self) -> None:
        await self.joiner.close()
        await self.world.close()
        for entry in self._entries:
            await entry.deregister()


@asynccontextmanager
async def found(place: Path) -> AsyncIterator[tuple[Found, FakeVllm]]:
    async with asyncio.timeout(LIMIT_S), FakeVllm() as server:
        one = Found(place)
        try:
            await one.joiner.start()
            yield one, server  # type: ignore[misc]
        finally:
            await one.close()


async def end_of(stream: Stream) -> Any:
    async for _ in stream:
        pass
    return stream.end


def played(place: Path, play: Callable[[Found, FakeVllm], Any]) -> None:
    async def test() -> None:
        async with found(place) as (one, server):
            await play(one, server)

    asyncio.run(test())


def test_a_worker_joins_serves_drains_and_may_come_back(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        entry = await one.register(server)
        up: WorkerUp = await one.next(WorkerUp)
        assert (up.name, up.role, up.block_size) == ("w0", Role.MIXED, 32)
        server.does = "hang"
        stream = one.ask("r")
        await server.asked.wait()
        await entry.update(replace(entry.record, draining=True))
        await one.next(WorkerDraining)
        await entry.update(replace(entry.record, draining=False))
        await one.next(WorkerRecalled)
        await entry.update(replace(entry.record, draining=True))
        await one.next(WorkerDraining)
        stream.cancel("enough")
        lost: WorkerLost = await one.next(WorkerLost)
        assert (lost.worker_id, lost.reason) == (up.worker_id, "drained")
        await entry.update(replace(entry.record, draining=False))
        assert (await one.next(WorkerUp)).worker_id != up.worker_id

    played(tmp_path, play)


def test_one_that_left_and_answers_finishes_what_it_has(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        entry = await one.register(server)
        await one.next(WorkerUp)
        server.does = "hang"
        stream = one.ask("r")
        await server.asked.wait()
        await entry.deregister()
        await one.next(WorkerDraining)
        stream.cancel("enough")
        assert (await one.next(WorkerLost)).reason == "drained"

    played(tmp_path, play)


def test_one_that_left_and_does_not_answer_is_lost_and_its_requests_go_elsewhere(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        entry = await one.register(server)
        await one.next(WorkerUp)
        server.does = "hang"
        stream = one.ask("r")
        await server.asked.wait()
        async with FakeVllm() as other:
            await one.register(other, "w1")  # type: ignore[arg-type]
            await one.next(WorkerUp)
            server.health = 503
            await entry.deregister()
            assert (await one.next(WorkerLost)).reason == "it has left, and does not answer"
            end = await end_of(stream)
            assert (end.outcome, end.migrations, end.worker) == ("length", 1, "w1")

    played(tmp_path, play)


def test_a_higher_incarnation_is_another_worker(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        await one.register(server, incarnation=1)
        up: WorkerUp = await one.next(WorkerUp)
        await one.register(server, incarnation=2)
        assert (await one.next(WorkerLost)).reason == "another worker has its name or address"
        again: WorkerUp = await one.next(WorkerUp)
        assert again.worker_id != up.worker_id
        assert one.world.fleet.workers[again.worker_id].incarnation == 2

    played(tmp_path, play)


def test_a_store_that_cannot_be_read_removes_nobody(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        await one.register(server)
        await one.next(WorkerUp)
        one.place.rename(tmp_path / "away")
        watch = one.joiner._watch
        assert watch is not None
        while watch.stale is None:
            await asyncio.sleep(LOOK_S)
        assert (await end_of(one.ask("r"))).outcome == "length"
        (tmp_path / "away").rename(one.place)

    place = tmp_path / "store"
    place.mkdir()
    played(place, play)


def test_a_store_that_is_not_there_at_first_is_waited_for_elsewhere(tmp_path: Path) -> None:
    async def play() -> None:
        place = tmp_path / "store"
        place.mkdir()
        one = Found(place)
        place.rename(tmp_path / "away")
        one.joiner._store_s = 0.1
        async with asyncio.timeout(LIMIT_S), FakeVllm() as server:
            await one.joiner.start()
            (tmp_path / "away").rename(place)
            await one.register(server)  # type: ignore[arg-type]
            assert (await one.next(WorkerUp)).name == "w0"
            await one.close()

    asyncio.run(play())


def test_a_worker_that_was_lost_joins_again_while_it_is_listed(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        await one.register(server)
        up: WorkerUp = await one.next(WorkerUp)
        worker = one.world.fleet.workers[up.worker_id]
        one.world.fleet.lose(worker, "no answer to 3 health checks in a row")
        assert (await one.next(WorkerUp)).worker_id != up.worker_id

    played(tmp_path, play)


def test_a_worker_that_is_attached_and_listed_counts_once(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        url = server.url.replace("127.0.0.1", "localhost")
        engine = Vllm(Attached(name="own", url=url, max_num_seqs=8), AMPLE, one.world.clock.now)
        attached = await one.world.fleet.attach(engine, "own", "pool")
        await one.register(server, incarnation=7)
        assert await one.refused("w0") == "it is attached as own already, and counts once"
        assert list(one.world.fleet.workers.values()) == [attached]
        assert attached.incarnation == 7, "as frontends that discovered it call it"
        one.world.fleet.lose(attached, "no answer to 3 health checks in a row")
        assert (await one.next(WorkerUp)).name == "own"
        assert (await one.next(WorkerUp)).name == "w0", "the store lists it still"
        assert not one.joiner.refused

    played(tmp_path, play)


def test_whoever_cannot_serve_here_is_refused_by_name(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        for name, more, said in (
            ("tokenizer", {"fingerprint": "g"}, "its tokenizer is another one (g, here f)"),
            ("blocks", {"block_size": 16}, "its KV blocks have 16 tokens and those of the router 32"),
            ("role", {"role": Role.DECODE}, "it is a decode worker of vllm, and the configuration has mixed workers"),
            ("engine", {"engine": "sglang", "group": "pool"}, "group pool has engine vllm here"),
            ("far", {"host": "elsewhere"}, "is reached from host elsewhere alone"),
        ):
            entry = await one.register(server, name, **more)
            assert said in await one.refused(name)
            await entry.deregister()
        server.models = lambda: [{"id": "other", "root": "o", "parent": None, "max_model_len": 9}]  # type: ignore[method-assign]
        await one.register(server, "model")
        assert "it serves other, and this frontend tiny" in await one.refused("model")
        assert not one.world.fleet.workers

    played(tmp_path, play)


def test_a_frontend_in_the_store_is_no_worker(tmp_path: Path) -> None:
    async def play(one: Found, server: FakeVllm) -> None:
        await one.register(server, "f0", engine="frontend", url="tcp://127.0.0.1:1")
        await one.register(server, "w0")
        assert (await one.next(WorkerUp)).name == "w0"
        assert not one.joiner.refused

    played(tmp_path, play)
