"""Orders of a planner become processes: AddWorker starts one that serves, DrainWorker ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fake_vllm_server import BLOCK, MODEL, interpreter
from live_builders import First

from executors.backend import Ask
from executors.clock import WallClock
from executors.process import still_runs
from executors.starter import HostStarter, Model
from executors.world import LiveWorld
from policies.cluster.actions import Action, AddWorker, DrainWorker
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller
from policies.cluster.events import Event, RequestFinished, RequestRejected, TimerFired, WorkerLost, WorkerUp
from policies.cluster.ids import RequestId
from policies.cluster.state import ClusterView
from policies.errors import EngineError
from twin.config import EngineConfig, WorkerGroup

LIMIT_S = 60.0


class OneWhileAsked:
    """A worker when the plan begins, none once a request has been answered."""

    subscribes = frozenset({TimerFired, RequestFinished})

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, TimerFired):
            return (AddWorker(group="pool", reason="the plan begins"),)
        return tuple(DrainWorker(worker_id=one, reason="all is answered") for one in view.workers)


class Heard:
    """Events as they come."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    def note(self, event: Event, _: Any) -> None:
        self.events.put_nowait(event)

    async def next(self, kind: type[Event]) -> Any:
        while not isinstance(event := await self.events.get(), kind):
            assert not isinstance(event, RequestRejected)
        return event


def world_of(folder: Path, heard: Heard, block_size: int = BLOCK) -> tuple[LiveWorld, HostStarter]:
    clock = WallClock(asyncio.get_running_loop())
    world = LiveWorld(Controller([First(), OneWhileAsked()], heard), clock, ContentTree(block_size, block_size))
    world.fleet.looks_after = False
    group = WorkerGroup(name="pool", engine=EngineConfig(block_size=block_size, prefix_caching=False))
    model = Model(checkpoint="/models/tiny", served_as=MODEL)
    starter = HostStarter({"pool": group}, model, {"vllm": interpreter(folder)}, clock.now, folder / "logs", gpus=())
    world.fleet.starter = starter
    return world, starter


def test_a_planner_starts_a_process_and_ends_it(tmp_path: Path) -> None:
    async def play() -> None:
        heard = Heard()
        world, starter = world_of(tmp_path, heard)
        try:
            world.post(TimerFired(at_s=world.clock.now(), name="plan"))
            assert world.fleet.starting == {"pool-0": "pool"}
            up: WorkerUp = await heard.next(WorkerUp)
            assert up.name == "pool-0"
            process = starter.processes["pool-0"]
            assert still_runs(process.birth)
            stream = world.submit(Ask(request_id=RequestId("r"), token_ids=[1] * 50, max_tokens=3, model=MODEL))
            assert [token async for delta in stream for token in delta.token_ids] == [500, 501, 502]
            lost: WorkerLost = await heard.next(WorkerLost)
            assert (lost.worker_id, lost.reason) == (up.worker_id, "drained")
            ended = await process.wait()
            assert (ended.code, ended.killed, ended.left_behind) == (0, False, 0)
            assert not world.fleet.starting
        finally:
            await world.close()
            await starter.close()

    asyncio.run(asyncio.wait_for(play(), LIMIT_S))


def test_a_worker_that_cannot_serve_here_is_told_and_ended(tmp_path: Path) -> None:
    async def play() -> None:
        heard = Heard()
        world, starter = world_of(tmp_path, heard, block_size=16)
        world.reads_blocks = True
        failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        world.fleet.on_failed_start.append(lambda name, group, error: failed.set_result(error))
        try:
            world.post(TimerFired(at_s=world.clock.now(), name="plan"))
            error = await failed
            assert "worker pool-0 has KV blocks of 32 tokens and the router of 16" in str(error)
            assert starter.processes["pool-0"].ended is not None
            assert not world.fleet.workers
        finally:
            await world.close()
            await starter.close()

    asyncio.run(asyncio.wait_for(play(), LIMIT_S))


def test_a_process_that_never_serves_is_told(tmp_path: Path) -> None:
    async def play() -> None:
        heard = Heard()
        world, starter = world_of(tmp_path, heard)
        (tmp_path / "fake-python").write_text("#!/bin/sh\necho no such model\nexit 3\n", encoding="utf-8")
        failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        world.fleet.on_failed_start.append(lambda name, group, error: failed.set_result(error))
        try:
            world.post(TimerFired(at_s=world.clock.now(), name="plan"))
            error = await failed
            assert isinstance(error, EngineError)
            assert "no such model" in str(error)
        finally:
            await world.close()
            await starter.close()

    asyncio.run(asyncio.wait_for(play(), LIMIT_S))
