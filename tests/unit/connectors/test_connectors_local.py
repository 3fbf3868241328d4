"""Orders of a decision on this host: processes by worker, each with its own end, and one end for the decision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from connector_builders import Scaled, scaled
from simulate import engine_settings

from executors.engines.mock import MockEngine
from executors.engines.protocol import Engine
from policies.cluster.events import (
    WorkerDraining,
    WorkerLost,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
    WorkerUp,
)
from policies.cluster.ids import Role, WorkerId
from policies.cluster.scaling import ScaleDone, ScaleFailed
from policies.errors import CapabilityError, EngineError
from twin.perf.fixed import FixedLatency


class Starter:
    """Engines that come up when the test says so."""

    def __init__(self, world: Scaled) -> None:
        self._world = world
        self.begun: list[asyncio.Future[Engine]] = []
        self.closed: list[str] = []

    def start(self, group: str) -> tuple[str, Awaitable[Engine]]:
        name = f"{group}-{len(self.begun)}"
        self.begun.append(asyncio.get_running_loop().create_future())
        return name, self.begun[-1]

    def up(self, number: int) -> None:
        latency = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.01)
        world = self._world
        name = f"decode-{number}"
        engine = MockEngine(
            name,
            engine_settings(),
            latency,
            world.clock,
            worker_id=WorkerId(0),
            role=Role.DECODE,
            tree=world.world.tree,
        )

        async def close() -> None:
            self.closed.append(name)

        engine.close = close  # type: ignore[method-assign]
        self.begun[number].set_result(engine)


Play = Callable[[Scaled, Starter], Coroutine[Any, Any, None]]


def play(main: Play) -> None:
    async def body(world: Scaled) -> None:
        starter = world.world.fleet.starter = Starter(world)
        await main(world, starter)

    scaled(body)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_start_has_its_id_from_the_beginning() -> None:
    async def main(world: Scaled, starter: Starter) -> None:
        world.add(1, decode=2)
        starting = world.heard(WorkerStarting)
        assert [one.name for one in starting] == ["decode-0", "decode-1"]
        starter.up(1)
        await settle()
        assert not world.ends()
        starter.up(0)
        await settle()
        assert [(up.name, up.worker_id) for up in world.heard(WorkerUp)] == [
            ("decode-1", starting[1].worker_id),
            ("decode-0", starting[0].worker_id),
        ]
        assert [type(end) for end in world.ends()] == [ScaleDone]

    play(main)


def test_a_start_that_fails_fails_its_decision() -> None:
    async def main(world: Scaled, starter: Starter) -> None:
        world.add(1, decode=2)
        starter.begun[0].set_exception(EngineError("no such model"))
        starter.up(1)
        await settle()
        assert [failed.reason for failed in world.heard(WorkerStartFailed)] == ["decode-0: no such model"]
        (end,) = world.ends()
        assert isinstance(end, ScaleFailed)
        assert len(world.heard(WorkerUp)) == 1

    play(main)


@pytest.mark.parametrize("begun", [True, False])
def test_a_start_that_is_called_off_leaves_no_process(begun: bool) -> None:
    async def main(world: Scaled, starter: Starter) -> None:
        world.add(1, decode=1)
        if begun:
            await settle()
        world.cancel(world.heard(WorkerStarting)[0].worker_id, 2)
        assert len(world.heard(WorkerStartCancelled)) == 1
        starter.up(0)
        await settle()
        assert starter.closed == ["decode-0"]
        assert not world.heard(WorkerUp)
        assert not world.world.fleet.starting
        assert sorted((type(end).__name__, end.decision_id) for end in world.ends()) == [
            ("ScaleDone", 1),
            ("ScaleDone", 2),
        ]

    play(main)


def test_a_drain_ends_its_decision_when_the_worker_is_gone() -> None:
    async def main(world: Scaled, starter: Starter) -> None:
        world.add(1, decode=1)
        starter.up(0)
        await settle()
        world.drain(2, *world.world.fleet.workers.values())
        await settle()
        assert len(world.heard(WorkerDraining)) == 1
        assert [lost.reason for lost in world.heard(WorkerLost)] == ["drained"]
        assert [end.decision_id for end in world.ends()] == [1, 2]

    play(main)


def test_nothing_here_starts_processes() -> None:
    async def main(world: Scaled) -> None:
        with pytest.raises(CapabilityError, match="nothing here starts processes"):
            world.add(1, decode=1)

    scaled(main)
