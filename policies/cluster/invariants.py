"""What must hold whatever the trace, the policies and the world: numbered, checked from outside.

`Invariants` watches the (event, actions) pairs of a run and keeps its own small account; nothing here asks the code
under watch whether it did right. A broken promise raises InvariantError with the rule, what was found and the story
of the request or worker. It must never change what it watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

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
from policies.cluster.events import (
    ENDS,
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    IndexLost,
    PeerBooking,
    PrefillDone,
    ProbeEnded,
    RequestArrived,
    RequestEvent,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestMigrated,
    RequestRejected,
    RouterRestarted,
    TimerFired,
    TokensEmitted,
    WorkerDraining,
    WorkerEvent,
    WorkerFenced,
    WorkerHeard,
    WorkerLost,
    WorkerRecalled,
    WorkerReported,
    WorkerUnfenced,
    WorkerUp,
)
from policies.cluster.ids import FenceCause, Leg, RequestId, WorkerId
from policies.cluster.invariants_scaling import ScalingAccount
from policies.cluster.kv_events import IndexAnswer
from policies.cluster.state import ClusterView
from policies.cluster.ticks import NotePlan
from policies.cluster.twin_asks import AskTwin
from policies.errors import InvariantError


class Rule(NamedTuple):
    """A promise: its number, what is promised, and what shows that it holds."""

    number: str
    statement: str
    evidence: str


CLOCK = Rule("I1", "The clock never goes back.", "at_s of each event against the one before it, in order of posting")
CAUSE = Rule("I2", "A report is known no earlier than it was measured.", "measured_s <= at_s of every WorkerReported")
LIFE = Rule(
    "I3",
    "A request arrives once, and nothing happens to it before it arrives or after it ends.",
    "every request event against the set of requests that arrived and did not end",
)
CONSERVED = Rule(
    "I4",
    "Arrived = open + completed + rejected + failed + cancelled.",
    "counts of arrivals and endings, against the requests that the view shows",
)
LIVE = Rule(
    "I5",
    "Work goes only to workers that are up, not draining and not fenced.",
    "every Dispatch against the workers that came up, minus those that drain, are fenced or are lost; a worker that is "
    "up comes up again only with a higher epoch, and has then lost what it had",
)
IN_FLIGHT = Rule(
    "I6",
    "A worker's in-flight count is the number of open dispatches to it, never below zero.",
    "dispatches and endings counted per worker, against the view",
)
ANSWERED = Rule(
    "I7",
    "Every action ends in exactly one terminal event.",
    "Dispatch: end or interruption of the request, or loss of the worker; Enqueue: a Dispatch or Reject of the "
    "request, its end or interruption; Reject: RequestRejected, or RequestFailed when the request had been sent "
    "before; Migrate: RequestMigrated; Fail: RequestFailed; Cancel: end of the request; "
    "DrainWorker: WorkerLost or WorkerRecalled; RecallWorker: either of these; AddWorker of a decision: "
    "WorkerStarting, and that WorkerUp, WorkerStartFailed or WorkerStartCancelled; CancelStart: one of these three; a "
    "decision: one ScaleDone or ScaleFailed; AskTwin: TwinAnswered (these four may be under way when the run ends); "
    "Fence and Unfence: their event or WorkerLost; Probe: ProbeEnded, WorkerHeard or WorkerLost; SetTimer: TimerFired "
    "or a later SetTimer of that name; "
    "RequestIndexReplay and RequestIndexDump: one IndexReplay, IndexDump or IndexRecoveryFailed of the same number, or "
    "loss of the worker, or of the index that asked (one may still be under way when the run ends)",
)
SOURCE = Rule(
    "I8",
    "Tokens of a request come from the worker that it was sent to.",
    "worker_id of FirstToken, TokensEmitted and RequestFinished against the open dispatch",
)
BLOCKS = Rule(
    "I9",
    "Every block of a pool is in exactly one place: free + private + active + inactive + reserved = total.",
    "the pool's own counts, each >= 0, added up",
)
DRAINED = Rule("I10", "A complete run leaves no request open.", "the set of open requests when the run is over")
ADAPTER = Rule(
    "I11",
    "A request goes only to workers that serve its adapter.",
    "lora of every RequestArrived against loras of the WorkerUp of each worker that it is dispatched to",
)

RULES = (CLOCK, CAUSE, LIFE, CONSERVED, LIVE, IN_FLIGHT, ANSWERED, SOURCE, BLOCKS, DRAINED, ADAPTER)


class _Ask(NamedTuple):
    """Which request to tell blocks again: of which rank and registration, by which router, its number."""

    dp_rank: int
    epoch: int
    origin: int
    ask: int


def _ask(of: RequestIndexReplay | RequestIndexDump | IndexAnswer) -> _Ask:
    return _Ask(of.dp_rank, of.epoch, of.origin, of.ask)


_STORY_PAIRS = 64
"""How many of the last (event, actions) pairs a story is told from."""


class _Told(NamedTuple):
    """News of blocks as a story tells them."""

    at_s: float
    worker_id: WorkerId
    text: str

    def __repr__(self) -> str:
        return self.text


def _without_content(event: Event) -> Event | _Told:
    """What a story needs of an event. How long content is kept decides how a run interns what comes next, and to check
    a run must not change it.
    """
    if isinstance(event, RequestArrived) and event.blocks is not None:
        return replace(event, blocks=None)
    if isinstance(event, PeerBooking):
        return replace(event, ops=())
    if isinstance(event, BlocksStored | BlocksRemoved):
        return _Told(event.at_s, event.worker_id, repr(event))
    return event


def check_blocks(free: int, private: int, active_cached: int, inactive: int, reserved: int, total: int) -> None:
    """Rule I9 for one pool, in blocks. Raises InvariantError with the counts."""
    parts = (free, private, active_cached, inactive, reserved)
    if sum(parts) != total or min(parts) < 0:
        raise broken(
            BLOCKS,
            f"{free} free + {private} private + {active_cached} active cached + {inactive} inactive + "
            f"{reserved} reserved = {sum(parts)} of {total} blocks",
        )


def check_conserved(arrived: int, open_requests: int, ended: int) -> None:
    """Rule I4 from counts alone; cheap enough for the end of every run. Raises InvariantError with the counts."""
    if arrived != open_requests + ended or open_requests < 0:
        raise broken(CONSERVED, f"{arrived} arrived, {open_requests} open, {ended} ended")


def broken(rule: Rule, found: str, story: str = "") -> InvariantError:
    """The error that says which promise was broken, by what, and what went before."""
    text = f"{rule.number}: {rule.statement} Found: {found}."
    return InvariantError(f"{text}\n{story}" if story else text)


class Invariants:
    """Watches one run: `observe` every pair in order, `audit` the view whenever wanted, `finish` at the end."""

    def __init__(self) -> None:
        self._now_s = float("-inf")
        self._arrived = 0
        self._ended = 0
        self._open: set[RequestId] = set()
        self._sent: dict[RequestId, WorkerId] = {}  # open dispatches to whoever answers
        self._prefills: dict[RequestId, WorkerId] = {}  # open dispatches of prefill legs
        self._computed: dict[RequestId, WorkerId] = {}  # whose prefill leg is or was where
        self._split: set[RequestId] = set()  # sent leg by leg
        self._on: dict[WorkerId, set[RequestId]] = {}  # the same by worker; a key per worker that is not lost
        self._epochs: dict[WorkerId, int] = {}
        self._loras: dict[RequestId, str] = {}  # open requests that need an adapter
        self._serves: dict[WorkerId, frozenset[str]] = {}  # workers that do not serve every adapter
        self._draining: set[WorkerId] = set()
        self._queued: set[RequestId] = set()
        self._again: set[RequestId] = set()  # waited in a router that was restarted, and may be queued once more
        self._rejects: set[RequestId] = set()
        self._cancels: set[RequestId] = set()
        self._interrupted: set[RequestId] = set()  # no order yet, or one that is not carried out yet
        self._migrates: dict[RequestId, int] = {}  # ordered attempts
        self._fails: set[RequestId] = set()
        self._attempts: dict[RequestId, int] = {}  # open requests that were sent again
        self._drains: set[WorkerId] = set()
        self._recalls: set[WorkerId] = set()
        self._fenced: dict[WorkerId, set[FenceCause]] = {}
        self._fencing: set[tuple[WorkerId, FenceCause, bool]] = set()  # ordered, and no event yet
        self._probed: dict[WorkerId, int] = {}  # probes under way, by epoch
        self._timers: dict[str, tuple[float, bool]] = {}
        self._asks: dict[WorkerId, set[_Ask]] = {}  # requests to tell blocks
        self._scaling = ScalingAccount(lambda found: broken(ANSWERED, found))
        self._past: deque[tuple[Event | _Told, tuple[Action, ...]]] = deque(maxlen=_STORY_PAIRS)

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        """Take in one step of the controller. Raises InvariantError at the first broken promise."""
        told = tuple(action for action in actions if not isinstance(action, PublishBooking | NotePlan))
        self._past.append((_without_content(event), told))
        if event.at_s < self._now_s:
            raise broken(CLOCK, f"{event!r} after {self._now_s} s")
        self._now_s = event.at_s
        if isinstance(event, RequestEvent):
            self._on_request(event)
        elif isinstance(event, WorkerEvent):
            self._on_worker(event)
        elif isinstance(event, RouterRestarted | IndexLost):
            self._on_forgotten(event)
        elif isinstance(event, TimerFired) and self._timers.pop(event.name, None) is None:
            raise broken(ANSWERED, f"{event!r}, a timer that nobody set or that fired before")
        self._scaling.on_event(event)
        for action in actions:
            self._on_action(action)

    def _on_forgotten(self, event: RouterRestarted | IndexLost) -> None:
        """A router knows no more what it had asked ranks for; one that was restarted, nor who waits in it."""
        if isinstance(event, RouterRestarted):
            self._again = set(self._queued)
        for asks in self._asks.values():
            asks -= {ask for ask in asks if ask.origin == event.router}

    def audit(self, view: ClusterView) -> None:
        """Compare the account with what policies are shown. Raises InvariantError where they differ."""
        check_conserved(self._arrived, len(view.requests), self._ended)
        if view.requests.keys() != self._open:
            raise broken(
                CONSERVED, f"open in the view only or in the account only: {view.requests.keys() ^ self._open}"
            )
        for worker_id, worker in view.workers.items():
            mine = len(self._on.get(worker_id, ()))
            if worker.in_flight != mine:
                raise broken(IN_FLIGHT, f"worker {worker_id} shows {worker.in_flight} in flight, {mine} are open")
        live = [worker.worker_id for worker in view.live]
        fenced = {worker_id for worker_id, causes in self._fenced.items() if causes}
        mine_live = sorted(self._on.keys() - self._draining - fenced)
        if live != mine_live:
            raise broken(LIVE, f"the view offers workers {live}, up and not draining are {mine_live}")

    def finish(self, *, partial: bool = False) -> None:
        """Check the end of a run; a `partial` run (stopped half-way) may leave requests and orders open."""
        check_conserved(self._arrived, len(self._open), self._ended)
        if partial:
            return
        if self._open:
            some = sorted(self._open)[:10]
            raise broken(DRAINED, f"{len(self._open)} requests open, among them {some}", self._story(some[0]))
        waiting = sorted(
            self._rejects | self._cancels | self._fails | self._queued | self._migrates.keys() | self._sent.keys()
        )
        if waiting:
            raise broken(ANSWERED, f"no terminal event for orders about requests {waiting[:10]}")
        if self._fencing:
            raise broken(ANSWERED, f"no terminal event for fences of workers {sorted({o[0] for o in self._fencing})}")
        overdue = sorted(name for name, (due_s, watches) in self._timers.items() if due_s < self._now_s and not watches)
        if overdue:
            raise broken(ANSWERED, f"timers {overdue} were due before the end at {self._now_s} s and did not fire")

    # ------------------------------------------------------------ events

    def _on_request(self, event: RequestEvent) -> None:
        request_id = event.request_id
        if isinstance(event, RequestArrived) and not isinstance(event, RequestMigrated):
            if request_id in self._open:
                raise broken(LIFE, f"{event!r}, which is open already", self._story(request_id))
            self._open.add(request_id)
            self._arrived += 1
            if event.lora:
                self._loras[request_id] = event.lora
            return
        if request_id not in self._open:
            raise broken(LIFE, f"{event!r}, which is not open", self._story(request_id))
        if isinstance(event, RequestInterrupted):
            self._on_interrupted(event)
        elif isinstance(event, RequestMigrated):
            self._on_migrated(event)
        elif isinstance(event, PrefillDone):
            self._on_prefilled(event)
        elif isinstance(event, FirstToken | TokensEmitted | RequestFinished):
            sent = (self._sent.get(request_id), self._computed.get(request_id))
            if event.worker_id not in sent:
                raise broken(SOURCE, f"{event!r}, sent to workers {sent}", self._story(request_id))
        if type(event) in ENDS:
            self._on_end(event)

    def _on_interrupted(self, event: RequestInterrupted) -> None:
        request_id = event.request_id
        if request_id in self._interrupted:
            raise broken(LIFE, f"{event!r}, which is interrupted already", self._story(request_id))
        self._queued.discard(request_id)
        if event.kept_on is None:
            self._let_go(request_id)
        else:
            self._lose_decode_leg(event)
        self._interrupted.add(request_id)

    def _on_prefilled(self, event: PrefillDone) -> None:
        """A prefill leg is over, or (of a request that was sent again whole) the prompt alone is."""
        request_id = event.request_id
        split = request_id in self._prefills
        worker_id = self._prefills.pop(request_id) if split else self._sent.get(request_id)
        if event.worker_id != worker_id:
            raise broken(SOURCE, f"{event!r}, prompt sent to worker {worker_id}", self._story(request_id))
        if split:
            self._on[event.worker_id].discard(request_id)

    def _lose_decode_leg(self, event: RequestInterrupted) -> None:
        """The leg that computes the prompt goes on where it is."""
        request_id = event.request_id
        if event.kept_on not in self._on or event.kept_on != self._computed.get(request_id):
            computed = self._computed.get(request_id)
            raise broken(SOURCE, f"{event!r}, prompt sent to worker {computed}", self._story(request_id))
        worker_id = self._sent.pop(request_id, None)
        if worker_id is not None:
            self._on[worker_id].discard(request_id)

    def _let_go(self, request_id: RequestId) -> None:
        """No worker has the request any more."""
        for legs in (self._sent, self._prefills):
            worker_id = legs.pop(request_id, None)
            if worker_id is not None:
                self._on[worker_id].discard(request_id)
        self._computed.pop(request_id, None)
        self._split.discard(request_id)

    def _on_migrated(self, event: RequestMigrated) -> None:
        request_id = event.request_id
        attempt = self._migrates.pop(request_id, None)
        if attempt != event.attempt:
            raise broken(ANSWERED, f"{event!r}, ordered was attempt {attempt}", self._story(request_id))
        self._interrupted.discard(request_id)
        self._attempts[request_id] = event.attempt

    def _on_end(self, event: RequestEvent) -> None:
        request_id = event.request_id
        begun = request_id in self._attempts or request_id in self._split
        answers = (RequestRejected, RequestFailed) if begun else (RequestRejected,)
        if request_id in self._rejects and not isinstance(event, answers):
            raise broken(ANSWERED, f"{event!r} answers a Reject", self._story(request_id))
        if request_id in self._fails and not isinstance(event, RequestFailed):
            raise broken(ANSWERED, f"{event!r} answers a Fail", self._story(request_id))
        self._interrupted.discard(request_id)
        self._migrates.pop(request_id, None)
        self._fails.discard(request_id)
        self._attempts.pop(request_id, None)
        self._open.discard(request_id)
        self._loras.pop(request_id, None)
        self._ended += 1
        self._rejects.discard(request_id)
        self._cancels.discard(request_id)
        self._queued.discard(request_id)
        self._let_go(request_id)

    def _on_worker(self, event: WorkerEvent) -> None:
        worker_id = event.worker_id
        match event:
            case WorkerReported() if event.measured_s > event.at_s:
                raise broken(CAUSE, f"{event!r}")
            case WorkerUp():
                if worker_id in self._on:
                    if event.epoch <= self._epochs[worker_id]:
                        raise broken(LIVE, f"{event!r}, which is up already", self._story(worker_id))
                    begun = {ask for ask in self._asks.get(worker_id, ()) if ask.epoch >= event.epoch}
                    self._drop(worker_id)
                    self._asks[worker_id] = begun  # its own events came before it
                self._on[worker_id] = set()
                self._epochs[worker_id] = event.epoch
                if event.loras is not None:
                    self._serves[worker_id] = frozenset(event.loras)
            case WorkerDraining():
                self._draining.add(worker_id)
            case WorkerRecalled():
                if worker_id not in self._draining:
                    raise broken(LIVE, f"{event!r}, which does not drain", self._story(worker_id))
                self._draining.discard(worker_id)
                self._drains.discard(worker_id)
                self._recalls.discard(worker_id)
            case WorkerFenced() | WorkerUnfenced():
                self._on_fence(event)
            case ProbeEnded() | WorkerHeard():
                if self._probed.pop(worker_id, None) is None:
                    raise broken(ANSWERED, f"{event!r}, and nobody asked", self._story(worker_id))
            case WorkerLost():
                self._drop(worker_id)
            case IndexAnswer():
                asks = self._asks.get(worker_id, set())
                ask = _ask(event)
                if ask not in asks:
                    raise broken(
                        ANSWERED, f"{event!r}, open for this worker are {sorted(asks)}", self._story(worker_id)
                    )
                asks.remove(ask)

    def _on_fence(self, event: WorkerFenced | WorkerUnfenced) -> None:
        fences, fenced = self._fenced.setdefault(event.worker_id, set()), isinstance(event, WorkerFenced)
        self._fencing.discard((event.worker_id, event.cause, fenced))
        if fenced:
            fences.add(event.cause)
        else:
            fences.discard(event.cause)

    def _drop(self, worker_id: WorkerId) -> None:
        """A worker is gone: its dispatches have ended, its requests have not."""
        self._draining.discard(worker_id)
        self._drains.discard(worker_id)
        self._recalls.discard(worker_id)
        self._fenced.pop(worker_id, None)
        self._fencing = {order for order in self._fencing if order[0] != worker_id}
        self._probed.pop(worker_id, None)
        self._epochs.pop(worker_id, None)
        self._serves.pop(worker_id, None)
        self._asks.pop(worker_id, None)
        for request_id in self._on.pop(worker_id, ()):
            for legs in (self._sent, self._prefills):
                if legs.get(request_id) == worker_id:
                    del legs[request_id]

    # ------------------------------------------------------------ actions

    def _on_action(self, action: Action) -> None:
        self._scaling.on_action(action)
        match action:
            case Dispatch():
                self._on_dispatch(action)
            case Reject():
                whole = action.request_id in self._sent and action.request_id not in self._split
                if action.request_id not in self._open or whole:
                    raise broken(LIFE, f"{action!r}, which is not open or already sent", self._story(action.request_id))
                if action.request_id in self._rejects:
                    raise broken(ANSWERED, f"{action!r}, twice", self._story(action.request_id))
                self._rejects.add(action.request_id)
                self._queued.discard(action.request_id)
            case Enqueue():
                self._on_enqueue(action)
            case Cancel():
                if action.request_id not in self._open:
                    raise broken(LIFE, f"{action!r}, which is not open", self._story(action.request_id))
                self._cancels.add(action.request_id)
            case Migrate() | Fail():
                self._on_order(action)
            case AddWorker() | CancelStart() | AskTwin():
                pass  # may still be under way when the run ends
            case PublishBooking() | NotePlan():
                pass  # nobody waits for it
            case DrainWorker():
                if action.worker_id not in self._on or action.worker_id in self._drains:
                    raise broken(LIVE, f"{action!r}, which is not up or drains already", self._story(action.worker_id))
                self._drains.add(action.worker_id)
            case RecallWorker():
                if action.worker_id not in self._draining:
                    raise broken(LIVE, f"{action!r}, which does not drain", self._story(action.worker_id))
                self._recalls.add(action.worker_id)
            case Fence() | Unfence():
                self._fencing.add((action.worker_id, action.cause, isinstance(action, Fence)))
            case Probe():
                if action.worker_id not in self._on or action.worker_id in self._probed:
                    raise broken(LIVE, f"{action!r}, which is gone or asked already", self._story(action.worker_id))
                self._probed[action.worker_id] = action.epoch
            case SetTimer():
                self._timers[action.name] = (action.due_s, action.background)
            case RequestIndexReplay() | RequestIndexDump():
                self._on_ask(action)
            case _:
                raise broken(ANSWERED, f"{type(action).__name__} has no terminal event; name one in {__name__}")

    def _on_ask(self, action: RequestIndexReplay | RequestIndexDump) -> None:
        """A request to have a rank's blocks told again; its number is used once."""
        asks = self._asks.setdefault(action.worker_id, set())
        ask = _ask(action)
        if action.worker_id not in self._on:
            raise broken(LIVE, f"{action!r}, and the worker is not up", self._story(action.worker_id))
        if ask in asks:
            raise broken(ANSWERED, f"{action!r}, and an earlier one of that number is open")
        asks.add(ask)

    def _on_order(self, action: Migrate | Fail) -> None:
        """An order about an interrupted request."""
        request_id = action.request_id
        if request_id not in self._interrupted:
            raise broken(LIFE, f"{action!r}, which is not interrupted", self._story(request_id))
        if request_id in self._migrates or request_id in self._fails:
            raise broken(ANSWERED, f"{action!r}, and an earlier order is open", self._story(request_id))
        if isinstance(action, Fail):
            self._fails.add(request_id)
        elif action.attempt != self._attempts.get(request_id, 0) + 1:
            raise broken(
                LIFE, f"{action!r}, sent again {self._attempts.get(request_id, 0)} times", self._story(request_id)
            )
        else:
            self._migrates[request_id] = action.attempt

    def _on_enqueue(self, action: Enqueue) -> None:
        """A request that no worker has, or its prefill leg, is to wait."""
        request_id = action.request_id
        whole = request_id in self._sent and request_id not in self._split
        if request_id not in self._open or request_id in self._rejects or request_id in self._interrupted or whole:
            raise broken(LIFE, f"{action!r}, which is not open, or sent or refused", self._story(request_id))
        if request_id in self._again:
            self._again.discard(request_id)
            self._queued.discard(request_id)
        if request_id in self._queued or request_id in self._prefills:
            raise broken(ANSWERED, f"{action!r}, and an earlier Enqueue or Dispatch is open", self._story(request_id))
        self._queued.add(request_id)

    def _on_dispatch(self, action: Dispatch) -> None:
        request_id, worker_id = action.request_id, action.worker_id
        self._queued.discard(request_id)
        if request_id in self._interrupted:
            raise broken(LIFE, f"{action!r}, which is interrupted", self._story(request_id))
        if worker_id not in self._on or worker_id in self._draining or self._fenced.get(worker_id):
            state = "draining" if worker_id in self._draining else "fenced" if worker_id in self._on else "not up"
            raise broken(LIVE, f"{action!r}, and the worker is {state}", self._story(worker_id))
        if request_id not in self._open or request_id in self._rejects:
            raise broken(LIFE, f"{action!r}, which is not open or already refused", self._story(request_id))
        lora, serves = self._loras.get(request_id), self._serves.get(worker_id)
        if lora is not None and serves is not None and lora not in serves:
            found = f"{action!r}, which needs adapter {lora!r}, and the worker serves {sorted(serves)}"
            raise broken(ADAPTER, found, self._story(request_id))
        legs = self._prefills if action.leg is Leg.PREFILL else self._sent
        if request_id in legs:
            raise broken(ANSWERED, f"{action!r}, and an earlier Dispatch is open", self._story(request_id))
        legs[request_id] = worker_id
        if action.leg is not Leg.AGG:
            self._split.add(request_id)
        if action.leg is Leg.PREFILL:
            self._computed[request_id] = worker_id
        self._on[worker_id].add(request_id)

    def _story(self, key: RequestId | WorkerId) -> str:
        """The last pairs that name a request or a worker, oldest first."""
        lines = []
        for event, actions in self._past:
            told = [
                thing
                for thing in (event, *actions)
                if key in (getattr(thing, "request_id", None), getattr(thing, "worker_id", None))
            ]
            lines += [f"  {event.at_s} s: {thing!r}" for thing in told]
        return "\n".join(lines)
