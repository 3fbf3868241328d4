"""The contract of discovery, over a file, a folder and a real etcd; and what only stores with leases do."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from discovery_contract import Bench, DiscoveryContract, becomes_stale, record
from etcd_server import EtcdServer

from executors.discovery import open_discovery
from executors.discovery.folder import FolderDiscovery
from executors.discovery.protocol import Changed, Discovery, Joined, Left, Registration, StoreError, Watch
from executors.discovery.record import WorkerRecord, to_plain
from executors.discovery.static import StaticDiscovery
from executors.ports import LOOPBACK
from executors.process import EngineProcess
from policies.errors import CapabilityError, ConfigError

LOOK_S = 0.02
REGISTERED = """
import asyncio, sys
from executors.discovery import open_discovery
from executors.discovery.record import WorkerRecord
from policies.cluster.ids import Role

async def main():
    record = WorkerRecord(name="other", incarnation=1, engine="vllm", url="http://10.0.0.2:1", role=Role.MIXED)
    await open_discovery(sys.argv[1]).register(record, lease_s=2.0)
    open(sys.argv[2], "w").close()
    await asyncio.Event().wait()

asyncio.run(main())
"""


class StaticBench:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "workers.toml"
        self._records: dict[str, WorkerRecord] = {}
        self._write()

    def open(self) -> Discovery:
        return StaticDiscovery(self._path, LOOK_S)

    async def put(self, record: WorkerRecord) -> None:
        self._records[record.name] = record
        self._write()

    async def drop(self, record: WorkerRecord) -> None:
        del self._records[record.name]
        self._write()

    async def put_garbage(self) -> None:
        self._write("[[workers]]\nname = 5\n")

    async def breaks(self) -> None:
        self._write("nothing = ")

    async def mends(self) -> None:
        self._write()

    def _write(self, more: str = "") -> None:
        text = "".join(
            "[[workers]]\n" + "".join(f"{k} = {v!r}\n".replace("True", "true") for k, v in to_plain(one).items())
            for one in self._records.values()
        )
        draft = self._path.with_suffix(".draft")
        draft.write_text((text or "workers = []\n") + more, encoding="utf-8")
        draft.replace(self._path)


class LeaseBench:
    """Workers that register."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Discovery, Registration]] = {}

    def open(self) -> Discovery:
        raise NotImplementedError

    async def put(self, record: WorkerRecord) -> None:
        store, entry = self._entries.get(record.name, (None, None))
        if entry is not None and entry.record.incarnation == record.incarnation:
            await entry.update(record)
            return
        store = store or self.open()
        self._entries[record.name] = store, await store.register(record, lease_s=30.0)

    async def drop(self, record: WorkerRecord) -> None:
        store, entry = self._entries.pop(record.name)
        await entry.deregister()
        await store.close()

    async def close(self) -> None:
        for store, entry in self._entries.values():
            await entry.deregister()
            await store.close()


class FolderBench(LeaseBench):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.place = folder / "shared"
        self.place.mkdir()

    def open(self) -> Discovery:
        return FolderDiscovery(self.place, LOOK_S)

    async def put_garbage(self) -> None:
        (self.place / "torn.json").write_text('{"schema": 1, "lease_s": 3, "wor', encoding="utf-8")

    async def breaks(self) -> None:
        self.place.rename(self.place.with_name("away"))

    async def mends(self) -> None:
        self.place.with_name("away").rename(self.place)


class EtcdBench(LeaseBench):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._server = EtcdServer(folder)
        self.place = self._server.place

    async def start(self) -> None:
        await self._server.start()

    def open(self) -> Discovery:
        return open_discovery(self.place)

    async def put_garbage(self) -> None:
        from executors.discovery.etcd_client import EtcdClient

        client = EtcdClient([self._server.clients])
        await client.put("/dynatwin/workers/torn", b"{", await client.grant(60))
        await client.close()

    async def breaks(self) -> None:
        await self._server.stop()

    async def mends(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await super().close()
        await self._server.close()


class LeaseContract(DiscoveryContract):
    """What stores add in which workers register themselves."""

    def test_a_worker_that_is_killed_leaves_when_its_lease_is_over(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            await bench.put(record("a"))
            await anext(watch)
            ready = tmp_path / "registered"
            command = [sys.executable, "-c", REGISTERED, str(bench.place), str(ready)]  # type: ignore[attr-defined]
            worker = await EngineProcess.start("worker", command, tmp_path / "worker.log")

            async def registered() -> bool:
                return ready.exists()

            await worker.wait_ready(registered, 60.0)
            assert isinstance(await anext(watch), Joined)
            worker.kill()
            assert (await worker.wait()).code == -signal.SIGKILL
            left = await anext(watch)
            assert isinstance(left, Left)
            assert (left.record.name, left.why) == ("other", "gone")
            assert set(watch.workers) == {"a"}

        self.play(tmp_path, play)

    def test_one_life_registers_once(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            await bench.put(record("a"))
            store = bench.open()
            with pytest.raises(ConfigError, match="a is registered with this incarnation"):
                await store.register(record("a", url="http://10.0.0.9"))
            await store.close()
            assert await anext(watch) == Joined(record=record("a"))

        self.play(tmp_path, play)

    def test_of_two_at_one_address_the_newer_counts(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            old, new = record("a", 1, url="http://10.0.0.1:8000"), record("b", 2, url="http://10.0.0.1:8000")
            await bench.put(old)
            await anext(watch)
            await bench.put(new)
            assert [await anext(watch) for _ in range(2)] == [Left(record=old, why="replaced"), Joined(record=new)]

        self.play(tmp_path, play)

    def test_what_could_not_be_said_is_said_later(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            store = bench.open()
            entry = await store.register(record("a"), lease_s=1.0)
            await anext(watch)
            await bench.breaks()
            await becomes_stale(watch, True)
            with pytest.raises(StoreError):
                await entry.update(record("a", draining=True))
            await bench.mends()
            changed = Changed(before=record("a"), record=record("a", draining=True))
            assert await anext(watch) == changed, "the store's absence removed nobody"
            await entry.deregister()
            await store.close()

        self.play(tmp_path, play)


class TestStatic(DiscoveryContract):
    async def bench(self, folder: Path) -> AsyncIterator[Bench]:
        yield StaticBench(folder)

    def noticed(self, watch: Watch) -> bool:
        return watch.stale is None  # a person's file is read as a whole or not at all; the next edit mended it

    def test_nobody_registers_in_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(CapabilityError, match="add a to it"):
            asyncio.run(StaticDiscovery(tmp_path / "w.toml").register(record("a")))


class TestFolder(LeaseContract):
    async def bench(self, folder: Path) -> AsyncIterator[Bench]:
        bench = FolderBench(folder)
        yield bench
        await bench.close()


@pytest.mark.live
class TestEtcd(LeaseContract):
    @pytest.fixture(autouse=True)
    def _server_is_there(self) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("SKIP discovery over etcd: no etcd on PATH; install with apt-get install -y etcd-server")

    def test_another_server_is_asked_where_one_does_not_answer(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            assert isinstance(bench, EtcdBench)
            store = open_discovery(bench.place.replace("//", f"//{LOOPBACK}:1,"))
            entry = await store.register(record("a"))
            assert await anext(watch) == Joined(record=record("a"))
            other = store.watch()
            await other.listed()
            assert set(other.workers) == {"a"}
            await entry.deregister()
            assert await anext(other) == Joined(record=record("a"))
            assert await anext(other) == Left(record=record("a"), why="gone")
            await other.close()
            await store.close()

        self.play(tmp_path, play)

    async def bench(self, folder: Path) -> AsyncIterator[Bench]:
        bench = EtcdBench(folder)
        await bench.start()
        yield bench
        await bench.close()
