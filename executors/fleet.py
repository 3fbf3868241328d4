"""The workers of the live world: who is up, what each is doing, and how they come and go.

A worker is lost once, with everything that it had, and what it stranded is posted before anything is sent again. One
that comes back is another worker: its epoch rises.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from executors.canary import canary
from executors.clock import Order
from executors.engines.protocol import Engine, Facts, KvFollower
from executors.live_worker import LiveWorker, Upkeep
from policies.cluster.actions import Probe, RequestIndexDump, RequestIndexReplay
from policies.cluster.events import (
    Event,
    WorkerDraining,
    WorkerEvent,
    WorkerLost,
    WorkerRecalled,
    WorkerReported,
    WorkerUp,
)
from policies.cluster.ids import LossCause, Role, WorkerId
from policies.cluster.kv_events import KvStored
from policies.errors import CapabilityError, ConfigError, EngineError

if TYPE_CHECKING:
    from executors.world import LiveWorld

SUSPECT = frozenset({LossCause.CONNECT, LossCause.DISCONNECTED, LossCause.CONNECT_TIMEOUT})
"""How a leg breaks when its worker may be gone: it is asked at once whether it is alive."""

LISTEN_S: Final = 10.0
"""How long a worker that takes work may take until its KV events are listened to: its publisher is there already."""


class Starter(Protocol):
    """Starts workers of a group: what `AddWorker` needs."""

    def start(self, group: str) -> tuple[str, Awaitable[Engine]]:
        """The new worker's name, and its engine when the process runs. Raises ConfigError for an unknown group."""
        ...


class Fleet:
    """Of one world. `starter` starts processes (None: workers are only attached to); `follow` begins to read the KV
    events of a worker that is up, where somebody wants them."""

    def __init__(self, world: LiveWorld) -> None:
        self._world = world
        self.workers: dict[WorkerId, LiveWorker] = {}
        self.names: dict[WorkerId, str] = {}
        self.ever: dict[tuple[WorkerId, int], LiveWorker] = {}
        """Every worker that there was, by id and epoch."""
        self.starting: dict[str, str] = {}
        """Workers on their way up: name and group."""
        self.upkeep = Upkeep()
        self.starter: Starter | None = None
        self.follow: Callable[[LiveWorker, Callable[[Event], None]], KvFollower | None] | None = None
        self.on_left: list[Callable[[LiveWorker, str], None]] = []
        self.on_failed_start: list[Callable[[str, str, Exception], None]] = []
        self.on_event: list[Callable[[WorkerEvent], None]] = []
        """Called after it was posted that a worker is up, drains, stays or is gone."""
        self.claim: Callable[[Role, str], WorkerId | None] = lambda role, group: None
        """The id that was kept for a worker of a group which comes by itself."""
        self.unclaim: Callable[[WorkerId], None] = lambda worker_id: None
        self._bringing: dict[WorkerId, asyncio.Task[None]] = {}
        self._called_off: set[WorkerId] = set()
        self.looks_after = True
        self._next_id = 0

    def name_of(self, worker_id: WorkerId | None) -> str | None:
        """For people; also of one that is gone."""
        return None if worker_id is None else self.names.get(worker_id, str(worker_id))

    # ------------------------------------------------------------ coming

    def reserve(self) -> WorkerId:
        """The id of a worker that is to come."""
        worker_id, self._next_id = WorkerId(self._next_id), self._next_id + 1
        return worker_id

    def add(self, group: str, worker_id: WorkerId | None = None) -> str:
        """Start a worker of a group, under an id that was reserved (None: the next one); it is up when it is ready.
        Its name."""
        if self.starter is None:
            raise CapabilityError(f"a worker of group {group} was ordered, and nothing here starts processes")
        name, started = self.starter.start(group)
        self.starting[name] = group
        task = self._world.spawn(self._bring_up(name, group, started, worker_id))
        if worker_id is not None:
            self._bringing[worker_id] = task
            task.add_done_callback(lambda _: self._brought(worker_id))
        return name

    def call_off(self, worker_id: WorkerId) -> None:
        """Give up a start of ours that is not over; its process ends."""
        task = self._bringing.get(worker_id)
        if task is not None:
            self._called_off.add(worker_id)
            asyncio.get_running_loop().call_soon(task.cancel)  # not before it has begun: the process would be left

    def _brought(self, worker_id: WorkerId) -> None:
        self._bringing.pop(worker_id, None)
        self._called_off.discard(worker_id)

    async def _bring_up(
        self, name: str, group: str, started: Awaitable[Engine], worker_id: WorkerId | None = None
    ) -> None:
        start = asyncio.ensure_future(started)
        try:
            await self.attach(await asyncio.shield(start), name, group, worker_id)
        except (EngineError, ConfigError, CapabilityError) as error:
            if start.exception() is None:
                await start.result().close()
            for told in self.on_failed_start:
                told(name, group, error)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError, ConfigError, CapabilityError):
                await (await start).close()  # a process that is begun is there to be ended
            raise
        finally:
            self.starting.pop(name, None)

    async def attach(self, engine: Engine, name: str, group: str, worker_id: WorkerId | None = None) -> LiveWorker:
        """Wait until an engine takes work, and register it. Raises EngineError if it does not come up, ConfigError if
        it cannot work with this router."""
        facts = await engine.ready(self.upkeep.ready_s)
        return await self.welcome(engine, facts, name, group, worker_id=worker_id)

    async def welcome(
        self,
        engine: Engine,
        facts: Facts,
        name: str,
        group: str,
        incarnation: int = 0,
        worker_id: WorkerId | None = None,
    ) -> LiveWorker:
        """Register a worker that takes work now, once its KV events are listened to where somebody wants them. Raises
        EngineError where nobody publishes them, ConfigError as `join` does."""
        claimed = self.claim(facts.role, group) if worker_id is None else None
        follower: KvFollower | None = None
        try:
            worker = self._new(engine, facts, name, group, claimed if worker_id is None else worker_id, incarnation)
            if self.follow is not None:
                worker.held = deque()
                follower = worker.follower = self.follow(worker, lambda event: self._hear(worker, event))
            if follower is not None:
                await follower.stands(LISTEN_S)
            if worker.worker_id in self._called_off:
                raise asyncio.CancelledError
            return self._register(worker)
        except BaseException:
            if follower is not None:
                await follower.close()
            if claimed is not None:
                self.unclaim(claimed)
            raise

    def join(
        self, engine: Engine, facts: Facts, name: str, group: str, worker_id: WorkerId | None = None
    ) -> LiveWorker:
        """Register a worker that takes work now and posts for itself what there is to say of its blocks. Raises
        ConfigError if it cannot work with this router."""
        return self._register(self._new(engine, facts, name, group, worker_id))

    def _new(
        self,
        engine: Engine,
        facts: Facts,
        name: str,
        group: str,
        worker_id: WorkerId | None = None,
        incarnation: int = 0,
    ) -> LiveWorker:
        """A worker with a number, of which nobody hears yet."""
        if facts.block_size != self._world.tree.block_size and self._world.reads_blocks:
            raise ConfigError(
                f"worker {name} has KV blocks of {facts.block_size} tokens and the router of "
                f"{self._world.tree.block_size}: they cannot be compared; set workers.engine.block_size to what the "
                "engine has"
            )
        if worker_id is None:
            worker_id = self.reserve()
        else:
            self._next_id = max(self._next_id, worker_id + 1)
        before = self.workers.get(worker_id)
        up = WorkerUp(
            at_s=self._world.clock.now(),
            worker_id=worker_id,
            name=name,
            role=facts.role,
            block_size=facts.block_size,
            total_blocks=facts.total_blocks,
            max_batched_tokens=facts.max_batched_tokens,
            max_num_seqs=facts.max_num_seqs,
            gpus=facts.gpus,
            epoch=before.up.epoch + 1 if before is not None else 0,
            loras=facts.loras,
            dp_ranks=facts.dp_ranks,
            on_cpu=facts.on_cpu,
        )
        return LiveWorker(up=up, engine=engine, group=group, facts=facts, incarnation=incarnation)

    def _register(self, worker: LiveWorker) -> LiveWorker:
        if worker.follower is None and self._world.controller.wants(KvStored):
            raise ConfigError(
                f"worker {worker.up.name} tells nothing of its KV blocks, and the router goes by them: start its "
                "engine with KV events, or set router.use_kv_events = false"
            )
        up = worker.up = replace(worker.up, at_s=self._world.clock.now())
        worker.heard_s = up.at_s
        self.workers[up.worker_id] = worker
        self.names[up.worker_id] = up.name
        self.ever[up.worker_id, up.epoch] = worker
        self._world.ledger.worker_up(up.worker_id, up.epoch)
        self._tell(up)
        while worker.held:  # answers to what an index asks of a new worker are among them, behind what they tell of
            self._world.post(worker.held.popleft())
        worker.held = None
        if self.looks_after:
            worker.tasks.append(self._world.spawn(self._look_after(worker)))
            worker.tasks.append(self._world.spawn(self._report(worker)))
        return worker

    def _hear(self, worker: LiveWorker, event: Event) -> None:
        """Something that a worker says of itself, unless it is known to be gone."""
        if worker.held is not None:
            worker.held.append(event)
        elif not worker.lost:
            self._world.post(event)

    def _tell(self, event: WorkerEvent) -> None:
        self._world.post(event)
        for told in self.on_event:
            told(event)

    # ------------------------------------------------------------ looking after

    async def _look_after(self, worker: LiveWorker) -> None:
        """Ask for its health, and take it for lost when it is."""
        while not worker.lost:
            await asyncio.sleep(self.upkeep.health_every_s)
            await self._check(worker)

    async def _check(self, worker: LiveWorker) -> None:
        if await worker.engine.alive():
            worker.misses = 0
            if self._is_silent(worker):
                reason = f"neither requests nor KV events were answered for {self.upkeep.silent_s:g} s"
                self.lose(worker, reason, LossCause.RESPONSE_TIMEOUT)
        else:
            worker.misses += 1
            if worker.misses >= self.upkeep.misses:
                self.lose(worker, f"no answer to {worker.misses} health checks in a row")

    def _is_silent(self, worker: LiveWorker) -> bool:
        """Whether all that it owes, and what it is asked of its blocks, went unanswered for too long: servers answer
        for their health while the engine behind them hangs."""
        heard_s = worker.follower.heard_s if worker.follower is not None else None
        if self.upkeep.silent_s is None or heard_s is None:
            return False
        owed_s = [] if worker.unanswered_s is None else [worker.unanswered_s]
        for request in self._world.open.values():
            legs = [leg for leg in request.legs.values() if leg.worker_id == worker.worker_id]
            owed_s += [leg.sent_s for leg in legs if leg.sent_s is not None]
        if not owed_s:
            return False
        return self._world.clock.now() - max(min(owed_s), worker.heard_s, heard_s) >= self.upkeep.silent_s

    async def _report(self, worker: LiveWorker) -> None:
        """Ask how much it has to do: for whoever looks on, and for policies that want to know."""
        wanted = self._world.controller.wants(WorkerReported)
        while not worker.lost:
            load = await worker.engine.load()
            if load is not None:
                if worker.load is not None and load.late_fetches > worker.load.late_fetches:
                    self._world.distrust(worker)
                worker.load = load
            if load is not None and wanted and not worker.lost:
                at_s = self._world.clock.now()
                self._world.post(
                    WorkerReported(
                        at_s=at_s,
                        worker_id=worker.worker_id,
                        measured_s=min(load.measured_s, at_s),
                        running=load.running,
                        waiting=load.waiting,
                        active_blocks=load.active_blocks,
                        cached_blocks=load.cached_blocks,
                    )
                )
            await asyncio.sleep(self.upkeep.report_every_s)

    def suspect(self, worker: LiveWorker) -> None:
        """A leg on it broke as it would if the worker were gone: ask at once, `misses` times."""

        async def ask() -> None:
            for _ in range(self.upkeep.misses):
                if worker.lost or await worker.engine.alive():
                    return
            self.lose(worker, "connections break and it does not answer")

        if not worker.lost:
            self._world.spawn(ask())

    # ------------------------------------------------------------ going

    def lose(self, worker: LiveWorker, reason: str, cause: LossCause = LossCause.DISCONNECTED) -> None:
        """A worker is gone: told once, with the requests that it strands."""
        if worker.lost:
            return
        self._leave(worker)
        worker_id = worker.worker_id
        self._tell(WorkerLost(at_s=self._world.clock.now(), worker_id=worker_id, reason=reason))
        for request in list(self._world.open.values()):
            if any(leg.worker_id == worker_id for leg in request.legs.values()) and not request.closed:
                self._world.interrupt(request, worker_id, reason, cause)
        self._gone(worker, reason)

    def drain(self, worker_id: WorkerId, deadline_s: float | None = None) -> None:
        """A worker takes nothing new, and leaves when its open work has ended or its time (None: the usual) is over."""
        worker = self.workers[worker_id]
        if worker.draining or worker.lost:
            return
        worker.draining = True
        now_s = self._world.clock.now()
        if not worker.fenced:  # else it has been told
            self._tell(WorkerDraining(at_s=now_s, worker_id=worker_id))
        drain_s = self.upkeep.drain_s if deadline_s is None else deadline_s
        self._world.clock.call_at(now_s + drain_s, Order.COMMAND, lambda: self._cut(worker))
        self.check_drained()

    def _cut(self, worker: LiveWorker) -> None:
        if worker.draining and not worker.lost:
            self.lose(worker, "engine shutdown at the end of the drain time", LossCause.SHUTDOWN)

    def recall(self, worker_id: WorkerId) -> None:
        """A worker that drains stays; one that has gone is gone."""
        worker = self.workers[worker_id]
        if worker.draining and not worker.lost:
            worker.draining = worker.fenced = False
            self._tell(WorkerRecalled(at_s=self._world.clock.now(), worker_id=worker_id))

    def check_drained(self) -> None:
        """Let draining workers go that have nothing left."""
        for worker in list(self.workers.values()):
            if worker.draining and not worker.lost and not self._has_work(worker.worker_id):
                self._leave(worker)
                now_s = self._world.clock.now()
                self._tell(WorkerLost(at_s=now_s, worker_id=worker.worker_id, reason="drained"))
                self._gone(worker, "drained")

    def _has_work(self, worker_id: WorkerId) -> bool:
        """Whether a request has a leg there, or KV that was computed there and is not fetched."""
        return any(
            any(leg.worker_id == worker_id for leg in request.legs.values())
            or (request.handoff and request.prefill_worker_id == worker_id)
            for request in self._world.open.values()
        )

    def _leave(self, worker: LiveWorker) -> None:
        worker.lost, worker.left_s = True, self._world.clock.now()
        self._world.ledger.worker_lost(worker.worker_id)
        for task in worker.tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _gone(self, worker: LiveWorker, reason: str) -> None:
        for told in self.on_left:
            told(worker, reason)
        self._world.spawn(self._end(worker, 0.0 if reason != "drained" else self.upkeep.drain_s))

    async def _end(self, worker: LiveWorker, drain_s: float) -> None:
        if worker.follower is not None:
            await worker.follower.close()
        if drain_s:
            await worker.engine.drain(drain_s)
        await worker.engine.close()

    # ------------------------------------------------------------ canaries, index

    def probe(self, action: Probe) -> None:
        """One token past all queues, unless the worker has said something meanwhile."""
        worker = self.workers.get(action.worker_id)
        if worker is None or worker.lost or worker.up.epoch != action.epoch:
            return
        self._world.spawn(canary(self._world, worker, action))

    def ask_index(self, action: RequestIndexReplay | RequestIndexDump) -> None:
        """A rank is asked to say again what it has."""
        worker = self.workers.get(action.worker_id)
        if worker is None or worker.lost or worker.up.epoch != action.epoch:
            return  # with its loss everything that was asked of it is answered
        if worker.follower is None:
            raise CapabilityError(f"worker {worker.up.name} cannot say its KV events again")
        worker.follower.ask(action)

    async def close(self) -> None:
        """Let go of every worker; processes that we started end."""
        workers = [worker for worker in self.workers.values() if not worker.lost]
        for worker in workers:
            self._leave(worker)
        await asyncio.gather(*(self._end(worker, 0.0) for worker in workers), return_exceptions=True)
