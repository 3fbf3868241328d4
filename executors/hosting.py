"""Workers of this host for frontends elsewhere: started, registered with a lease, and drained when they are to end.

It decides nothing and sends no requests. A worker is in the store from when it takes work until its process is gone; an
engine that ends by itself leaves the store at once and is not started again: whoever supervises this process decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from executors.discovery.protocol import LEASE_S, Discovery, Registration, StoreError
from executors.discovery.record import WorkerRecord, new_incarnation
from executors.engines.protocol import Facts
from executors.engines.remote import Remote
from executors.process import Ended, EngineProcess
from executors.starter import HostStarter
from policies.errors import CapabilityError, EngineError
from policies.frozen import frozen
from twin.config import Config, ResilienceConfig
from twin.config_live import LiveConfig

log = logging.getLogger(__name__)

STORE_S = 10.0
"""How long the store may take to answer before anything is started."""


@frozen
class Terms:
    """Seconds: `ready_s` for a worker to come up, `lease_s` of its entry; once it is to end, `grace_s` in which
    frontends learn of it, and `drain_s` in which its open requests may finish."""

    ready_s: float = LiveConfig().ready_s
    lease_s: float = LEASE_S
    grace_s: float = ResilienceConfig().grace_s
    drain_s: float = ResilienceConfig().drain_timeout_s

    @classmethod
    def of(cls, config: Config) -> Terms:
        resilience = config.resilience
        return cls(ready_s=config.live.ready_s, grace_s=resilience.grace_s, drain_s=resilience.drain_timeout_s)


@frozen
class Self:
    """What the records of this host's workers have in common: what their names begin with, the name of the host, and
    of which tokenizer they are (None: not known)."""

    prefix: str
    host: str
    fingerprint: str | None = None


@dataclass(slots=True)
class _Hosted:
    engine: Remote
    process: EngineProcess
    registration: Registration


class WorkerHost:
    """Workers of one group, of `starter`, in `discovery`. `tell` hears of each that is registered."""

    def __init__(
        self,
        starter: HostStarter,
        group: str,
        discovery: Discovery,
        own: Self,
        terms: Terms,
        tell: Callable[[WorkerRecord], None] = lambda record: None,
    ) -> None:
        self._starter = starter
        self._group = group
        self._discovery = discovery
        self._own = own
        self._terms = terms
        self._tell = tell
        self._workers: list[_Hosted] = []
        self._stopping = False
        self._hurry = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.none_left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the last worker ended, when all have by themselves."""

    async def start(self, count: int) -> None:
        """Start so many workers and register each when it takes work. Raises EngineError where one does not come up,
        CapabilityError where the store cannot be reached."""
        await self._look_at_the_store()
        try:
            async with asyncio.TaskGroup() as starting:
                for _ in range(count):
                    starting.create_task(self._bring_up())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _look_at_the_store(self) -> None:
        """Before engines take minutes to start."""
        watch = self._discovery.watch()
        try:
            async with asyncio.timeout(STORE_S):
                await watch.listed()
        except TimeoutError:
            raise CapabilityError(f"{self._discovery.name} does not answer ({watch.stale}); is it there?") from None
        finally:
            await watch.close()

    async def _bring_up(self) -> None:
        name, started = self._starter.start(self._group)
        engine = await started
        assert isinstance(engine, Remote)
        try:
            await self._register(name, engine)
        except BaseException:
            await engine.close()
            raise

    async def _register(self, name: str, engine: Remote) -> None:
        process = engine.at.process
        assert process is not None
        facts = await engine.ready(self._terms.ready_s)
        record = self._record(name, engine, facts, process)
        try:
            registration = await self._discovery.register(record, self._terms.lease_s)
        except StoreError as error:
            raise CapabilityError(f"{record.name} cannot be registered in {self._discovery.name}: {error}") from error
        hosted = _Hosted(engine, process, registration)
        self._workers.append(hosted)
        process.when_ended(lambda ended: self._ended(hosted, ended))
        self._tell(record)

    def _record(self, name: str, engine: Remote, facts: Facts, process: EngineProcess) -> WorkerRecord:
        return WorkerRecord(
            name=f"{self._own.prefix}-{name}",
            incarnation=new_incarnation(),
            engine=engine.kind,
            url=engine.at.url,
            role=facts.role,
            group=self._group,
            models=facts.models,
            version=facts.version,
            host=self._own.host,
            pid=process.pid,
            block_size=facts.block_size,
            dp_ranks=facts.dp_ranks,
            gpus=max(1, facts.gpus),
            fingerprint=self._own.fingerprint,
            compatibility=facts.compatibility,
        )

    def _ended(self, hosted: _Hosted, ended: Ended) -> None:
        """Its process is gone, by itself or as it was told: it leaves the store."""
        task = asyncio.get_running_loop().create_task(self._leave(hosted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._stopping:
            return
        said = f"{hosted.registration.record.name} ended with {ended.code}; {hosted.process.tail()}"
        log.error("%s", said)
        if all(one.process.ended is not None for one in self._workers) and not self.none_left.done():
            self.none_left.set_result(said)

    async def _leave(self, hosted: _Hosted) -> None:
        with contextlib.suppress(StoreError):  # then its lease runs out
            await hosted.registration.deregister()

    async def serve(self, asked_to_end: asyncio.Event) -> None:
        """Until that event. Raises EngineError when every worker has ended by itself."""
        asking = asyncio.ensure_future(asked_to_end.wait())
        either: set[asyncio.Future[Any]] = {asking, self.none_left}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        if self.none_left.done():
            raise EngineError(f"no worker is left: {self.none_left.result()}")

    def hurry(self) -> None:
        """No more waiting: what still runs is killed."""
        self._hurry.set()
        for hosted in self._workers:
            hosted.process.kill()

    async def stop(self) -> bool:
        """Say that nothing new is taken, let open requests finish, end. False where a process had to be killed."""
        self._stopping = True
        running = [hosted for hosted in self._workers if hosted.process.ended is None]
        await asyncio.gather(*(self._say_draining(hosted.registration) for hosted in running))
        if running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._terms.grace_s)
        await asyncio.gather(*(hosted.process.stop(self._drain_s) for hosted in running))
        return not any(hosted.process.ended and hosted.process.ended.killed for hosted in running)

    @property
    def _drain_s(self) -> float:
        return 0.0 if self._hurry.is_set() else self._terms.drain_s

    async def _say_draining(self, registration: Registration) -> None:
        with contextlib.suppress(StoreError):
            await registration.update(replace(registration.record, draining=True))

    async def close(self) -> None:
        """End what still runs, and let go of the store."""
        self._stopping = True
        await self._starter.close()
        await asyncio.gather(*(hosted.engine.close() for hosted in self._workers))
        await asyncio.gather(*self._tasks)
        await self._discovery.close()
