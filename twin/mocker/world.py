"""The simulated world: one virtual clock, arrivals, workers; it performs what the controller orders.

It owns the promise that every action ends in exactly one terminal event, and that what happens at one instant happens
in the order of `clock.Order`. It decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from simpy.events import Event as SimEvent

from policies.cluster.actions import (
    Action,
    AddWorker,
    Cancel,
    CancelStart,
    Dispatch,
    DrainWorker,
    Enqueue,
    Fail,
    Fence,
    Migrate,
    Probe,
    PublishBooking,
    RecallWorker,
    Reject,
    RequestIndexDump,
    RequestIndexReplay,
    SetTimer,
    Unfence,
)
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller
from policies.cluster.events import (
    Event,
    FirstToken,
    ProbeEnded,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    TimerFired,
    WorkerFenced,
    WorkerUnfenced,
    WorkerUp,
)
from policies.cluster.ids import Leg, RequestId, WorkerId
from policies.cluster.ticks import NotePlan
from policies.cluster.twin_asks import AskTwin
from policies.errors import CapabilityError, ConfigError, EngineError, InvariantError
from policies.frozen import frozen
from policies.router.base import ALL_FENCED, NO_ENDPOINTS
from twin.engine.build import build_engine
from twin.engine.plan import Outcome
from twin.engine.sequence import Phase
from twin.engine.sequence import Sequence as EngineSequence
from twin.engine.ticks import instant, not_before
from twin.mocker.churn import Churn
from twin.mocker.clock import Clock, Order
from twin.mocker.demand import Demand, Row
from twin.mocker.news import News
from twin.mocker.partitions import Partitions, Reached
from twin.mocker.requests import OpenRequest
from twin.mocker.sinks import Cells, Sinks
from twin.mocker.starts import Starts
from twin.mocker.wires import FRONTEND, Wires
from twin.mocker.worker import MockWorker
from twin.perf.cargo import TIER_FETCHES, TIER_STORES, WEIGHTS
from twin.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from twin.engine.protocol import Engine
    from twin.mocker.canaries import Canaries
    from twin.mocker.handoff import HandoffPlan, Handoffs
    from twin.mocker.hostlanes import HostLane
    from twin.mocker.links import Network
    from twin.mocker.routersync import RouterSync, SyncPlan
    from twin.mocker.scaling import Scaling
    from twin.mocker.tiers import Tiers

_FIRST, _ARRIVAL, _TIMER, _READY = map(int, (Order.FAULT, Order.ARRIVAL, Order.TIMER, Order.WORKER_READY))


class Answering(Protocol):
    """Answers what a policy asks of the twin; ends each question with one `TwinAnswered`."""

    def ask(self, question: AskTwin) -> None: ...


@frozen
class Observation:
    """How late the cluster learns things, in seconds; `report_every_s` is the interval of load reports.

    `engine_events`: workers tell of their blocks as engines do (`kvstreams`), by rank with `ranks_apart`. Each rank can
    say its last `kv_replay_events` again; an answer takes `kv_dump_block_s` a block, and comes at
    `kv_dump_bytes_per_s`.
    """

    report_lag_s: float = 0.0
    report_every_s: float = 1.0
    kv_event_lag_s: float = 0.0
    engine_events: bool = False
    ranks_apart: bool = False
    kv_replay_events: int = 10_000
    kv_dump_block_s: float = 20e-6
    kv_dump_bytes_per_s: float = 1e9


PROMPT = Observation()
"""Everything is learned at once."""


class MockWorld:
    """Runs a demand through a controller and simulated workers.

    `key_tokens` is how many tokens one hash id of the demand stands for (None: no ids). `concurrency` closes the loop:
    at most so many units (rows, or whole sessions) at once, recorded times ignored. `handoff` says how KV goes from
    prefill workers to decode workers, where there are such. `loses_events`: messages of workers get lost or are late at
    times, so that each counts. `sync` says how routers tell each other of their bookings. `network` are the links of
    the run, with the clock that the world is to have. What the world itself draws follows from `seed`.
    """

    __slots__ = (  # more than 30 attributes in a dictionary are slow to read
        "_arriving",
        "_concurrency",
        "_demand",
        "_has_keys",
        "_hear",
        "_hit_blocks",
        "_host_hit_blocks",
        "_lookup_blocks",
        "_network",
        "_next_row",
        "_on_end",
        "_one_size",
        "_progress",
        "_router",
        "_seed",
        "_sinks",
        "_timers",
        "_told_as",
        "_trees",
        "_units",
        "answering",
        "block_tiers",
        "canaries",
        "churn",
        "clock",
        "controller",
        "cut_short",
        "ended",
        "handoffs",
        "last_end_s",
        "news",
        "on_plan",
        "open",
        "partitions",
        "scaling",
        "specs",
        "starts",
        "stuck",
        "sync",
        "tree",
        "wires",
        "workers",
    )

    def __init__(
        self,
        *,
        controller: Controller,
        workers: Sequence[WorkerSpec],
        demand: Demand,
        sinks: Sinks,
        router: str,
        key_tokens: int | None = None,
        concurrency: int | None = None,
        observe: Observation = PROMPT,
        handoff: HandoffPlan | None = None,
        network: Network | None = None,
        seed: int = 0,
        loses_events: bool = False,
        sync: SyncPlan | None = None,
        on_end: Callable[[OpenRequest, str], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.clock = network.clock if network is not None else Clock()
        self._network = network
        self._seed = seed
        self.block_tiers: Tiers | None = None
        self.controller = controller
        self.workers: dict[WorkerId, MockWorker] = {}
        self.open: dict[RequestId, OpenRequest] = {}
        self.ended = 0
        self.last_end_s = 0.0
        self._demand = demand
        self._sinks = sinks
        self._router = router
        self._told_as = {leg: router if leg is Leg.AGG else f"{router} {leg.value}" for leg in Leg}
        self._concurrency = concurrency
        self._on_end = on_end
        self._progress = progress
        self._timers: dict[str, float] = {}
        self._lookup_blocks = self._hit_blocks = self._host_hit_blocks = 0
        self._arriving = True
        self._next_row: Row | None = None  # of the open loop: not yet its time
        decode_events = handoff is not None and handoff.decode_kv_events
        self.news = self._news(observe, decode_events=decode_events, loses_events=loses_events)
        self._trees = _trees(workers, key_tokens, one_size=self.news.of_blocks)
        self.tree = next(iter(self._trees.values()))  # what policies see: the blocks of the first worker
        self._one_size = self.tree.block_size if len(self._trees) == 1 else 0
        self._has_keys = key_tokens is not None
        self.specs = {spec.worker_id: spec for spec in workers}
        self.wires = Wires(lambda delay_s, what: self.call(instant(self.clock.now + delay_s), Order.COMMAND, what))
        self.churn = Churn(self)
        self.partitions = Partitions(self)
        self.starts = Starts(
            self.clock,
            network,
            {spec.worker_id: spec.weights for spec in workers if spec.weights is not None},
            is_up=self._can_send,
        )
        self.stuck: Callable[[], tuple[str, list[OpenRequest]] | None] = lambda: None  # whom faults hold up for good
        self.cut_short = 0  # answers that ended where the context was full, before the trace's output length
        self.handoffs = self._carriers(handoff) if handoff is not None else None
        self.answering: Answering | None = None  # who answers what policies ask of the twin
        self.on_plan: list[Callable[[float, NotePlan], None]] = []
        self.scaling: Scaling | None = None  # set by who has workers come and go on order
        self.canaries: Canaries | None = None
        self._hear = self._hear_step
        if controller.wants(ProbeEnded):
            from twin.mocker.canaries import Canaries

            self.canaries = Canaries(self)
            self._hear = self._note_step
        self.sync: RouterSync | None = None
        if sync is not None:
            from twin.mocker.routersync import RouterSync

            self.sync = RouterSync(self, sync)
        for spec in workers:
            self._expect(spec)

    def _news(self, observe: Observation, *, decode_events: bool, loses_events: bool) -> News:
        """Whatever workers say of themselves, in the words that are asked for."""
        if not observe.engine_events:
            return News(self, observe, decode_events=decode_events, loses_events=loses_events)
        from twin.mocker.kvstreams import EngineNews

        return EngineNews(self, observe, decode_events=decode_events, loses_events=loses_events)

    def _carriers(self, plan: HandoffPlan) -> Handoffs:
        """Whatever carries KV from prefill workers to decode workers."""
        from twin.mocker.handoff import Handoffs

        return Handoffs(
            self.clock,
            plan.rules,
            plan.mover(self.clock),
            self.tree,
            post=self._post_informed,
            close=self._close,
            interrupt=self._interrupt,
            freed=self.churn.on_freed,
            changed=self.news.on_changed,
            wires=self.wires,
            tell=self.news.hear,
        )

    def _expect(self, spec: WorkerSpec) -> None:
        """A worker is there when it is ready: now, or later."""
        if spec.ready_s <= 0.0:
            self.start_worker(spec)
        else:
            self.churn.expect(spec.worker_id, spec.ready_s)
            self.call(spec.ready_s, _READY, lambda: self.start_worker(spec))

    @property
    def keyed(self) -> bool:
        """Whether any row that arrived had hash ids."""
        return self._has_keys and self._demand.keyed

    @property
    def prioritised(self) -> bool:
        """Whether any row that arrived had a priority other than 0."""
        return self._demand.prioritised

    @property
    def in_sessions(self) -> bool:
        """Whether any row that arrived belongs to a session."""
        return self._demand.in_sessions

    @property
    def adapted(self) -> bool:
        """Whether any row that arrived asked for an adapter."""
        return self._demand.adapted

    @property
    def gone_s(self) -> dict[WorkerId, float]:
        """The workers that have left (drained, or lost) and did not come back, and when they left."""
        return {worker_id: worker.down_s for worker_id, worker in self.workers.items() if worker.down_s is not None}

    @property
    def idle_timers(self) -> int:
        """Events on the clock that will find nothing to do."""
        return self.block_tiers.idle_timers if self.block_tiers is not None else 0

    @property
    def goes_on(self) -> bool:
        """Whether anything will happen but what only looks on. Workers that start serve nobody when nobody is left."""
        waiting = self.clock.waiting
        if self.scaling is None or self.open:
            return waiting > 0 or (self.scaling is not None and self.scaling.is_awaited)
        return waiting > self.starts.events + self.idle_timers

    @property
    def network(self) -> Network | None:
        """The links that transfers share; None in a run without them."""
        if self._network is not None or self.handoffs is None:
            return self._network
        return self.handoffs.network

    def when_ended(self, heard: Callable[[OpenRequest, str], None]) -> None:
        """Let somebody know of every request that ends, with its status."""
        before = self._on_end

        def both(request: OpenRequest, status: str) -> None:
            if before is not None:
                before(request, status)
            heard(request, status)

        self._on_end = heard if before is None else both

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Until every request has ended. What faults hold up for good fails when nothing else is left to happen;
        raises EngineError, naming them, when open requests cannot proceed for no such reason."""
        clock = self.clock
        self._begin()
        clock.run_out()
        while self.open and (found := self.stuck()) is not None:
            why, held_up = found
            for request in held_up:
                if not request.closed:
                    self.churn.give_up(request, "failed", why)
            clock.run_out()
        if self.open:
            names = ", ".join(f"{r!r} ({self._where(o)})" for r, o in list(self.open.items())[:5])
            more = len(self.open) - 5
            raise EngineError(
                f"deadlock at {clock.now:.6f} s: {len(self.open)} open requests cannot make progress: {names}"
                + (f" and {more} more" if more > 0 else "")
            )

    def abandon(self) -> None:
        """Note every open request as `open`: the run was stopped early."""
        for request in list(self.open.values()):
            self._note(request, "open", None)
        self.open.clear()

    def audit(self) -> None:
        """What must hold at the end: nobody is open, every pool has its blocks back, books add up."""
        if self.open:
            raise InvariantError(f"{len(self.open)} requests are open after the end of the run")
        if self.controller.view.requests:
            raise InvariantError(
                f"the controller knows {len(self.controller.view.requests)} open requests after the end"
            )
        if self.network is not None:
            self.network.audit()
            held_up = (WEIGHTS, TIER_STORES, TIER_FETCHES)  # a link that stays down holds up starts for good
            live = self.network.live - sum(self.network.live_of(cargo) for cargo in held_up)
            if live:
                raise InvariantError(f"{live} transfers are under way after the end of the run")
        for worker in self.workers.values():
            if worker.down:
                continue
            engine = worker.engine
            engine.pool.audit()
            if self.partitions.is_cut_off(worker.worker_id) or self.wires.owes(worker.worker_id):
                continue  # it has not heard that it may let go
            if engine.pool.active or engine.batch.size or not engine.idle:
                raise InvariantError(
                    f"worker {worker.up.name} ended with {engine.pool.active} blocks owned, {engine.batch.size} "
                    f"sequences decoding, {len(engine.waiting)} waiting"
                )
            view = self.controller.view.workers.get(worker.worker_id)
            if view is not None and view.in_flight:
                raise InvariantError(f"worker {worker.up.name} ended with {view.in_flight} requests in flight")
        if self.block_tiers is not None:
            self.block_tiers.audit()

    # ------------------------------------------------------------ arrivals

    def _begin(self) -> None:
        """Let the first of the demand arrive."""
        if self._concurrency is not None:
            self._units = self._demand.units()
            self.call(0.0, _ARRIVAL, self._fill)
        else:
            self._units = self._demand.open_loop()
            self.clock.at(0.0, _FIRST, (self._arrivals,))

    def _fill(self) -> None:
        """The closed loop begins."""
        for _ in range(self._concurrency or 0):
            self._next_unit()
        self._arriving = False

    def _arrivals(self, _: SimEvent) -> None:
        """The rows of the open loop whose time has come arrive."""
        clock = self.clock
        row = self._next_row
        if row is not None:
            self._arrive(row)
        for row in self._units:
            at_s = instant(row.arrival_s or 0.0)
            if at_s > clock._now:
                self._next_row = row
                clock.at(at_s, _ARRIVAL, (self._arrivals,))
                return
            self._arrive(row)
        self._arriving = False

    def _next_unit(self) -> None:
        row = next(self._units, None)
        if row is not None:
            self._arrive(row)

    def _arrive(self, row: Row) -> None:
        now_s = self.clock._now
        if self.news.evicting and self.news.evicting[0][0] <= now_s:
            self.news.learn_evictions(now_s)
        path = self.tree.path(row.keys, row.isl) if row.keys is not None and self._has_keys else None
        request_id = RequestId(row.request_id)
        while request_id in self.open:  # the trace repeats an id; ours must be unique while it is open
            request_id = RequestId(f"{request_id}#{row.row}")
        self.open[request_id] = OpenRequest(request_id, row, now_s, path)
        churn = self.churn
        for heard in churn.on_arrival:
            heard(row.row, request_id)
        self.post(
            RequestArrived(
                at_s=now_s,
                request_id=request_id,
                isl=row.isl,
                blocks=path,
                max_tokens=row.max_tokens,
                priority=row.priority,
                session_id=row.session_id,
                lora=row.lora,
                worker_hint=churn.pins.get(row.row) if churn.pins else None,
                tenant=row.tenant,
            )
        )

    def _follow(self, row: Row) -> None:
        """What the end of a request lets in: its session's next turn, or the next unit of the closed loop."""
        turn = self._demand.next_turn(row.session_id)
        if turn is not None:
            self.call(instant(self.clock.now + (turn.delay_s or 0.0)), _ARRIVAL, lambda: self._arrive(turn))
        elif self._concurrency is not None:
            self.call(self.clock.now, _ARRIVAL, self._next_unit)

    # ------------------------------------------------------------ events and actions

    def post(self, event: Event) -> None:
        for action in self.controller.step(event):
            if type(action) is Dispatch:  # the usual one
                self._dispatch(action)
            else:
                self._perform(action)

    def _post_informed(self, event: Event) -> None:
        """Post what may be answered by a choice of workers: what leaps have evicted by then is known."""
        self.news.learn_evictions(self.clock.over_s)
        self.post(event)

    def _interrupt(self, request: OpenRequest, worker: MockWorker, why: str) -> None:
        self.news.learn_evictions(self.clock.over_s)
        self.churn.interrupt(request, worker, why)

    def _perform(self, action: Action) -> None:
        match action:
            case Dispatch():
                self._dispatch(action)
            case Reject():
                due = self.churn.next_due if action.code in (NO_ENDPOINTS, ALL_FENCED) else ""
                request = self.open[action.request_id]
                if action.retry_after_s is not None:
                    self._sinks.retry_after_s[request.row.row] = action.retry_after_s
                self._refuse(request, f"{action.code}: {action.reason}{due}")
            case Enqueue():
                self._note_queued(action)
            case Migrate():
                self.churn.migrate(action)
            case Fail():
                self._let_go(self.open[action.request_id])
                self.end(action.request_id, "failed", f"{action.code}: {action.reason}")
            case Cancel():
                self.churn.cancel(action.request_id)
            case DrainWorker():
                if self.scaling is not None:
                    self.scaling.drain(action)
                else:
                    self.churn.drain(action.worker_id)
            case RecallWorker():
                if self.scaling is not None:
                    self.scaling.recall(action)
                else:
                    self.churn.recall(action.worker_id)
            case AddWorker() if self.scaling is not None:
                self.scaling.add(action)
            case CancelStart() if self.scaling is not None:
                self.scaling.cancel(action)
            case NotePlan():
                self._note_plan(action)
            case AskTwin() if self.answering is not None:
                self.answering.ask(action)
            case PublishBooking() if self.sync is not None:
                self.sync.send(action)
            case SetTimer():
                self._timers[action.name] = action.due_s
                put = self.clock.watch if action.background else self.call
                put(max(not_before(action.due_s), self.clock.now), _TIMER, lambda: self._fire(action))
            case Fence():
                self.post(WorkerFenced(at_s=self.clock.now, worker_id=action.worker_id, cause=action.cause))
            case Unfence():
                self.post(WorkerUnfenced(at_s=self.clock.now, worker_id=action.worker_id, cause=action.cause))
            case Probe() if self.canaries is not None:
                self.canaries.probe(action)
            case RequestIndexReplay() | RequestIndexDump():
                self.news.answer(action)
            case _:
                raise CapabilityError(f"the simulated world cannot perform {action!r} in this version")

    def _dispatch(self, action: Dispatch) -> None:
        now_s = self.clock._now
        request = self.open[action.request_id]
        worker = self.workers[action.worker_id]
        if request.dispatch_s is None:
            request.dispatch_s = now_s
        seq = self.sequence_for(request, action.leg, worker)
        shown = json.dumps([asdict(c) for c in action.candidates]) if action.candidates else None
        self._sinks.decisions.append(
            (
                now_s,
                request.row.row,
                action.request_id,
                action.worker_id,
                self._told_as[action.leg],
                action.rule,
                action.overlap_blocks,
                action.reason,
                shown,
            )
        )
        if action.leg is Leg.PREFILL:
            request.prefill_worker_id = action.worker_id
        else:
            request.worker_id = action.worker_id
        if action.leg is not Leg.AGG and request.handoff is None and self.handoffs is not None:
            request.handoff = self.handoffs.begin(request)
        if self.wires.parts or self.wires.paths:
            self.wires.send(FRONTEND, action.worker_id, lambda: self._reach(request, worker, seq))
        elif action.leg is Leg.AGG and not (self.churn.draining or self.churn.failing):
            refusal = worker.submit(seq)
            if refusal is not None:
                self._refuse(request, refusal)
        else:
            self._submit(request, worker, seq)
        if self.news.of_load and not request.closed:
            self.news.start_reports()

    def _reach(self, request: OpenRequest, worker: MockWorker, seq: EngineSequence) -> None:
        """A leg reaches its worker later than it was sent; it may be wanted no longer."""
        if self._whose(seq) is None:
            seq.phase = Phase.DONE
        else:
            self._submit(request, worker, seq)

    def _submit(self, request: OpenRequest, worker: MockWorker, seq: EngineSequence) -> None:
        """A leg enters its engine; the request ends where it is refused."""
        if (self.churn.draining or self.churn.failing) and self.churn.turns_away(request, worker, seq):
            return
        refusal = worker.submit(seq) if seq.leg is Leg.AGG else self._submit_leg(request, worker, seq)
        if refusal is not None:
            self._refuse(request, refusal)

    def sequence_for(self, request: OpenRequest, leg: Leg, worker: MockWorker) -> EngineSequence:
        """A leg of a request, dispatched now, in the blocks of a worker."""
        return request.leg(leg, self._trees[worker.up.block_size], self.clock.now, self.tree.block_size)

    def _note_queued(self, action: Enqueue) -> None:
        """The router keeps a request; nobody works on it."""
        request = self.open[action.request_id]
        row = request.row.row
        if self.block_tiers is not None:
            self.block_tiers.queued(request.request_id, request.path, request.row.isl, self.tree.block_size)
        queued = (self.clock.now, row, action.request_id, None, self._router, "queue", None, action.reason, None)
        self._sinks.decisions.append(queued)

    def _note_plan(self, action: NotePlan) -> None:
        """The record of a planner's tick."""
        for noted in self.on_plan:
            noted(self.clock.now, action)

    def _submit_leg(self, request: OpenRequest, worker: MockWorker, seq: EngineSequence) -> str | None:
        """One side of a hand-off; returns why it is refused."""
        if self.handoffs is None or request.handoff is None:
            raise CapabilityError(f"a {seq.leg.value} leg was dispatched in a run without hand-off between workers")
        if seq.leg is Leg.PREFILL:
            return self.handoffs.start_prefill(request.handoff, worker, seq)
        return self.handoffs.place_decode(request.handoff, worker, seq)

    def _refuse(self, request: OpenRequest, reason: str) -> None:
        """Nobody will run it: rejected, or failed when a leg of it has been computed already."""
        handoff = request.handoff
        status = "failed" if handoff is not None and handoff.held_s is not None else "rejected"
        self._let_go(request)
        self.end(request.request_id, status, reason)

    def _let_go(self, request: OpenRequest) -> None:
        """Both sides of its hand-off, if it has one, give back what they hold for it."""
        if request.handoff is not None and self.handoffs is not None:
            request.closed = True
            self.handoffs.cancel(request.handoff)

    def _close(self, request: OpenRequest, status: str, reason: str | None) -> None:
        self.end(request.request_id, status, reason)

    def _fire(self, action: SetTimer) -> None:
        if action.background and not self.goes_on:
            return  # nothing else will happen: there is nothing to watch for
        if self._timers.get(action.name) == action.due_s:
            del self._timers[action.name]
            self._post_informed(TimerFired(at_s=self.clock.now, name=action.name))

    def call(self, at_s: float, order: int, what: Callable[[], None]) -> None:
        """Let something happen at an instant, in its place among what happens then."""
        self.clock.call(at_s, order, what)

    # ------------------------------------------------------------ workers

    def start_worker(self, spec: WorkerSpec, epoch: int = 0) -> None:
        self.news.accounts.start(spec)
        if spec.path_s:
            self.wires.paths[spec.worker_id] = spec.path_s
        engine = build_engine(
            spec.settings,
            spec.latency,
            worker_id=spec.worker_id,
            record=self._sinks.steps.append,
            kv_events=self.news.tells_blocks(spec),
            leap_past_evictions=self.news.leaps_past_evictions,
        )
        up = WorkerUp(
            at_s=self.clock.now,
            worker_id=spec.worker_id,
            name=spec.name,
            role=spec.role,
            block_size=spec.settings.block_size,
            total_blocks=spec.settings.blocks * spec.settings.ranks,
            max_batched_tokens=spec.settings.max_num_batched_tokens * spec.settings.ranks,
            max_num_seqs=spec.settings.max_num_seqs * spec.settings.ranks,
            gpus=spec.gpus,
            epoch=epoch,
            loras=spec.loras,
            taints=spec.taints,
            on_cpu=spec.on_cpu,
            peers=spec.tiers.peers.layout if spec.tiers is not None and spec.tiers.peers is not None else None,
        )
        lane = self._host_lane(spec, engine)
        self.workers[spec.worker_id] = MockWorker(self.clock, engine, up, self._on_step, self.news.watch, lane)
        finds_blocks = spec.tiers is not None and spec.tiers.shares_host  # those that others of its node have stored
        if finds_blocks:
            self.news.start_over(self.workers[spec.worker_id])
        self.post(up)
        if finds_blocks:
            self.news.tell_all(self.workers[spec.worker_id])

    def _host_lane(self, spec: WorkerSpec, engine: Engine) -> HostLane | None:
        """What its loads from lower tiers cross."""
        if spec.tiers is not None:
            return self._tiers_of_run().lane(spec.worker_id, spec.tiers, engine)  # type: ignore[arg-type]
        if spec.settings.host is None:
            return None
        from twin.mocker.hostlanes import LinkLane, OwnLane

        if spec.host_lanes is None or self._network is None:
            return OwnLane(self.clock, spec.settings.host.load_bytes_per_s)
        return LinkLane(self._network, spec.host_lanes)

    def _tiers_of_run(self) -> Tiers:
        """The tiers below devices, once a worker has any."""
        if self.block_tiers is None:
            from twin.mocker.tiers import Tiers

            assert self._network is not None
            self.block_tiers = Tiers(
                self.clock, self._network, self.news, Reached(self), seed=self._seed, tenant_of=self._tenant_of
            )
        return self.block_tiers

    def _tenant_of(self, request_id: RequestId) -> str | None:
        request = self.open.get(request_id)
        return request.row.tenant if request is not None else None

    def _can_send(self, worker_id: WorkerId) -> bool:
        """Whether a worker is there and could send its weights to another one."""
        worker = self.workers.get(worker_id)
        there = worker is not None and not worker.down and not worker.hung
        return there and not self.partitions.is_cut_off(worker_id)

    def _on_step(self, worker: MockWorker, outcome: Outcome) -> None:
        pool = worker.engine.pool
        if pool.stored or pool.removed:
            self.news.post_blocks(worker)
        if self.wires.parts:
            self.news.hear(worker, lambda: self._hear(worker, outcome))
        elif outcome.firsts or outcome.ended:
            self._hear(worker, outcome)
        if self.handoffs is not None:
            self.handoffs.on_step(worker, outcome)
        if self.churn.draining:
            self.churn.on_freed(worker)

    def _note_step(self, worker: MockWorker, outcome: Outcome) -> None:
        """The same where somebody wants to know who was heard of when."""
        if self.canaries is not None and (outcome.firsts or outcome.ended or outcome.held):
            self.canaries.heard(worker, self.clock.now)
        self._hear_step(worker, outcome)

    def _hear_step(self, worker: MockWorker, outcome: Outcome) -> None:
        now_s = self.clock._now
        opened = self.open
        for seq in outcome.firsts:
            request = opened.get(seq.request_id)
            if request is None or (request.sequence is not seq and request.prefill is not seq):
                continue
            if request.carried:
                self.churn.on_continued(seq, worker)
            else:
                self.post(FirstToken(at_s=now_s, request_id=seq.request_id, worker_id=worker.worker_id))
        for seq in outcome.ended:
            request = opened.get(seq.request_id)
            if request is None or (request.sequence is not seq and request.prefill is not seq):
                continue
            if seq.finish_reason is None:
                self.end(seq.request_id, "completed", None)
                continue
            if request.handoff is not None and self.handoffs is not None:
                self.handoffs.cancel(request.handoff)  # a prompt that fails leaves no room taken for it elsewhere
            self.end(seq.request_id, "failed", seq.finish_reason)

    def _whose(self, seq: EngineSequence) -> OpenRequest | None:
        """The open request that a leg belongs to; None when it ended, or went on elsewhere, in the running step."""
        request = self.open.get(seq.request_id)
        return request if request is not None and (request.sequence is seq or request.prefill is seq) else None

    # ------------------------------------------------------------ ends

    def end(self, request_id: RequestId, status: str, reason: str | None) -> None:
        request = self.open.pop(request_id)
        request.closed = True
        if status == "rejected" and request.migrations:
            status = "failed"  # the client has been promised an answer before
        self.last_end_s = now_s = self.clock._now
        made = self._note(request, status, reason)
        worker_id = request.worker_id
        event: Event
        if status == "completed":
            answered = worker_id if request.sequence is not None else request.prefill_worker_id
            assert answered is not None
            if made < request.row.osl:
                self.cut_short += 1
            event = RequestFinished(at_s=now_s, request_id=request_id, worker_id=answered, output_tokens=made)
        elif status == "rejected":
            event = RequestRejected(at_s=now_s, request_id=request_id, reason=reason or "", worker_id=worker_id)
        elif status == "cancelled":
            event = RequestCancelled(at_s=now_s, request_id=request_id, worker_id=worker_id, output_tokens=made)
        else:
            event = RequestFailed(
                at_s=now_s, request_id=request_id, reason=reason or "", worker_id=worker_id, output_tokens=made
            )
        if status != "completed" and self.block_tiers is not None:
            self.block_tiers.left(request_id)
        if self.churn.touched:
            self.churn.on_end(request_id, status)
        self.post(event)
        if self.churn.draining:
            self.churn.check_drained()
        self._follow(request.row)

    def _note(self, request: OpenRequest, status: str, reason: str | None) -> int:
        """Hand the finished row to the record; returns how many tokens the client has."""
        row, seq, handoff = request.row, request.sequence, request.handoff
        admitted, first_s, last_s, made = request.told()
        held_s = activated_s = None
        if handoff is not None:
            held_s, activated_s = handoff.held_s, handoff.activated_s
        self._sinks.requests[row.row] = (
            row.row,
            row.request_id,
            row.session_id,
            request.arrival_s,
            row.isl,
            row.osl,
            status,
            reason,
            request.worker_id,
            request.prefill_worker_id,
            request.dispatch_s,
            admitted.admit_s if admitted is not None else None,
            first_s,
            last_s,
            made,
            admitted.cached_tokens if admitted is not None else None,
            request.readmissions + (seq.readmissions if seq is not None else 0),
            request.migrations,
            held_s,
            activated_s,
        )
        if admitted is not None and admitted.admit_s is not None:
            # every full prompt block of a first admission is looked up once and found in one tier at most
            size = self._one_size or self._size_of(request, admitted)
            self._lookup_blocks += admitted.prompt // size
            if admitted.cached_tokens:
                self._hit_blocks += admitted.cached_tokens // size
                self._host_hit_blocks += admitted.host_blocks
        if self._on_end is not None:
            self._on_end(request, status)
        if handoff is not None:
            request.handoff = None  # they hold each other, and no cycle is collected while a run goes on
        self.ended += 1
        if not self.ended & 1023:
            self._sinks.spill()
            if self._progress is not None:
                self._progress(self.ended)
        return made

    def note_gap(self, worker_id: WorkerId, last_s: float, now_s: float, count: int = 1) -> None:
        """Gaps between two tokens of a request that no engine knows of."""
        gap: Cells = (worker_id, "gap", last_s, now_s, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, count, now_s - last_s, 0.0, 0.0)
        self._sinks.steps.append(gap)

    def _size_of(self, request: OpenRequest, admitted: EngineSequence) -> int:
        """Tokens in a KV block of the worker that admitted a request."""
        worker_id = request.prefill_worker_id if admitted is request.prefill else request.worker_id
        assert worker_id is not None
        return self.specs[worker_id].settings.block_size

    @property
    def tiers(self) -> dict[str, int]:
        """Full prompt blocks at first admissions, by where they were found, and blocks loaded from the host."""
        if self.block_tiers is not None:
            return self.block_tiers.hit_blocks()
        return {
            "lookup_blocks": self._lookup_blocks,
            "g1_hit_blocks": self._hit_blocks - self._host_hit_blocks,
            "g2_hit_blocks": self._host_hit_blocks,
            "loaded_blocks": sum(worker.engine.loaded_blocks for worker in self.workers.values()),
        }

    def _where(self, request: OpenRequest) -> str:
        if request.worker_id is None:
            return "not dispatched"
        seq = request.sequence
        return f"worker {request.worker_id}, {seq.phase.value if seq is not None else 'unknown'}"


def _trees(workers: Sequence[WorkerSpec], key_tokens: int | None, *, one_size: bool) -> dict[int, ContentTree]:
    """Prompt content by block size, that of the first worker first. `one_size`: a policy compares blocks of workers
    with those of prompts, which means something only if they are equal.
    """
    trees: dict[int, ContentTree] = {}
    for spec in workers:
        size = spec.settings.block_size
        if size not in trees:
            if trees and one_size:
                raise ConfigError(
                    f"worker {spec.name} has KV blocks of {size} tokens and {workers[0].name} of "
                    f"{workers[0].settings.block_size}: a router that follows KV events cannot compare them; give all "
                    "groups one workers.engine.block_size, or take a router.mode that does not look at blocks"
                )
            trees[size] = ContentTree(key_tokens or size, size)
    return trees
