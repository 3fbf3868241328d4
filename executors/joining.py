"""Workers that a frontend finds in a discovery store: they join its fleet, drain and leave as the store says.

The store says who is there, the engine itself whether it takes work: a worker joins when both do. A record that cannot
be served with here is refused by name, and nothing is sent to it. A store that cannot be reached changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from executors.discovery.protocol import Changed, Discovery, Joined, Left, Seen, Watch
from executors.discovery.record import FRONTEND, WorkerRecord
from executors.engines.protocol import Engine
from executors.live_worker import LiveWorker
from executors.ports import LOOPBACK
from executors.world import LiveWorld
from policies.errors import CapabilityError, ConfigError, EngineError
from policies.frozen import frozen
from twin.config import WorkerGroup

log = logging.getLogger(__name__)

STORE_S: Final = 10.0
"""How long a frontend that starts waits to hear who is there."""
RETRY_S: Final = 5.0
"""Between two tries to reach a worker that the store lists."""

Adapter = Callable[[WorkerGroup, WorkerRecord], Engine]


@frozen
class Expected:
    """What a worker must be to serve here: its model by name, its tokenizer (None: not compared)."""

    model: str
    fingerprint: str | None = None


class _Life(NamedTuple):
    """One life of a worker."""

    name: str
    incarnation: int


class Joiner:
    """Brings the workers of `discovery` into the fleet of `world`; `adapter` makes the engine of a record. Its first
    answer may take the store `store_s` seconds."""

    def __init__(
        self,
        world: LiveWorld,
        discovery: Discovery,
        groups: Mapping[str, WorkerGroup],
        expected: Expected,
        adapter: Adapter,
        store_s: float = STORE_S,
    ) -> None:
        self._world = world
        self._discovery = discovery
        self._groups = dict(groups)
        self._expected = expected
        self._adapter = adapter
        self._store_s = store_s
        self._watch: Watch | None = None
        self._coming: dict[_Life, asyncio.Task[None]] = {}
        self._there: dict[_Life, LiveWorker] = {}
        self.refused: dict[str, str] = {}
        """Workers of the store that cannot serve here, by name, and why."""
        self.joined = asyncio.Event()
        """Set whenever a worker has joined; whoever waits clears it."""
        world.fleet.on_left.append(self._fell)

    async def start(self) -> None:
        """Returns when the store has told who is there, or does not answer: whoever it lists later joins then. Raises
        ConfigError for a file that cannot be read."""
        watch = self._watch = self._discovery.watch()
        try:
            async with asyncio.timeout(self._store_s):
                await watch.listed()
        except TimeoutError:
            log.warning("%s does not answer (%s); workers join when it does", self._discovery.name, watch.stale)
        self._world.spawn(self._follow(watch))

    async def close(self) -> None:
        """Look no more. Workers that have joined are the fleet's."""
        if self._watch is not None:
            await self._watch.close()
        await self._discovery.close()

    # ------------------------------------------------------------ what the store says

    async def _follow(self, watch: Watch) -> None:
        async for seen in watch:
            self._take(seen)

    def _take(self, seen: Seen) -> None:
        match seen:
            case Joined(record=record) if not record.draining:
                self._come(record)
            case Changed(record=record) if record.draining:
                self._drain(_life(record))
            case Changed(before=before, record=record) if before.draining:
                self._come(record)
            case Left(record=record, why=why):
                self._leave(_life(record), why)

    def _come(self, record: WorkerRecord) -> None:
        life = _life(record)
        if record.engine == FRONTEND or life in self._coming:
            return
        there = self._there.get(life)
        if there is not None:
            self._world.fleet.recall(there.worker_id)  # it was on its way out
            return
        try:
            group = self._group(record)
        except ConfigError as error:
            self._refuse(record, error)
            return
        attached = self._attached(record)
        if attached is not None:
            attached.incarnation = record.incarnation  # other frontends know it by that
            self._refuse(record, ConfigError(f"it is attached as {attached.up.name} already, and counts once"))
            return
        self._coming[life] = self._world.spawn(self._bring(record, group))

    def _drain(self, life: _Life) -> None:
        self._give_up(life)
        worker = self._there.get(life)
        if worker is not None:
            self._world.fleet.drain(worker.worker_id)

    def _leave(self, life: _Life, why: str) -> None:
        self._give_up(life)
        self.refused.pop(life.name, None)
        worker = self._there.get(life)
        if worker is None:
            return
        if why == "replaced":
            self._world.fleet.lose(worker, "another worker has its name or address")
        elif not worker.draining:
            self._world.spawn(self._part(worker, life))

    async def _part(self, worker: LiveWorker, life: _Life) -> None:
        """It is not in the store any more. One that answers may finish what it has; any other is lost."""
        if await worker.engine.alive():
            if self._listed(life) is not None:
                return
            self._world.fleet.drain(worker.worker_id)
        else:
            self._world.fleet.lose(worker, "it has left, and does not answer")

    def _give_up(self, life: _Life) -> None:
        coming = self._coming.pop(life, None)
        if coming is not None:
            coming.cancel()

    def _refuse(self, record: WorkerRecord, error: Exception) -> None:
        self.refused[record.name] = str(error)
        log.warning("worker %s of %s is not used: %s", record.name, self._discovery.name, error)

    # ------------------------------------------------------------ joining

    async def _bring(self, record: WorkerRecord, group: WorkerGroup) -> None:
        """Until it takes work, or has left the store."""
        fleet, life = self._world.fleet, _life(record)
        fleet.starting[record.name] = group.name
        engine: Engine | None = None
        try:
            engine = self._adapter(group, record)
            self._there[life] = await self._welcomed(engine, record, group)
            self.refused.pop(record.name, None)
            self.joined.set()
        except (ConfigError, CapabilityError, EngineError) as error:
            self._refuse(record, error)
        finally:
            fleet.starting.pop(record.name, None)
            if self._coming.get(life) is asyncio.current_task():
                del self._coming[life]
            if engine is not None and life not in self._there:
                await engine.close()

    async def _welcomed(self, engine: Engine, record: WorkerRecord, group: WorkerGroup) -> LiveWorker:
        """Once it takes work and its KV events are listened to, however often that is tried."""
        fleet = self._world.fleet
        while True:
            try:
                facts = await engine.ready(fleet.upkeep.ready_s)
                if self._expected.model not in facts.models:
                    raise ConfigError(f"it serves {', '.join(facts.models)}, and this frontend {self._expected.model}")
                return await fleet.welcome(engine, facts, record.name, group.name, record.incarnation)
            except EngineError as error:
                log.warning("worker %s is listed and not ready: %s", record.name, error)
            await asyncio.sleep(RETRY_S)

    def _group(self, record: WorkerRecord) -> WorkerGroup:
        """The group that it works in, as it says itself what it is. Raises ConfigError for one that cannot serve."""
        self._check(record)
        group = self._groups.get(record.group or "")
        if group is None:
            kinds = [(one.engine.kind, one.role) for one in self._groups.values()]
            if (record.engine, record.role.value) not in kinds:
                wanted = ", ".join(f"{role} workers of {kind}" for kind, role in kinds)
                raise ConfigError(
                    f"it is a {record.role.value} worker of {record.engine}, and the configuration has {wanted}"
                )
            group = list(self._groups.values())[kinds.index((record.engine, record.role.value))]
        if group.engine.kind != record.engine:
            raise ConfigError(f"group {group.name} has engine {group.engine.kind} here, and the worker {record.engine}")
        return replace(group, role=record.role.value)

    def _check(self, record: WorkerRecord) -> None:
        ours, theirs = self._expected.fingerprint, record.fingerprint
        if ours is not None and theirs is not None and ours != theirs:
            raise ConfigError(f"its tokenizer is another one ({theirs}, here {ours}): token ids would mean other words")
        size = self._world.tree.block_size
        if self._world.reads_blocks and record.block_size not in (None, size):
            raise ConfigError(f"its KV blocks have {record.block_size} tokens and those of the router {size}")
        host = urlsplit(record.url).hostname or ""
        if record.host not in (None, socket.gethostname()) and _is_loopback(host):
            raise ConfigError(
                f"{record.url} is reached from host {record.host} alone; start it there with --host ADDRESS"
            )

    # ------------------------------------------------------------ what the fleet says

    def _fell(self, worker: LiveWorker, reason: str) -> None:
        """A worker of ours is gone from the fleet. While the store lists it, it may come back, as another worker."""
        life = next((life for life, one in self._there.items() if one is worker), None)
        if life is None:
            self._attached_fell(worker)
            return
        del self._there[life]
        record = self._listed(life)
        if record is not None and not record.draining and reason != "drained":
            self._come(record)

    def _attached(self, record: WorkerRecord) -> LiveWorker | None:
        """A worker of the fleet at that address that this one did not bring."""
        ours = [id(worker) for worker in self._there.values()]
        others = (one for one in self._world.fleet.workers.values() if not one.lost and id(one) not in ours)
        return next((one for one in others if _address(one.url) == _address(record.url)), None)

    def _attached_fell(self, worker: LiveWorker) -> None:
        """One that was attached is gone from the fleet; the store may list it still."""
        listed = self._watch.workers.values() if self._watch is not None else ()
        for record in [one for one in listed if not one.draining and _address(one.url) == _address(worker.url)]:
            self._come(record)

    def _listed(self, life: _Life) -> WorkerRecord | None:
        record = self._watch.workers.get(life.name) if self._watch is not None else None
        return record if record is not None and _life(record) == life else None


def _life(record: WorkerRecord) -> _Life:
    return _Life(record.name, record.incarnation)


def _address(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return LOOPBACK if host == "localhost" else host, parts.port


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
