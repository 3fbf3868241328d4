"""Workers of a host as real small processes: registered while they take work, drained before they end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_vllm_server import BLOCK, MODEL, checkpoint, interpreter

from executors.discovery.folder import FolderDiscovery
from executors.discovery.protocol import Changed, Joined, Left, Seen, Watch
from executors.discovery.record import fingerprint_of
from executors.discovery.static import StaticDiscovery
from executors.hosting import Self, Terms, WorkerHost
from executors.process import group_members
from executors.starter import HostStarter, Model
from policies.cluster.ids import Role
from policies.errors import CapabilityError, EngineError
from twin.config import EngineConfig, WorkerGroup

LIMIT_S = 60.0
TERMS = Terms(ready_s=LIMIT_S, grace_s=0.0, drain_s=LIMIT_S)


def starter(folder: Path) -> HostStarter:
    group = WorkerGroup(name="pool", count=2, engine=EngineConfig(block_size=BLOCK, prefix_caching=False))
    return HostStarter(
        {"pool": group},
        Model(checkpoint="/models/tiny", served_as=MODEL),
        {"vllm": interpreter(folder)},
        asyncio.get_running_loop().time,
        folder / "logs",
        shared=True,
        gpus=(),
    )


@asynccontextmanager
async def hosted(folder: Path, fingerprint: str | None = None) -> AsyncIterator[tuple[WorkerHost, Watch]]:
    """A host of workers, and what another process sees of it."""
    place = folder / "store"
    place.mkdir()
    own = Self(prefix="h1", host="h1", fingerprint=fingerprint)
    host = WorkerHost(starter(folder), "pool", FolderDiscovery(place), own, TERMS)
    watch = FolderDiscovery(place, look_s=0.02).watch()
    async with asyncio.timeout(LIMIT_S):
        try:
            yield host, watch
        finally:
            await watch.close()
            await host.close()


async def take(watch: Watch, count: int) -> list[Seen]:
    return [await anext(watch) for _ in range(count)]


def test_workers_are_registered_with_what_they_say_of_themselves_and_leave_when_they_end(tmp_path: Path) -> None:
    async def play() -> None:
        async with hosted(tmp_path, fingerprint_of(checkpoint(tmp_path))) as (host, watch):
            await host.start(2)
            joined = await take(watch, 2)
            assert all(isinstance(seen, Joined) for seen in joined)
            records = {seen.record.name: seen.record for seen in joined}
            assert set(records) == {"h1-pool-0", "h1-pool-1"}
            one = records["h1-pool-0"]
            assert (one.engine, one.role, one.group, one.models) == ("vllm", Role.MIXED, "pool", (MODEL,))
            assert (one.block_size, one.host, one.version) == (BLOCK, "h1", "0.32.0")
            assert one.fingerprint is not None
            assert one.fingerprint.startswith("tokenizer:")
            pids = [record.pid for record in records.values() if record.pid is not None]
            assert all(list(group_members(pid)) for pid in pids)
            assert await host.stop() is True
            seen = await take(watch, 4)
            assert [(type(one), one.record.draining) for one in seen[:2]] == [(Changed, True)] * 2
            assert [type(one) for one in seen[2:]] == [Left] * 2
            assert not any(list(group_members(pid)) for pid in pids)

    asyncio.run(play())


def test_an_engine_that_ends_by_itself_leaves_at_once_and_the_last_one_ends_the_host(tmp_path: Path) -> None:
    async def play() -> None:
        async with hosted(tmp_path) as (host, watch):
            await host.start(1)
            (joined,) = await take(watch, 1)
            assert joined.record.pid is not None
            os.kill(joined.record.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="no worker is left: h1-pool-0 ended with -9"):
                await host.serve(asyncio.Event())
            (left,) = await take(watch, 1)
            assert isinstance(left, Left)
            assert left.record.name == "h1-pool-0"

    asyncio.run(play())


def test_an_engine_that_nobody_lets_register_is_ended_again(tmp_path: Path) -> None:
    async def play() -> None:
        file = tmp_path / "workers.toml"
        file.write_text("workers = []\n", encoding="utf-8")
        engines = starter(tmp_path)
        host = WorkerHost(engines, "pool", StaticDiscovery(file), Self(prefix="h1", host="h1"), TERMS)
        try:
            with pytest.raises(CapabilityError, match="add h1-pool-0 to it"):
                await host.start(1)
        finally:
            await host.close()
        assert engines.processes["pool-0"].ended is not None

    asyncio.run(play())
