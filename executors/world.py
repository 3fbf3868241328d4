"""The live world: an asyncio shell around the controller. Events in by one queue, one consumer; orders out to tasks.

It owns the promise that every action ends in exactly one terminal event, whatever becomes of processes, networks and
clients: deadlines are its own, never an engine's. It decides nothing. Time, order and content are handed in, so the
same world runs on a host and, with mock engines under a virtual clock, beside the simulated one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from executors.backend import Ask, End, Outcome
from executors.clock import Clock, Order, Timer
from executors.connectors.scaling import Scaling
from executors.deadlines import USUAL, Deadlines
from executors.fleet import Fleet
from executors.leases import LeaseLedger, LeaseTerms
from executors.legs import Legs
from executors.live_worker import LiveWorker
from executors.requests import Content, OpenRequest, Stream
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
    BlocksStored,
    Event,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestMigrated,
    RequestRejected,
    TimerFired,
    WorkerFenced,
    WorkerUnfenced,
)
from policies.cluster.ids import LossCause, RequestId, WorkerId
from policies.cluster.kv_events import KvStored
from policies.cluster.ticks import NotePlan
from policies.errors import CapabilityError
from policies.resilience.carry import carry
from twin.engine.ticks import not_before

KEPT_DECISIONS = 1000


class Watch:
    """Is told what happens to requests, and changes nothing; this one keeps nothing."""

    def arrived(self, request: OpenRequest) -> None:
        """A request was taken."""

    def ordered(self, request: OpenRequest, action: Dispatch | Reject | Enqueue, at_s: float) -> None:
        """A decision about it."""

    def tokens(self, request: OpenRequest, worker_id: WorkerId, count: int, at_s: float) -> None:
        """The client is about to be given `count` tokens."""

    def ended(self, request: OpenRequest, end: End) -> None:
        """Its one end."""


class LiveWorld:
    """Serves requests on the workers of `fleet` as `controller` orders.

    `tree` interns prompts in the router's block size; with `hashes` a prompt's content is read from its tokens.
    `lease` is how long prefill workers keep KV that nobody fetched (None: for as long as we want). `peers` publishes
    bookings to other routers; `watch` is told of everything that a record wants.
    """

    def __init__(
        self,
        controller: Controller,
        clock: Clock,
        tree: ContentTree,
        *,
        deadlines: Deadlines = USUAL,
        hashes: bool = True,
        lease: LeaseTerms | None = None,
        peers: Callable[[PublishBooking], None] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.controller = controller
        self.clock = clock
        self.tree = tree
        self.open: dict[RequestId, OpenRequest] = {}
        self.fleet = Fleet(self)
        self.scaling = Scaling(self)
        self.decided: deque[tuple[float, Action]] = deque(maxlen=KEPT_DECISIONS)
        self.refusing: str | None = None  # why nothing new is taken
        self._hashes = hashes
        self.ledger = LeaseLedger()
        self._peers = peers
        self.watching = watch or Watch()
        self._events: deque[Event] = deque()
        self._pumping = False
        self._timers: dict[str, Timer] = {}
        self._deadlines: dict[RequestId, Timer] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.legs = Legs(self, deadlines, lease)
        self.reads_blocks = any(map(controller.wants, (BlocksStored, KvStored)))

    # ------------------------------------------------------------ events in

    def post(self, event: Event) -> None:
        """Something happened. Events are taken one after the other, each with all that is ordered for it."""
        self._events.append(event)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._events:
                for action in self.controller.step(self._events.popleft()):
                    self._perform(action)
        finally:
            self._pumping = False

    def submit(self, ask: Ask) -> Stream:
        """Take a request. See `backend.Backend`."""
        now_s = self.clock.now()
        stream = Stream(lambda reason: self.cancel(ask.request_id, reason))
        if self.refusing is not None:
            stream.close(End(outcome="rejected", output_tokens=0, reason=self.refusing, code="draining"))
            return stream
        request = OpenRequest(ask, now_s, stream, Content(self.tree, ask, hashes=self._hashes))
        self.open[ask.request_id] = request
        self.watching.arrived(request)
        if ask.total_s is not None:
            self._deadlines[ask.request_id] = self.clock.call_at(
                now_s + ask.total_s, Order.TIMER, lambda: self._too_late(request)
            )
        self.post(
            RequestArrived(
                at_s=now_s,
                request_id=ask.request_id,
                isl=request.isl,
                blocks=request.content.path,
                max_tokens=ask.max_tokens,
                priority=ask.priority,
                session_id=ask.session_id,
                lora=ask.lora,
                worker_hint=ask.worker_hint,
                tenant=ask.tenant,
                hints=ask.hints,
                traits=ask.traits,
                local_hashes=request.content.local,
            )
        )
        return stream

    def cancel(self, request_id: RequestId, reason: str = "the client left") -> None:
        """Nobody waits for a request any more: it ends now, and its legs are stopped."""
        request = self.open.get(request_id)
        if request is not None:
            self.legs.stop(request)
            self.end(request, "cancelled", reason, "client")

    def _too_late(self, request: OpenRequest) -> None:
        if not request.closed:
            self.legs.stop(request)
            self.end(request, "failed", "the request's own time is over", "deadline_exceeded")

    # ------------------------------------------------------------ orders out

    def _perform(self, action: Action) -> None:
        match action:
            case Dispatch():
                self._decide(action)
                self.legs.dispatch(action)
            case Reject():
                self._decide(action)
                request = self.open[action.request_id]
                request.retry_after_s = action.retry_after_s
                self.end(request, "rejected", action.reason, action.code)
            case Enqueue():
                self._decide(action)
            case Migrate():
                self._migrate(action)
            case Fail():
                request = self.open[action.request_id]
                self.legs.stop(request)
                self.end(request, "failed", action.reason, action.code)
            case Cancel():
                self.cancel(action.request_id, action.reason)
            case SetTimer():
                self._set_timer(action)
            case Fence():
                self.post(WorkerFenced(at_s=self.clock.now(), worker_id=action.worker_id, cause=action.cause))
            case Unfence():
                self.post(WorkerUnfenced(at_s=self.clock.now(), worker_id=action.worker_id, cause=action.cause))
            case AddWorker():
                self.scaling.add(action)
            case DrainWorker():
                self.scaling.drain(action)
            case CancelStart():
                self.scaling.cancel(action)
            case RecallWorker():
                self.scaling.recall(action)
            case NotePlan():
                self.scaling.advise(action.tick)
            case Probe():
                self.fleet.probe(action)
            case RequestIndexReplay() | RequestIndexDump():
                self.fleet.ask_index(action)
            case PublishBooking() if self._peers is not None:
                self._peers(action)
            case _:
                raise CapabilityError(f"the live world cannot perform {action!r} in this version")

    def _decide(self, action: Dispatch | Reject | Enqueue) -> None:
        """Keep an order about a request, for whoever asks why."""
        now_s = self.clock.now()
        self.decided.append((now_s, action))
        self.watching.ordered(self.open[action.request_id], action, now_s)

    def _set_timer(self, action: SetTimer) -> None:
        known = self._timers.pop(action.name, None)
        if known is not None:
            known.cancel()
        at_s = max(not_before(action.due_s), self.clock.now())
        self._timers[action.name] = self.clock.call_at(at_s, Order.TIMER, lambda: self._fire(action.name))

    def _fire(self, name: str) -> None:
        del self._timers[name]
        self.post(TimerFired(at_s=self.clock.now(), name=name))

    def distrust(self, worker: LiveWorker) -> None:
        """KV was fetched from this worker after it had let go of it, and may be that of another prompt: whoever may
        have it is told no further token."""
        reason = f"worker {worker.up.name} had let go of the KV that this answer was made from"
        for lease in self.ledger.suspects(worker.worker_id, worker.up.epoch):
            request = self.open.get(lease.request_id)
            if request is not None:
                self.legs.stop(request)
                self.end(request, "failed", reason, "stale_kv")

    # ------------------------------------------------------------ requests that go on elsewhere

    def interrupt(self, request: OpenRequest, worker_id: Any, reason: str, cause: LossCause) -> None:
        """What was under way for a request is lost; the policies say what becomes of it."""
        self.legs.stop(request)
        request.carried = len(request.emitted)
        request.handoff = {}
        request.content.carry(request.ask, request.prompt())
        self.post(
            RequestInterrupted(
                at_s=self.clock.now(),
                request_id=request.ask.request_id,
                worker_id=worker_id,
                emitted_tokens=request.carried,
                reason=reason,
                cause=cause,
            )
        )

    def _migrate(self, action: Migrate) -> None:
        request = self.open[action.request_id]
        ask = request.ask
        request.migrations += 1
        carried = carry(len(ask.token_ids), ask.max_tokens, request.carried)
        self.post(
            RequestMigrated(
                at_s=self.clock.now(),
                request_id=action.request_id,
                isl=carried.isl,
                blocks=request.content.path,
                max_tokens=carried.max_tokens,
                priority=ask.priority,
                session_id=ask.session_id,
                lora=ask.lora,
                tenant=ask.tenant,
                hints=ask.hints,
                attempt=action.attempt,
                emitted_tokens=carried.emitted_tokens,
                traits=ask.traits,
                excluded=action.excluded,
                local_hashes=request.content.local,
            )
        )

    # ------------------------------------------------------------ ends

    def end(self, request: OpenRequest, outcome: Outcome, reason: str, code: str) -> None:
        """The one end of a request."""
        request_id, now_s = request.ask.request_id, self.clock.now()
        request.closed = True
        del self.open[request_id]
        deadline = self._deadlines.pop(request_id, None)
        if deadline is not None:
            deadline.cancel()
        made, worker_id = len(request.emitted), request.worker_id
        if outcome == "rejected" and request.migrations:
            outcome = "failed"  # the client has been promised an answer before
        end = self._told(request, outcome, reason, code, now_s)
        request.stream.close(end)
        self.watching.ended(request, end)
        event: Event
        if outcome in ("stop", "length"):
            assert worker_id is not None
            event = RequestFinished(at_s=now_s, request_id=request_id, worker_id=worker_id, output_tokens=made)
        elif outcome == "rejected":
            event = RequestRejected(at_s=now_s, request_id=request_id, reason=reason, worker_id=worker_id)
        elif outcome == "cancelled":
            event = RequestCancelled(at_s=now_s, request_id=request_id, worker_id=worker_id, output_tokens=made)
        else:
            event = RequestFailed(
                at_s=now_s, request_id=request_id, reason=reason, worker_id=worker_id, output_tokens=made
            )
        self.post(event)
        self.fleet.check_drained()

    def _told(self, request: OpenRequest, outcome: Outcome, reason: str, code: str, now_s: float) -> End:
        first_s, dispatch_s = request.first_token_s, request.dispatch_s
        timing = {"total_s": now_s - request.arrival_s}
        if dispatch_s is not None:
            timing["queue_s"] = dispatch_s - request.arrival_s
        if first_s is not None:
            timing["ttft_s"] = first_s - request.arrival_s
            timing["prefill_s"] = first_s - (dispatch_s if dispatch_s is not None else request.arrival_s)
        return End(
            outcome=outcome,
            output_tokens=len(request.emitted),
            reason=reason,
            code=code,
            retry_after_s=request.retry_after_s,
            cached_tokens=request.cached_tokens,
            migrations=request.migrations,
            timing=timing,
            worker=self.fleet.name_of(request.worker_id),
            prefill_worker=self.fleet.name_of(request.prefill_worker_id),
        )

    # ------------------------------------------------------------ tasks

    def spawn(self, what: Any) -> asyncio.Task[Any]:
        """A task of the world's, which nobody else has to hold."""
        task = asyncio.get_running_loop().create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failed(task.exception())

    def failed(self, error: BaseException | None) -> None:
        """A task of ours broke: a bug. Whoever runs the world may put something else here."""
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a task of the live world failed", "exception": error}
        )

    async def close(self) -> None:
        """Cancel what is open, stop the tasks, let go of the workers."""
        legs = [leg.task for request in self.open.values() for leg in request.legs.values() if leg.task is not None]
        for request_id in list(self.open):
            self.cancel(request_id, "the server is shutting down")
        await asyncio.gather(*legs, return_exceptions=True)  # engines are told while we can reach them
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await self.scaling.close()
        await self.fleet.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
