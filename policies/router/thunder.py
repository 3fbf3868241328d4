"""Thunder: agents are scheduled as programs, not request by request, so that their KV is there when a tool returns.

A program stays on the worker that has its KV. Where programs take up too much of a pool, some are paused between two
requests; their next one waits here until there is room. A request under way is never stopped, and a worker that has
nothing to compute is never kept from one that waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from math import inf
from typing import ClassVar, NamedTuple

from policies.cluster.actions import Action, Candidate, Dispatch, Enqueue, SetTimer
from policies.cluster.events import (
    ENDS,
    Event,
    RequestArrived,
    RequestCancelled,
    RequestEvent,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestMigrated,
    RequestRejected,
    TimerFired,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)
from policies.cluster.ids import Place, RankId, RequestId, WorkerId
from policies.cluster.state import ClusterView, WorkerView
from policies.errors import ConfigError
from policies.router.base import NOBODY, Choice, Router
from policies.router.programs import Programs
from policies.router.select import Ties
from policies.router.settings import RouterSettings

TICK, LOOK = "thunder-tick", "thunder-look"
"""Timers: pause and resume; look who can go, at the end of an instant in which something ended."""

CLASS = "programs"
"""The class of all that wait here."""

_FREEING: frozenset[type[Event]] = frozenset({RequestInterrupted, WorkerUp, WorkerLost, WorkerDraining, *ENDS})


class Home(Router):
    """The choice alone: the worker of the program if it may be, else the one with the smallest share in use."""

    def __init__(self, settings: RouterSettings, programs: Programs) -> None:
        super().__init__(settings)
        self._programs = programs
        self._ties = Ties(settings.tie_break, settings.seed)

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        program = self._programs.of(event.session_id)
        if program is not None:
            for at, worker in enumerate(live):
                if worker.up.worker_id == program.worker_id:
                    return Choice(at, "program", f"its program's, {self._programs.use(worker):.0%} of the pool in use")
        shares = [self._programs.use(worker) for worker in live]
        at, rule = self._ties.lowest(event.draw_id, shares, [worker.up.worker_id for worker in live])
        return Choice(at, rule, f"{shares[at]:.0%} of the pool in use, least of {len(live)}")

    def _explain(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> list[Candidate]:
        return [
            Candidate(
                worker_id=worker.worker_id,
                in_flight=worker.in_flight,
                decode_blocks=self._programs.held_blocks(worker.worker_id),
            )
            for worker in live
        ]

    def _learn(self, event: Event) -> None:
        if isinstance(event, WorkerLost):
            self._ties.forget(event.worker_id)

    def _sent(self, event: RequestArrived, place: Place, overlap_blocks: int) -> None:
        assert not isinstance(place, RankId), "programs stay with workers"
        self._ties.note(place)
        self._programs.sent(event.request_id, event.session_id, place, event.isl, event.at_s)


class _Waiting(NamedTuple):
    """A request that waits, as it arrived, and when it counts as come."""

    event: RequestArrived
    place_s: float


class Thunder:
    """Counters, beside those of the choice: `programs_paused`, `programs_resumed` (of those `forced`), requests that
    waited (`queued`, at most `queue_peak` at once) and that were put back for it (`demoted`).
    """

    subscribes: ClassVar[frozenset[type[Event]]] = Router.subscribes | _FREEING | {TimerFired}

    def __init__(self, settings: RouterSettings) -> None:
        if settings.programs is None:
            raise ConfigError("router.mode thunder needs its settings (router.thunder)")
        self.settings = settings
        self._limits = settings.programs
        self._programs = Programs(settings.programs, settings.block_size)
        self._inner = Home(settings, self._programs)
        self.subscribes = type(self).subscribes | self._inner.subscribes  # type: ignore[misc]
        self._waiting: dict[RequestId, _Waiting] = {}
        self._looks = self._ticks = False  # whether the timer is set
        self._counts = dict.fromkeys(
            ("programs_paused", "programs_resumed", "programs_forced", "queued", "queue_peak", "demoted"), 0
        )

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        return self._inner.counters() | self._counts

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action] | Iterator[Action]:
        if isinstance(event, RequestArrived):
            return self._arrive(event, view)
        if isinstance(event, TimerFired):
            return self._fired(event, view)
        if type(event) in self._inner.subscribes:
            self._inner.decide(event, view)
        filled: WorkerId | None = None
        if isinstance(event, RequestInterrupted):
            filled = self._over(event, event.emitted_tokens)
        elif isinstance(event, RequestFinished | RequestFailed | RequestCancelled):
            filled = self._over(event, event.output_tokens)
        elif isinstance(event, RequestRejected):
            filled = self._over(event, 0)
        elif isinstance(event, WorkerLost | WorkerUp):
            self._programs.lose(event.worker_id)
        return self._after(event, view, filled)

    def _over(self, event: RequestEvent, output_tokens: int) -> WorkerId | None:
        self._waiting.pop(event.request_id, None)
        return self._programs.over(event.request_id, event.at_s, output_tokens)

    # ------------------------------------------------------------ arrivals

    def _arrive(self, event: RequestArrived, view: ClusterView) -> Iterator[Action]:
        if self._programs.expire(event.at_s):
            yield from self._look(event.at_s)
        is_free = event.session_id is None or event.worker_hint is not None or isinstance(event, RequestMigrated)
        targets = () if is_free else self._inner.targets(event, view)
        full = self._full(event, targets)
        order: Action
        moves = self._programs.moves
        if len(full) < len(targets) or not targets:
            order = self._inner.route(event, view, full)
        else:
            order = self._enqueue(event, targets)
        yield order
        if self._programs.moves > moves:
            yield from self._look(event.at_s)
        yield from self._watch(event.at_s, view, order.worker_id if isinstance(order, Dispatch) else None)

    def _full(self, event: RequestArrived, targets: Sequence[WorkerView]) -> Set[WorkerId]:
        """The workers that have no room for the program of a request; what is active has room where it is."""
        program, limits = self._programs.of(event.session_id), self._limits
        paused = program is not None and program.paused and not program.open
        if program is not None and not paused and any(w.worker_id == program.worker_id for w in targets):
            return NOBODY
        most = limits.pause_at - limits.hysteresis if paused else limits.pause_at
        blocks = self._programs.blocks_of(event.isl)
        return {w.worker_id for w in targets if w.in_flight and self._programs.use(w, blocks) > most}

    def _enqueue(self, event: RequestArrived, targets: Sequence[WorkerView]) -> Enqueue:
        limits, counts = self._limits, self._counts
        program = self._programs.of(event.session_id)
        home = [w for w in targets if program is not None and w.worker_id == program.worker_id]
        use = min(self._programs.use(worker) for worker in home or targets)
        demoted = use >= limits.demote_at
        place_s = event.at_s + (limits.demote_s if demoted else 0.0)
        self._waiting[event.request_id] = _Waiting(event, place_s)
        counts["queued"] += 1
        counts["queue_peak"] = max(counts["queue_peak"], len(self._waiting))
        counts["demoted"] += demoted
        what = "a new program" if program is None else "a paused program" if program.paused else "a program elsewhere"
        return Enqueue(
            request_id=event.request_id,
            policy_class=CLASS,
            strict_priority=0,
            score=-place_s,
            uncached_tokens=event.isl,
            reason=f"{what}, {use:.0%} of the pool in use; {len(self._waiting)} wait",
        )

    # ------------------------------------------------------------ pausing and resuming

    def _after(self, event: Event, view: ClusterView, filled: WorkerId | None) -> Iterator[Action]:
        """What follows from an event that may have made room, or filled a pool."""
        if type(event) in _FREEING:
            yield from self._look(event.at_s)
        yield from self._watch(event.at_s, view, filled)

    def _look(self, at_s: float) -> Iterator[Action]:
        """Have a look at the end of this instant, if anybody waits."""
        if self._waiting and not self._looks:
            self._looks = True
            yield SetTimer(name=LOOK, due_s=at_s, reason="there may be room")

    def _watch(self, at_s: float, view: ClusterView, filled: WorkerId | None) -> Iterator[Action]:
        """Tick while anybody waits or a pool is too full; `filled` is the one that this event may have filled."""
        worker = view.workers.get(filled) if filled is not None else None
        if not self._ticks and (self._waiting or (worker is not None and self._is_pressed(worker))):
            self._ticks = True
            yield SetTimer(name=TICK, due_s=at_s + self._limits.tick_s, reason="pause and resume programs")

    def _is_pressed(self, worker: WorkerView) -> bool:
        return self._programs.use(worker) >= self._limits.pause_at

    def _fired(self, event: TimerFired, view: ClusterView) -> Iterator[Action]:
        if event.name == LOOK:
            self._looks = False
            yield from self._resume(event.at_s, view, longest_s=inf)
        elif event.name == TICK:
            self._ticks = False
            self._counts["programs_paused"] += self._programs.pause(view.workers.values())
            yield from self._resume(event.at_s, view, longest_s=self._limits.force_resume_s)
            fullest = max(view.workers.values(), key=self._programs.use, default=None)
            yield from self._watch(event.at_s, view, fullest.worker_id if fullest is not None else None)

    def _resume(self, at_s: float, view: ClusterView, longest_s: float) -> Iterator[Action]:
        """Send whoever has room now, or has waited for `longest_s`, first come first; the view takes in each order
        before the next one is made."""
        moves = self._programs.moves
        for request_id, (arrived, _) in sorted(self._waiting.items(), key=lambda item: item[1].place_s):
            event = replace(arrived, at_s=at_s)
            targets = self._inner.targets(event, view)
            full = self._full(event, targets)
            no_room = len(full) == len(targets)
            if no_room and at_s - arrived.at_s < longest_s and (targets or self._inner.waits_for_load(event, view)):
                continue
            del self._waiting[request_id]
            order = self._inner.route(event, view, NOBODY if no_room else full)
            if isinstance(order, Dispatch):
                self._counts["programs_resumed"] += 1
                self._counts["programs_forced"] += no_room
            yield order
        if self._programs.moves > moves:
            yield from self._look(at_s)
