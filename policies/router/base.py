"""What every mode of the router shares: pins, refusals, explanations, counters. A mode only chooses.

A subclass says how to choose among the live workers (`_choose`), and may keep books (`_learn`, `_sent`) and explain
itself (`_explain`). It must never choose a worker that is not in the list that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import ClassVar, NamedTuple

from policies.cluster.actions import Action, Candidate, Dispatch, Reject
from policies.cluster.events import Event, RequestArrived, RequestMigrated, WorkerLost
from policies.cluster.ids import Leg, RequestId, Role, WorkerId
from policies.cluster.state import ClusterView, WorkerView
from policies.router.select import why_not
from policies.router.settings import RouterSettings

NO_ENDPOINTS = "no_endpoints"
"""The code of a refusal because no worker takes new work."""

_NAMED = 5
"""Adapters that a refusal names."""


NOBODY: frozenset[WorkerId] = frozenset()


class Choice(NamedTuple):
    """One of the live workers (`at` is its index), what decided (`rule`) and a text for the log."""

    at: int
    rule: str
    reason: str
    overlap_blocks: int = 0


class Refusal(NamedTuple):
    """Why a request is not sent anywhere; `code` is a word of router.md's table of refusals."""

    code: str
    reason: str


class Router:
    """A routing policy: one Dispatch or Reject for every request, at once."""

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestArrived, RequestMigrated, WorkerLost})

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self._explains = settings.explain
        self._role: Role | None = None
        self._leg = Leg.AGG
        self._lost: set[WorkerId] = set()
        self._decisions = 0
        self._refusals: dict[str, int] = {}

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        if isinstance(event, RequestArrived):
            return (self._route(event, view),)
        if isinstance(event, WorkerLost):
            self._lost.add(event.worker_id)
        self._learn(event)
        return ()

    def counters(self) -> dict[str, int]:
        """Counts for the report: `decisions`, `rejected_<code>`, and those of the mode."""
        return {"decisions": self._decisions} | {f"rejected_{code}": n for code, n in sorted(self._refusals.items())}

    def serve(self, role: Role, leg: Leg) -> None:
        """Choose among the workers of one role only, for one leg of requests."""
        self._role = role
        self._leg = leg

    def route(self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY) -> Dispatch | Reject:
        """Where one request (or this router's leg of it) goes now: to none of the `busy`."""
        return self._route(event, view, busy)

    def best_overlap(
        self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY
    ) -> tuple[WorkerId | None, int]:
        """The eligible worker that has most leading blocks of the prompt (of several the lowest id), and how many."""
        best, most = None, 0
        for worker in self._eligible(event, view, busy):
            blocks = self._overlap_blocks(event, worker.up.worker_id)
            if blocks > most:
                best, most = worker.up.worker_id, blocks
        return best, most

    def leg_over(self, request_id: RequestId) -> None:
        """This router's leg of a request is done; the request goes on elsewhere."""

    def peer_sent(self, event: RequestArrived, worker_id: WorkerId, overlap_blocks: int) -> None:
        """Another router sent a request to a worker: it is booked as if this one had. Its end comes like any other."""
        self._sent(event, worker_id, overlap_blocks)

    # ------------------------------------------------------------ for modes

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice | Refusal:
        """One of `live`, which is sorted by id and not empty."""
        raise NotImplementedError

    def _learn(self, event: Event) -> None:
        """Take in a subscribed event that is not an arrival."""

    def _overlap_blocks(self, event: RequestArrived, worker_id: WorkerId) -> int:
        """Blocks of the prompt that a worker has cached, as far as this mode knows."""
        return 0

    def _sent(self, event: RequestArrived, worker_id: WorkerId, overlap_blocks: int) -> None:
        """The request goes to this worker."""

    def _explain(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> list[Candidate]:
        """The live workers as this mode saw them when it chose; asked before `_sent`."""
        return [Candidate(worker_id=worker.worker_id, in_flight=worker.in_flight) for worker in live]

    # ------------------------------------------------------------ one decision

    def _route(self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY) -> Dispatch | Reject:
        live = self._eligible(event, view, busy)
        pinned = event.worker_hint is not None
        choice = self._pinned(event, live, view) if pinned else self._free(event, live, view)
        if isinstance(choice, Refusal):
            return self._refuse(event.request_id, choice)
        worker_id = live[choice.at].up.worker_id
        candidates = self._candidates(event, live, view) if self._explains else ()
        self._decisions += 1
        self._sent(event, worker_id, choice.overlap_blocks)
        return Dispatch(
            request_id=event.request_id,
            worker_id=worker_id,
            rule=choice.rule,
            leg=self._leg,
            reason=choice.reason,
            overlap_blocks=choice.overlap_blocks,
            candidates=candidates,
        )

    def _eligible(
        self, event: RequestArrived, view: ClusterView, busy: Set[WorkerId] = NOBODY
    ) -> tuple[WorkerView, ...]:
        """The live workers that this leg of the request may go to, by id."""
        live = view.live_for(event.lora, self._role)
        if type(event) is RequestMigrated and event.excluded:
            busy = busy | frozenset(event.excluded)
        return tuple(worker for worker in live if worker.worker_id not in busy) if busy else live

    def _free(self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView) -> Choice | Refusal:
        return self._choose(event, live) if live else self._nobody(event, view)

    def _nobody(self, event: RequestArrived, view: ClusterView) -> Refusal:
        """Why there is no worker to choose from."""
        if event.lora and not any(self._fits(w) and w.up.serves(event.lora) for w in view.workers.values()):
            served = {name for w in view.workers.values() if self._fits(w) for name in w.up.loras or ()}
            names = f"{', '.join(sorted(served)[:_NAMED])}{', ...' if len(served) > _NAMED else ''}" or "none"
            role = f"{self._role.value} " if self._role is not None else ""
            return Refusal("unknown_lora", f"no {role}worker serves adapter {event.lora!r}; there are {names}")
        kind = "" if self._role is None else f"{self._role.value} "
        fenced = sum(bool(worker.fences) for worker in view.workers.values() if self._fits(worker))
        return Refusal(NO_ENDPOINTS, f"no {kind}worker takes new work{f', {fenced} fenced' if fenced else ''}")

    def _fits(self, worker: WorkerView) -> bool:
        """Whether a worker does the work that this router gives out."""
        return self._role is None or worker.up.role is self._role

    def _pinned(self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView) -> Choice | Refusal:
        """The worker that the client asked for: no scoring, but every filter holds."""
        asked = event.worker_hint
        assert asked is not None
        worker = view.workers.get(asked)
        if worker is None:
            if asked in self._lost:
                return Refusal("pinned_dead", f"worker {asked} was asked for and is lost")
            return Refusal("unknown_pin", f"worker {asked} was asked for and is not known")
        why = why_not(worker, event)
        if why is not None:
            code = "pinned_dead" if worker.draining else "pinned_not_allowed"
            return Refusal(code, f"worker {asked} was asked for and is {why}")
        if worker not in live:
            return Refusal("pinned_not_allowed", f"worker {asked} was asked for and does no {self._leg.value} work")
        return Choice(live.index(worker), "pin", "asked for", self._overlap_blocks(event, asked))

    def _refuse(self, request_id: RequestId, refusal: Refusal) -> Reject:
        self._refusals[refusal.code] = self._refusals.get(refusal.code, 0) + 1
        return Reject(request_id=request_id, code=refusal.code, reason=refusal.reason)

    def _candidates(
        self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView
    ) -> tuple[Candidate, ...]:
        """All workers by id: the eligible ones with the mode's terms, the others with why they could not be chosen."""
        told = self._explain(event, live)
        fenced = [
            Candidate(worker_id=worker_id, in_flight=worker.in_flight, why_not=fence)
            for worker_id, worker in view.workers.items()
            if (fence := why_not(worker, event)) is not None
        ]
        return tuple(sorted(told + fenced, key=lambda candidate: candidate.worker_id))
