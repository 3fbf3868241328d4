"""What every mode of the router shares: who may get a request, pins, sessions, refusals, explanations, counters.

A subclass says how to choose among the workers that may get it (`_choose`), and may keep books (`_learn`, `_sent`) and
explain itself (`_explain`). It must never choose a worker that is not in the list that it is given. What is not asked
for (limits on load, sessions, taints) is not looked at: a plain router pays for none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from policies.cluster.actions import Action, Candidate, Dispatch, Reject
from policies.cluster.blocks import BlockPath
from policies.cluster.events import (
    ENDS,
    BusyThresholdsChanged,
    Event,
    FirstToken,
    PrefillDone,
    RequestArrived,
    RequestEvent,
    RequestInterrupted,
    RequestMigrated,
    RequestRejected,
    WorkerLost,
    WorkerUp,
)
from policies.cluster.ids import Leg, Place, RankId, RequestId, Role, WorkerId
from policies.cluster.state import ClusterView, WorkerView
from policies.router.books import Books, DecayingBooks
from policies.router.select import BUSY, ENGINE, Bar, Refusal, lacks, unfit, why_not
from policies.router.settings import RouterSettings

if TYPE_CHECKING:
    from policies.router.affinity import Affinity
    from policies.router.backlog import Pace, Work
    from policies.router.overload import Overload

NO_ENDPOINTS = "no_endpoints"
ALL_FENCED = "all_fenced"
"""The codes of a refusal because no worker takes new work: there is none, or all who could are leaving."""

NOBODY: frozenset[WorkerId] = frozenset()

_ACCOUNTED: frozenset[type[Event]] = frozenset({PrefillDone, FirstToken, RequestInterrupted, *ENDS})
"""What limits on load and sessions must hear of, beside arrivals, and workers that come and go."""


class Choice(NamedTuple):
    """One of the live workers (`at` is its index), what decided (`rule`) and a text for the log. `dp_rank` is the rank
    that it is to run on (None: the worker chooses)."""

    at: int
    rule: str
    reason: str
    overlap_blocks: int = 0
    dp_rank: int | None = None


class Router:
    """A routing policy: one Dispatch or Reject for every request, at once."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived, RequestMigrated, WorkerUp, WorkerLost})
    keeps_books: ClassVar[bool] = False
    """Whether the mode fills `_books` itself."""
    timeless: ClassVar[bool] = False
    """Whether `_choose`, `_sent` and `_explain` never look at when an arrival was. Each class says so for itself."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self._explains = settings.explain
        self._role: Role | None = None
        self._leg = Leg.AGG
        self._last_up: WorkerId | None = None  # ids are given out in order: lower ones are there, or were
        self._decisions = 0
        self._refusals: dict[str, int] = {}
        self._overload = _overload(settings)
        self._affinity = _affinity(settings)
        self._guarded = bool(settings.required_taints) or self._overload is not None
        needs_books = settings.busy is not None or settings.queue is not None
        self._books = _books(settings) if needs_books or self.keeps_books else None
        self._accounts = needs_books and not self.keeps_books
        self._pace = _pace() if needs_books else None
        self._tracks = needs_books or self._affinity is not None or isinstance(self._books, DecayingBooks)
        if self._tracks:
            more = {BusyThresholdsChanged} if self._overload is not None else frozenset()
            self.subscribes = type(self).subscribes | _ACCOUNTED | more  # type: ignore[misc]

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        if isinstance(event, RequestArrived):
            return (self._route(event, view),)
        if isinstance(event, WorkerUp):
            self._last_up = max(event.worker_id, self._last_up or event.worker_id)
        if self._tracks:
            self._track(event)
        return self._learn(event) or ()

    def counters(self) -> dict[str, int]:
        """Counts for the report: `decisions`, `rejected_<code>`, and those of the mode."""
        counts = {"decisions": self._decisions} | {f"rejected_{code}": n for code, n in sorted(self._refusals.items())}
        if self._overload is not None:
            counts["unknown_totals"] = self._overload.unknown_totals
        if self._affinity is not None:
            affinity = self._affinity
            counts |= {"sessions_rebound": affinity.rebound, "sessions_dropped": affinity.dropped}
        return counts

    def serve(self, role: Role, leg: Leg) -> None:
        """Choose among the workers of one role only, for one leg of requests."""
        self._role = role
        self._leg = leg

    def send(self, event: RequestArrived, view: ClusterView) -> Iterable[Action]:
        """Orders for one request (or this router's leg of it) that arrives now."""
        return (self._route(event, view),)

    def route(self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY) -> Dispatch | Reject:
        """Where one request (or this router's leg of it) goes now: to none of the `busy`."""
        return self._route(event, view, busy)

    def best_overlap(
        self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY
    ) -> tuple[WorkerId | None, int]:
        """The eligible worker that has most leading blocks of the prompt (of several the lowest id), and how many."""
        return self.best_of(event, self._eligible(event, view, busy))

    def best_of(self, event: RequestArrived, workers: Iterable[WorkerView]) -> tuple[WorkerId | None, int]:
        """The one of `workers` that has most leading blocks of the prompt (of several the first), and how many."""
        best, most = None, 0
        for worker in workers:
            blocks = self._overlap_blocks(event, worker.up.worker_id)
            if blocks > most:
                best, most = worker.up.worker_id, blocks
        return best, most

    def leg_over(self, request_id: RequestId, at_s: float) -> Sequence[Action]:
        """This router's leg of a request is done; the request goes on elsewhere."""
        self._now(at_s)
        if self._books is not None:
            if self._pace is not None:
                self._pace.over(request_id, at_s, self._books)
            self._books.free(request_id)
        if self._affinity is not None:
            self._affinity.over(request_id, at_s)
        return ()

    def lose_index(self, view: ClusterView, at_s: float) -> Iterable[Action]:
        """What this mode knew of caches is lost; orders that bring it back."""
        return ()

    def withdraw(self, request_id: RequestId) -> None:
        """A request that this router may still hold is to go nowhere."""

    @property
    def reads_time(self) -> bool:
        """Whether it matters to a decision when it is made (`event.at_s`): a leg is then decided at its own time, on
        a copy of the arrival."""
        return self._tracks or self._guarded or not vars(type(self)).get("timeless", False)

    @property
    def is_guarded(self) -> bool:
        """Whether load or taints may keep every request from a worker that is there."""
        return self._guarded

    def has_any(self, event: RequestArrived, view: ClusterView) -> bool:
        """Whether any worker may have this router's leg of a request, whatever it is pinned to."""
        return bool(self._eligible(event, view))

    # ------------------------------------------------------------ for the queue

    def targets(self, event: RequestArrived, view: ClusterView) -> tuple[WorkerView, ...]:
        """The workers that a request may go to now, where it is pinned or bound that one alone."""
        live = self._eligible(event, view)
        only = self._only(event, view)
        return live if only is None else tuple(worker for worker in live if worker.up.worker_id == only)

    def waits_for_load(self, event: RequestArrived, view: ClusterView) -> bool:
        """Whether load alone keeps a request from some worker."""
        only = self._only(event, view)
        return any(
            self._overloaded(worker, event.at_s) is not None and why_not(worker, event, self._taints) is None
            for worker in view.workers.values()
            if self._fits(worker) and only in (None, worker.worker_id)
        )

    def prefill_tokens(self, worker_id: WorkerId, at_s: float) -> float:
        """Prompt tokens that were dispatched to a worker and are not computed, by our own books."""
        assert self._books is not None
        self._now(at_s)
        return self._books.prefill_tokens(worker_id)

    def calm_s(self, worker: WorkerView, at_s: float, limits_tokens: Iterable[float]) -> float | None:
        """When a worker's prompt tokens next fall to one of these limits, or of those on its load, with time alone;
        None: they do not."""
        books = self._books
        if not isinstance(books, DecayingBooks):
            return None
        own = self._overload.prefill_limits(worker, self.ranks_of(worker)) if self._overload is not None else ()
        limits, places = (*limits_tokens, *own), self._places(worker.worker_id)
        falls = (books.falls_s(place, at_s, limit) for limit in limits for place in places)
        return min((due_s for due_s in falls if due_s is not None), default=None)

    def count_waiting(self, waits: Callable[[], Work]) -> None:
        """A queue stands in front of this router: what waits there is ahead of whoever is refused."""
        assert self._pace is not None
        self._pace.waiting = waits

    def ranks_of(self, worker: WorkerView) -> int:
        """Into how many places a worker is told apart, each with its share of what the worker has."""
        return len(self._places(worker.worker_id))

    def _places(self, worker_id: WorkerId) -> Sequence[Place]:
        """What a worker is to this mode: one place to send requests to, or several."""
        return (worker_id,)

    def refuse(self, request_id: RequestId, refusal: Refusal, at_s: float) -> Reject:
        """The order that says so, counted; where load is the reason, with a time to come again."""
        self._refusals[refusal.code] = self._refusals.get(refusal.code, 0) + 1
        again_s = None
        if refusal.by_prompts is not None and self._pace is not None and self._books is not None:
            again_s = self._pace.retry_after_s(at_s, self._books, by_prompts=refusal.by_prompts)
        return Reject(request_id=request_id, code=refusal.code, reason=refusal.reason, retry_after_s=again_s)

    def peer_sent(self, event: RequestArrived, place: Place, overlap_blocks: int, leg: Leg = Leg.AGG) -> None:
        """Another router sent a request to a worker: it is booked as if this one had. Its end comes like any other."""
        self._now(event.at_s)
        self._sent(event, place, overlap_blocks)
        if self._accounts:
            self._book(event, place, overlap_blocks)
        if self._pace is not None:
            self._pace.begin(event.at_s)

    # ------------------------------------------------------------ for modes

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice | Refusal:
        """One of `live`, which is sorted by id and not empty."""
        raise NotImplementedError

    def _learn(self, event: Event) -> Sequence[Action] | None:
        """Take in a subscribed event that is not an arrival; what must be ordered for it, if anything."""

    def _overlap_blocks(self, event: RequestArrived, place: Place) -> int:
        """Blocks of the prompt that a worker has cached, as far as this mode knows."""
        return 0

    def _sent(self, event: RequestArrived, place: Place, overlap_blocks: int) -> None:
        """The request goes to this worker, or this rank of it."""

    def _explain(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> list[Candidate]:
        """The live workers as this mode saw them when it chose; asked before `_sent`."""
        return [Candidate(worker_id=worker.worker_id, in_flight=worker.in_flight) for worker in live]

    # ------------------------------------------------------------ books

    def _now(self, at_s: float) -> None:
        if isinstance(self._books, DecayingBooks):
            self._books.now_s = at_s

    def _track(self, event: Event) -> None:
        """What load and sessions must know of an event that is no arrival."""
        self._now(event.at_s)
        if isinstance(event, BusyThresholdsChanged):
            assert self._overload is not None
            self._overload.limits = self._overload.limits.changed(event)
            return
        if self._affinity is not None:
            self._track_sessions(self._affinity, event)
        if self._pace is not None and self._books is not None:
            self._pace.note(event, self._books)
        if self._accounts and self._books is not None:
            self._account(self._books, event)

    @staticmethod
    def _track_sessions(affinity: Affinity, event: Event) -> None:
        if isinstance(event, WorkerLost | WorkerUp):
            affinity.lose(event.worker_id)
        elif isinstance(event, RequestInterrupted) or type(event) in ENDS:
            assert isinstance(event, RequestEvent)
            affinity.over(event.request_id, event.at_s, refused=isinstance(event, RequestRejected))

    @staticmethod
    def _account(books: Books, event: Event) -> None:
        if isinstance(event, PrefillDone | FirstToken):
            books.prefill_done(event.request_id)
        elif isinstance(event, RequestInterrupted):
            books.interrupt(event.request_id)
        elif isinstance(event, RequestEvent):
            if type(event) in ENDS and event.request_id in books:
                books.free(event.request_id)
        elif isinstance(event, WorkerLost | WorkerUp):
            books.lose(event.worker_id)

    def _book(self, event: RequestArrived, place: Place, overlap_blocks: int) -> None:
        """Note what a request brings to its worker, or to its rank."""
        settings, path, own_blocks = self.settings, None, 0
        if settings.track_active_blocks:
            path = self._shared_path(event)
            own_blocks = event.isl // settings.block_size if path is None else 0
        prefill_tokens = event.isl - overlap_blocks * settings.block_size if settings.track_prefill_tokens else 0
        assert self._books is not None
        self._books.book(event.request_id, place, path, own_blocks, prefill_tokens)

    def _shared_path(self, event: RequestArrived) -> BlockPath | None:
        """The blocks that open requests can share with this one; None when there is no telling, or no sharing."""
        return event.blocks if self.settings.assume_kv_reuse else None

    # ------------------------------------------------------------ one decision

    def _route(self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY) -> Dispatch | Reject:
        tracks = self._tracks
        if tracks:
            self._now(event.at_s)
        live = self._eligible(event, view, busy)
        choice: Choice | Refusal
        if event.worker_hint is not None:
            choice = self._pinned(event, live, view)
        elif tracks or event.hints is not None:
            choice = self._preferring(event, live, view)
        else:
            choice = self._free(event, live, view)
        if isinstance(choice, Refusal):
            return self.refuse(event.request_id, choice, event.at_s)
        worker_id, dp_rank = live[choice.at].up.worker_id, choice.dp_rank
        candidates = self._candidates(event, live, view, busy) if self._explains else ()
        self._decisions += 1
        self._sent(event, worker_id if dp_rank is None else RankId(worker_id, dp_rank), choice.overlap_blocks)
        if tracks:
            self._track_sent(event, worker_id, choice.overlap_blocks)
        return Dispatch(
            request_id=event.request_id,
            worker_id=worker_id,
            rule=choice.rule,
            leg=self._leg,
            reason=choice.reason,
            overlap_blocks=choice.overlap_blocks,
            candidates=candidates,
            dp_rank=dp_rank,
        )

    def _track_sent(self, event: RequestArrived, worker_id: WorkerId, overlap_blocks: int) -> None:
        if self._pace is not None:
            self._pace.begin(event.at_s)
        if self._accounts:
            self._book(event, worker_id, overlap_blocks)
        if self._affinity is not None:
            self._affinity.sent(event.request_id, event.session_id, worker_id)

    @property
    def _taints(self) -> tuple[str, ...]:
        return self.settings.required_taints

    def _eligible(
        self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY
    ) -> tuple[WorkerView, ...]:
        """The live workers that this leg of the request may go to, by id."""
        live = view.live_for(event.lora, self._role)
        if type(event) is RequestMigrated and event.excluded:
            busy = busy | frozenset(event.excluded)
        if busy:
            live = tuple(worker for worker in live if worker.worker_id not in busy)
        return self._admitted(event, live) if self._guarded or event.hints is not None else live

    def _admitted(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> tuple[WorkerView, ...]:
        """Those of the live workers that nothing keeps from a request; the same tuple where that is all of them."""
        kept = tuple(
            worker
            for worker in live
            if why_not(worker, event, self._taints) is None and self._overloaded(worker, event.at_s) is None
        )
        return live if len(kept) == len(live) else kept

    def _overloaded(self, worker: WorkerView, at_s: float) -> Bar | None:
        if self._overload is None:
            return None
        assert self._books is not None
        worker_id = worker.worker_id
        load = self._books.loads.get(worker_id)
        blocks, tokens = (load.blocks, self.prefill_tokens(worker_id, at_s)) if load is not None else (0, 0.0)
        return self._overload.of(worker, blocks, tokens)

    def _bar(self, worker: WorkerView, event: RequestArrived) -> Bar | None:
        """The first thing that keeps a worker from a request."""
        return why_not(worker, event, self._taints) or self._overloaded(worker, event.at_s)

    def _free(self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView) -> Choice | Refusal:
        return self._choose(event, live) if live else self._nobody(event, view)

    def _nobody(self, event: RequestArrived, view: ClusterView) -> Refusal:
        """Why there is no worker to choose from."""
        mine = [worker for worker in view.workers.values() if self._fits(worker)]
        loaded = [
            bar
            for worker in mine
            if why_not(worker, event, self._taints) is None and (bar := self._overloaded(worker, event.at_s))
        ]
        if loaded:
            code = ENGINE if all(bar.code == ENGINE for bar in loaded) else BUSY
            return Refusal(
                code,
                f"all {len(loaded)} workers that could are overloaded or full; one is {loaded[0].text}",
                all(bar.by_prompts for bar in loaded),
            )
        lacking = lacks(event, mine, self._role, self._taints)
        if lacking is not None:
            return lacking
        shut = [w for w in mine if (w.draining or w.fences) and unfit(w, event, self._taints) is None]
        if shut:
            fenced = sum(bool(worker.fences) for worker in shut)
            leaving = len(shut) - fenced
            parts = [f"{n} {what}" for n, what in ((leaving, "leaving"), (fenced, "fenced")) if n]
            return Refusal(ALL_FENCED, f"no worker that could takes new work: {', '.join(parts)}")
        kind = "" if self._role is None else f"{self._role.value} "
        return Refusal(NO_ENDPOINTS, f"no {kind}worker takes new work")

    def _fits(self, worker: WorkerView) -> bool:
        """Whether a worker does the work that this router gives out."""
        return self._role is None or worker.up.role is self._role

    # ------------------------------------------------------------ pins, sessions, preferences

    def _pinned(self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView) -> Choice | Refusal:
        """The worker that the client asked for: no scoring, but every filter holds."""
        asked = event.worker_hint
        assert asked is not None
        worker = view.workers.get(asked)
        if worker is None:
            if self._last_up is not None and asked <= self._last_up:
                return Refusal("pinned_dead", f"worker {asked} was asked for and is lost")
            return Refusal("unknown_pin", f"worker {asked} was asked for and is not known")
        bar = self._bar(worker, event)
        if bar is not None:
            code = "pinned_dead" if worker.draining else "pinned_not_allowed"
            code = bar.code if bar.code in (BUSY, ENGINE) else code
            return Refusal(code, f"worker {asked} was asked for and is {bar.text}", _by_prompts(bar))
        if worker not in live:
            return Refusal("pinned_not_allowed", f"worker {asked} was asked for and does no {self._leg.value} work")
        return Choice(live.index(worker), "pin", "asked for", self._overlap_blocks(event, asked))

    def _only(self, event: RequestArrived, view: ClusterView) -> WorkerId | None:
        """The one worker that a request is pinned or hard bound to; None where it has a choice."""
        if event.worker_hint is not None or self._affinity is None or self._affinity.settings.bond != "hard":
            return event.worker_hint
        bound = self._bound_to(event, view, self._affinity)
        return bound.worker_id if bound is not None else None

    def _preferring(self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView) -> Choice | Refusal:
        """The worker of the session, or that the client would like, if it may be; else whom the mode chooses."""
        affinity = self._affinity
        bound = self._bound_to(event, view, affinity) if affinity is not None else None
        if bound is not None and affinity is not None:
            worker_id = bound.worker_id
            if bound in live:
                return Choice(live.index(bound), "affinity", "of the session", self._overlap_blocks(event, worker_id))
            bar = self._overloaded(bound, event.at_s)
            if bar is not None and affinity.settings.bond == "hard":
                told = f"the session is bound to worker {worker_id}, which is {bar.text}"
                return Refusal(bar.code, told, _by_prompts(bar))
        preferred = event.hints.preferred if event.hints is not None else None
        if preferred is not None:
            for at, worker in enumerate(live):
                if worker.up.worker_id == preferred:
                    return Choice(at, "preferred", "the client's preference", self._overlap_blocks(event, preferred))
        return self._free(event, live, view)

    def _bound_to(self, event: RequestArrived, view: ClusterView, affinity: Affinity) -> WorkerView | None:
        """The worker that the request's session is bound to, if it could run it; a binding to one that is leaving or
        gone is dropped."""
        session_id = event.session_id
        bound = affinity.worker_of(session_id, event.at_s)
        if bound is None or session_id is None:
            return None
        worker = view.workers.get(bound)
        if worker is None or worker.draining:
            affinity.unbind(session_id)
            return None
        return worker if self._fits(worker) and why_not(worker, event, self._taints) is None else None

    def _candidates(
        self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView, busy: Set[WorkerId]
    ) -> tuple[Candidate, ...]:
        """All workers by id: the eligible ones with the mode's terms, the others with why they could not be chosen."""
        told = self._explain(event, live)
        barred = []
        for worker_id, worker in view.workers.items():
            if worker not in live:
                bar = self._bar(worker, event)
                why = bar.text if bar is not None else "without room for it now" if worker_id in busy else None
                if why is not None:
                    barred.append(Candidate(worker_id=worker_id, in_flight=worker.in_flight, why_not=why))
        return tuple(sorted(told + barred, key=lambda one: (one.worker_id, one.dp_rank or 0)))


def _by_prompts(bar: Bar) -> bool | None:
    """Whether too many prompts bar a worker; None where load does not."""
    return bar.by_prompts if bar.code in (BUSY, ENGINE) else None


def _pace() -> Pace:
    from policies.router.backlog import Pace

    return Pace()


def _books(settings: RouterSettings) -> Books:
    rate = settings.prefill_tokens_per_s
    return Books(settings.block_size) if rate is None else DecayingBooks(settings.block_size, rate)


def _overload(settings: RouterSettings) -> Overload | None:
    if settings.busy is None:
        return None
    from policies.router.overload import Overload

    return Overload(settings.busy)


def _affinity(settings: RouterSettings) -> Affinity | None:
    if settings.affinity is None:
        return None
    from policies.router.affinity import Affinity

    return Affinity(settings.affinity)
