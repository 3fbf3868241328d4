"""What workers say of themselves: KV events and load reports, when they are heard, and what has to be known when.

Messages may be late, lost or held up by a partition. A leap evicts cached blocks on its way, which is told when
somebody is about to look at the caches: nobody may choose a worker on what is no longer so. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from policies.cluster.events import BlocksCleared, BlocksRemoved, BlocksStored, WorkerEvent, WorkerReported
from policies.cluster.ids import Role, Tier, WorkerId
from policies.errors import CapabilityError
from twin.engine.plan import StepPlan
from twin.engine.ticks import instant
from twin.mocker.accounts import Accounts
from twin.mocker.clock import Order
from twin.mocker.wires import FRONTEND
from twin.mocker.worker import MockWorker

if TYPE_CHECKING:
    from policies.cluster.actions import RequestIndexDump, RequestIndexReplay
    from policies.kvbm.consolidate import Change
    from twin.mocker.churn import Upset
    from twin.mocker.world import MockWorld, Observation
    from twin.worker_spec import WorkerSpec

_LATE = int(Order.LATE)


class News:
    """Of one world. `decode_events`: decode workers tell what they cache; `loses_events`: messages get lost or are late
    at times, so that each counts.
    """

    def __init__(self, world: MockWorld, observe: Observation, *, decode_events: bool, loses_events: bool) -> None:
        self._world = world
        self._observe = observe
        self._decode_events = decode_events
        wants = world.controller.wants
        self.of_blocks = wants(BlocksStored) or wants(BlocksRemoved)
        self.of_load = wants(WorkerReported)
        self.leaps_past_evictions = observe.kv_event_lag_s <= 0.0 and not loses_events
        self.evicting: list[tuple[float, int, MockWorker, StepPlan]] = []  # leaps by the time of their next eviction
        self._watched = 0
        self._reporting = False
        self.accounts = Accounts()

    def tells_blocks(self, spec: WorkerSpec) -> bool:
        """Whether somebody wants to know what a worker caches, and it says so."""
        return self.of_blocks and spec.settings.prefix_caching and not self._is_silent(spec.role)

    def _is_silent(self, role: Role) -> bool:
        """Whether a worker of this role says nothing of what only it has."""
        return role is Role.DECODE and not self._decode_events

    def tells_load(self, spec: WorkerSpec) -> bool:
        """Whether somebody wants to know how much a worker has to do."""
        return self.of_load

    def hear(self, worker: MockWorker, what: Callable[[], None], *, news: bool = False) -> None:
        """Something that a worker says is heard when it gets through, and not believed once the worker is known to be
        gone: it is another one that comes back.
        """
        if worker.fenced:
            return
        if not self._world.wires.parts:
            what()
            return
        epoch = worker.up.epoch

        def heard() -> None:
            if not worker.fenced and worker.up.epoch == epoch:
                what()

        self._world.wires.send(worker.worker_id, FRONTEND, heard, news=news)

    def watch(self, worker: MockWorker, plan: StepPlan) -> None:
        """A leap will evict blocks on its way: whoever looks at the caches then must know."""
        assert plan.evict_s is not None
        self._watched += 1
        heappush(self.evicting, (plan.evict_s, self._watched, worker, plan))

    def learn_evictions(self, now_s: float) -> None:
        """Post what leaps have evicted by `now_s`. Nobody has looked since, so nobody missed it."""
        evicting = self.evicting
        while evicting and evicting[0][0] <= now_s:
            _, _, worker, plan = heappop(evicting)
            if worker.settle(plan, now_s):
                pool = worker.engine.pool
                if pool.stored or pool.removed:
                    self.post_blocks(worker)
                if plan.evict_s is not None and plan.evict_s > now_s:
                    self.watch(worker, plan)

    def on_changed(self, worker: MockWorker) -> None:
        """What a worker has cached may have changed between its steps: that is told at once, not with its next step."""
        pool = worker.engine.pool
        if (pool.stored or pool.removed) and not worker.down:
            self.post_blocks(worker)

    def post_blocks(self, worker: MockWorker) -> None:
        pool = worker.engine.pool
        if not self.of_blocks or self._is_silent(worker.up.role):  # an engine with tiers notes them whoever listens
            pool.stored, pool.removed = [], []
            return
        now_s = self._world.clock.now
        lag_s, upset = self._way(worker.worker_id)
        events: list[WorkerEvent] = []
        removed, stored = self.accounts.take(worker.worker_id, pool)
        if removed:
            events.append(BlocksRemoved(at_s=instant(now_s + lag_s), worker_id=worker.worker_id, runs=tuple(removed)))
        if stored:
            events.append(BlocksStored(at_s=instant(now_s + lag_s), worker_id=worker.worker_id, runs=tuple(stored)))
        self._send(worker, events, lag_s, upset)

    def _way(self, worker_id: WorkerId) -> tuple[float, Upset | None]:
        """How long what a worker says of its blocks is on the way now, and what else disturbs it."""
        lag_s = self._observe.kv_event_lag_s
        upset = self._world.churn.upsets.get(worker_id) if self._world.churn.upsets else None
        return (lag_s, None) if upset is None else (lag_s + upset.delay_s, upset)

    def _send(self, worker: MockWorker, events: Sequence[WorkerEvent], lag_s: float, upset: Upset | None) -> None:
        """Each of these is told, unless it is lost."""
        for event in events:
            if upset is None:
                self._tell(worker, event, lag_s)
            else:
                self._tell_upset(worker, event, lag_s, upset)

    def _tell_upset(self, worker: MockWorker, event: WorkerEvent, lag_s: float, upset: Upset) -> None:
        """A message that may be lost, late or told twice."""
        for more_s in upset.fates_s():
            at_s = instant(self._world.clock.now + lag_s + more_s)
            self._tell(worker, event if at_s == event.at_s else replace(event, at_s=at_s), lag_s + more_s)

    def tell_all(self, worker: MockWorker) -> None:
        """A worker says again all that it has."""
        if not self.tells_blocks(self._world.specs[worker.worker_id]):
            return
        told = self.accounts.held(worker.worker_id)
        runs = tuple(worker.engine.pool.findable() if told is None else told)
        if runs:
            self._world.post(BlocksStored(at_s=self._world.clock.now, worker_id=worker.worker_id, runs=runs))
        if told is None and self._world.block_tiers is not None:
            self._world.block_tiers.tell_all(worker.worker_id)

    def start_over(self, worker: MockWorker) -> None:
        """A worker that works on registers anew: it will be asked for all that it has."""
        self.accounts.start_over(worker.worker_id, worker.engine.pool, self._below(worker.worker_id))

    def _below(self, worker_id: WorkerId) -> Sequence[Change]:
        """What the tiers of a worker hold, as stores."""
        tiers = self._world.block_tiers
        return tiers.contents(worker_id) if tiers is not None else ()

    def answer(self, asked: RequestIndexReplay | RequestIndexDump) -> None:
        """A rank is asked to say again what it has."""
        raise CapabilityError(f"workers that tell of blocks in the simulator's own words cannot answer {asked!r}")

    def tier_changed(self, worker_id: WorkerId, change: Change) -> None:
        """Blocks were stored in a tier below a device, or left it."""
        told = self.accounts.changed(worker_id, change)
        if told is not None:
            self._tell_change(worker_id, told)

    def tier_cleared(self, worker_id: WorkerId, tier: Tier) -> None:
        """A tier below a device has lost everything."""
        if self.accounts.names_tiers(worker_id):
            self._tell_cleared(worker_id, tier)
        elif (told := self.accounts.lost(worker_id, tier)) is not None:
            self._tell_change(worker_id, told)

    def _tell_change(self, worker_id: WorkerId, change: Change) -> None:
        kind = BlocksStored if change.is_store else BlocksRemoved
        self._tell_tier(
            worker_id,
            change.tier,
            lambda at_s: kind(at_s=at_s, worker_id=worker_id, runs=change.runs, tier=change.tier),
        )

    def _tell_cleared(self, worker_id: WorkerId, tier: Tier) -> None:
        self._tell_tier(worker_id, tier, lambda at_s: BlocksCleared(at_s=at_s, worker_id=worker_id, tier=tier))

    def _tell_tier(
        self, worker_id: WorkerId, tier: Tier, made: Callable[[float], BlocksStored | BlocksRemoved | BlocksCleared]
    ) -> None:
        """Everybody tells of a tier that all share: what one stored and another pushed out is there no longer."""
        worker = self._world.workers.get(worker_id)
        if not self.of_blocks or worker is None:
            return
        if tier is not Tier.G4_REMOTE and self._is_silent(worker.up.role):
            return
        lag_s, upset = self._way(worker_id)
        self._send(worker, (made(instant(self._world.clock.now + lag_s)),), lag_s, upset)

    def _tell(self, worker: MockWorker, event: WorkerEvent, lag_s: float) -> None:
        """Post what a worker says of itself, now or late."""
        if lag_s <= 0.0 and not self._world.wires.parts:
            self._world.post(event)
            return

        def told() -> None:
            self._world.post(
                event if event.at_s == self._world.clock.now else replace(event, at_s=self._world.clock.now)
            )

        if lag_s <= 0.0:
            self.hear(worker, told, news=True)
        else:
            epoch = worker.up.epoch
            put = self._world.clock.watch if isinstance(event, WorkerReported) else self._world.clock.call
            put(event.at_s, _LATE, lambda: self.hear(worker, told, news=True) if worker.up.epoch == epoch else None)

    def start_reports(self) -> None:
        """There is work: load reports begin, if somebody wants them and they do not come already."""
        if self.of_load and not self._reporting:
            self._reporting = True
            self._next_report()

    def _next_report(self) -> None:
        self._world.clock.watch(instant(self._world.clock.now + self._observe.report_every_s), _LATE, self._report)

    def _report(self) -> None:
        """Every worker tells its load; goes on while there is work that moves: quiet spells cost nothing, and a run in
        which nothing else can happen ends.
        """
        measured_s, lag_s = self._world.clock.now, self._observe.report_lag_s
        for worker in self._world.workers.values():
            upset = self._world.churn.upsets.get(worker.worker_id)
            if worker.down or worker.hung or (upset is not None and upset.silent):
                continue
            running, waiting, active, cached = worker.load(measured_s)
            at_s = instant(measured_s + lag_s)
            event = WorkerReported(
                at_s=at_s,
                worker_id=worker.worker_id,
                measured_s=measured_s if upset is None else min(measured_s + upset.skew_s, at_s),
                running=running,
                waiting=waiting,
                active_blocks=active,
                cached_blocks=cached,
            )
            self._tell(worker, event, lag_s)
        self._reporting = bool(self._world.open) and self._world.clock.waiting > 0
        if self._reporting:
            self._next_report()
