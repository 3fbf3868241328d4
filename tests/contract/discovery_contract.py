"""What every store of worker records keeps, whatever it is made of. A bench says how its store is filled and broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from executors.discovery.protocol import Changed, Discovery, Joined, Left, Seen, Watch
from executors.discovery.record import WorkerRecord
from policies.cluster.ids import Role

LIMIT_S = 120.0


def record(name: str, incarnation: int = 1, **more: object) -> WorkerRecord:
    known = {"engine": "vllm", "url": f"http://10.0.0.1/{name}", "role": Role.MIXED, "models": ("tiny",)}
    return WorkerRecord(name=name, incarnation=incarnation, **known | more)  # type: ignore[arg-type]


class Bench(Protocol):
    """One store, empty at first, as several hosts see it."""

    def open(self) -> Discovery:
        """The store as another host sees it."""
        ...

    async def put(self, record: WorkerRecord) -> None:
        """A worker is there, or says something else."""
        ...

    async def drop(self, record: WorkerRecord) -> None:
        """A worker leaves in good order."""
        ...

    async def put_garbage(self) -> None:
        """Somebody writes nonsense beside the workers."""
        ...

    async def breaks(self) -> None:
        """The store cannot be read any more."""
        ...

    async def mends(self) -> None:
        """It can again, with what was in it."""
        ...


Play = Callable[[Bench, Watch], Awaitable[None]]


async def holds(condition: Callable[[], bool]) -> None:
    """Until a condition holds, for which no event is posted."""
    while not condition():
        await asyncio.sleep(0.01)


async def becomes_stale(watch: Watch, stale: bool) -> None:
    await holds(lambda: (watch.stale is not None) == stale)


class DiscoveryContract:
    """Inherit, and give a bench."""

    def bench(self, folder: Path) -> AsyncIterator[Bench]:
        raise NotImplementedError

    def play(self, folder: Path, play: Play) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S), asynccontextmanager(self.bench)(folder) as bench:
                store = bench.open()
                watch = store.watch()
                await watch.listed()
                await play(bench, watch)
                await watch.close()
                await store.close()

        asyncio.run(limited())

    def test_a_worker_joins_changes_and_leaves(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            a = record("a", kv_events="tcp://10.0.0.1:5557", dp_ranks=2, block_size=32, fingerprint="f", pid=7)
            assert watch.workers == {}
            await bench.put(a)
            assert await anext(watch) == Joined(record=a)
            draining = replace(a, draining=True)
            await bench.put(draining)
            assert await anext(watch) == Changed(before=a, record=draining)
            await bench.drop(draining)
            assert await anext(watch) == Left(record=draining, why="gone")
            assert watch.workers == {}

        self.play(tmp_path, play)

    def test_who_looks_later_sees_everybody_who_is_there(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            for name in ("b", "a"):
                await bench.put(record(name))
            await holds(lambda: len(watch.workers) == 2)
            other = bench.open()
            late = other.watch()
            await late.listed()
            assert dict(late.workers) == dict(watch.workers) == {"a": record("a"), "b": record("b")}
            assert [await anext(late) for _ in range(2)] == [Joined(record=record("a")), Joined(record=record("b"))]
            await late.close()
            await other.close()

        self.play(tmp_path, play)

    def test_a_restarted_worker_is_another_one(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            await bench.put(record("a", 1))
            await anext(watch)
            await bench.put(record("a", 2))
            assert [await anext(watch) for _ in range(2)] == [
                Left(record=record("a", 1), why="replaced"),
                Joined(record=record("a", 2)),
            ]

        self.play(tmp_path, play)

    def test_nonsense_in_the_store_hides_nobody(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            await bench.put(record("a"))
            await bench.put_garbage()
            await bench.put(record("b"))
            await holds(lambda: set(watch.workers) == {"a", "b"} and self.noticed(watch))

        self.play(tmp_path, play)

    def noticed(self, watch: Watch) -> bool:
        return len(watch.skipped) == 1

    def test_a_store_that_goes_takes_nobody_with_it(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            await bench.put(record("a"))
            await anext(watch)
            await bench.breaks()
            await becomes_stale(watch, True)
            assert dict(watch.workers) == {"a": record("a")}
            await bench.mends()
            await becomes_stale(watch, False)
            assert dict(watch.workers) == {"a": record("a")}
            await bench.put(record("b"))
            assert await anext(watch) == Joined(record=record("b"))

        self.play(tmp_path, play)

    def test_the_end_of_a_watch_ends_its_reader(self, tmp_path: Path) -> None:
        async def play(bench: Bench, watch: Watch) -> None:
            async def read() -> list[Seen]:
                return [seen async for seen in watch]

            reader = asyncio.ensure_future(read())
            await watch.close()
            assert await reader == []

        self.play(tmp_path, play)
