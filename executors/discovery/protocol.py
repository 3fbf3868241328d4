"""Who is there: what every store of worker records does alike.

A worker registers with a lease and renews it; a watcher is told who joined, changed and left. A store that cannot be
reached removes nobody: the last list is frozen and marked stale, and leases are judged again only when the store has
been back for as long as they last. Two records of one name or address: the newest incarnation counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Literal, Protocol, Self, TypeAlias

from executors.discovery.record import WorkerRecord
from policies.frozen import frozen

LEASE_S: Final = 10.0
RENEWALS: Final = 3
"""How often a lease is renewed while it lasts: two may get lost."""


@frozen
class Joined:
    """A worker is there that was not."""

    record: WorkerRecord


@frozen
class Changed:
    """The same life of a worker, at the same address, says something else of itself."""

    before: WorkerRecord
    record: WorkerRecord


@frozen
class Left:
    """A worker is gone: deregistered or its lease is over (`gone`), or its name or address is another worker's now."""

    record: WorkerRecord
    why: Literal["gone", "replaced"]


Seen: TypeAlias = Joined | Changed | Left


class StoreError(Exception):
    """The store did not answer, or not as it should; it may be back later."""


def newest(records: Iterable[WorkerRecord]) -> dict[str, WorkerRecord]:
    """Of all records those that count, by name: the newest incarnation of each name, and of those the newest at each
    address."""
    by_age = sorted(records, key=lambda one: (one.incarnation, one.name))
    names = {record.name: record for record in by_age}
    addresses = {record.url: record for record in by_age if names[record.name] is record}
    return {name: record for name, record in sorted(names.items()) if addresses[record.url] is record}


def differences(before: Mapping[str, WorkerRecord], now: Mapping[str, WorkerRecord]) -> list[Seen]:
    """What happened between two lists by name: who left first, so that an address is free before it is taken."""
    left: list[Seen] = []
    came: list[Seen] = []
    addresses = {record.url for record in now.values()}
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is not None and (new is None or (new.incarnation, new.url) != (old.incarnation, old.url)):
            left.append(Left(record=old, why="gone" if new is None and old.url not in addresses else "replaced"))
            old = None
        if new is not None and old is None:
            came.append(Joined(record=new))
        elif new is not None and old is not None and new != old:
            came.append(Changed(before=old, record=new))
    return left + came


class Watch:
    """Who is there, now and from now on: `async for seen in watch`. The first list comes as `Joined` of everybody.

    `stale`: why the store cannot be reached just now (None: it can). `skipped`: entries of the store that cannot be
    read, and why. The store's side calls `told` and `lost_sight`.
    """

    def __init__(self, follow: Callable[[Watch], Awaitable[None]], grace_s: float) -> None:
        self.workers: Mapping[str, WorkerRecord] = {}
        self.stale: str | None = None
        self.skipped: Mapping[str, str] = {}
        self._grace_s = grace_s
        self._missed_until_s: float | None = None
        self._seen: asyncio.Queue[Seen | None] = asyncio.Queue()
        self._listed = asyncio.Event()
        self._task = asyncio.ensure_future(follow(self))
        self._task.add_done_callback(lambda _: self._seen.put_nowait(None))

    async def listed(self) -> None:
        """Until the store has told once who is there."""
        waiting = asyncio.ensure_future(self._listed.wait())
        try:
            await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Seen:
        seen = await self._seen.get()
        if seen is not None:
            return seen
        self._seen.put_nowait(None)
        if not self._task.cancelled():
            self._task.result()
        raise StopAsyncIteration

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    # ------------------------------------------------------------ the store's side

    def told(self, records: Iterable[WorkerRecord], skipped: Mapping[str, str]) -> None:
        """The store lists these now."""
        now_s = asyncio.get_running_loop().time()
        found = newest(records)
        if self.stale is not None:
            self.stale = None
            self._missed_until_s = now_s + self._grace_s
        if self._missed_until_s is not None and now_s < self._missed_until_s:
            found = newest([*found.values(), *(r for n, r in self.workers.items() if n not in found)])
        else:
            self._missed_until_s = None
        for seen in differences(self.workers, found):
            self._seen.put_nowait(seen)
        self.workers, self.skipped = found, dict(skipped)
        self._listed.set()

    def lost_sight(self, why: str) -> None:
        """The store cannot be reached: nobody leaves."""
        self.stale = why


class Registration:
    """A worker's own entry, kept until `deregister`. A store's subclass writes, renews and removes it.

    `trouble`: why the last renewal failed (None: it did not); it is tried again for ever. `superseded`: a newer
    incarnation has the name, and this entry is not kept any more.
    """

    def __init__(self, record: WorkerRecord, lease_s: float) -> None:
        self.record = record
        self.lease_s = lease_s
        self.trouble: str | None = None
        self.superseded = False
        self._unwritten = False
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> Self:
        """Write the entry and keep it. Raises ConfigError where that life of it is there already."""
        await self._create()
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"lease of {self.record.name}")
        return self

    async def update(self, record: WorkerRecord) -> None:
        """Say something else of the same life. Raises StoreError; it is then said at the next renewal that succeeds."""
        if (record.name, record.incarnation) != (self.record.name, self.record.incarnation):
            raise ValueError(f"{record.name}/{record.incarnation} is not the life that was registered")
        async with self._lock:
            self.record, self._unwritten = record, True
            await self._write()
            self._unwritten = False

    async def deregister(self) -> None:
        """Leave, at once for every watcher. Raises StoreError if the store does not hear of it: the lease runs out."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        async with self._lock:
            await self._remove()

    async def _keep(self) -> None:
        while not self.superseded:
            await asyncio.sleep(self.lease_s / RENEWALS)
            try:
                async with self._lock:
                    await self._renew()
                    if self._unwritten and not self.superseded:
                        await self._write()
                        self._unwritten = False
                self.trouble = None
            except StoreError as error:
                self.trouble = str(error)

    async def _create(self) -> None:
        raise NotImplementedError

    async def _write(self) -> None:
        raise NotImplementedError

    async def _renew(self) -> None:
        raise NotImplementedError

    async def _remove(self) -> None:
        raise NotImplementedError


class Discovery(Protocol):
    """A store of worker records that hosts share."""

    @property
    def name(self) -> str:
        """For people: what and where."""
        ...

    async def register(self, record: WorkerRecord, lease_s: float = LEASE_S) -> Registration:
        """Be there until deregistered, or until `lease_s` seconds after this process has stopped to be. Raises
        ConfigError where this life of the name is there already, CapabilityError where nobody can register, StoreError
        where the store does not answer."""
        ...

    def watch(self) -> Watch:
        """Start to look who is there."""
        ...

    async def close(self) -> None:
        """Let go of sockets. Watches and registrations are closed before, each by its owner."""
        ...
