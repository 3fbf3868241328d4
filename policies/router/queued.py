"""A router that lets requests wait while every worker that they could go to is busy with prompts.

It stands in front of a mode, which chooses as ever when the time has come, by what is known then. Who goes next is
`queue`'s business. It looks again, at the end of the same instant, whenever load may have fallen; it never overtakes
within a class, and what has nobody to wait for is not kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from policies.cluster.actions import Action, Enqueue, SetTimer
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
    TimerFired,
    WorkerDraining,
    WorkerFenced,
    WorkerLost,
    WorkerRecalled,
    WorkerUnfenced,
    WorkerUp,
)
from policies.cluster.ids import Leg, Place, RequestId, Role, WorkerId
from policies.cluster.state import ClusterView, WorkerView
from policies.router.backlog import Work
from policies.router.base import Router
from policies.router.queue import Classes, Queue, QueueClass, QueueSettings, Waiting
from policies.router.select import Refusal
from policies.router.settings import RouterSettings

LOOK, EXPIRE, CALM = "router-queue", "router-queue-wait", "router-queue-calm"
"""Timers: look who can go; refuse whoever has waited too long; a prompt that is computed meanwhile counts less now."""

_WORKERS: frozenset[type[Event]] = frozenset(
    {WorkerUp, WorkerLost, WorkerDraining, WorkerRecalled, WorkerFenced, WorkerUnfenced}
)
_FREEING: frozenset[type[Event]] = frozenset(
    {PrefillDone, FirstToken, RequestInterrupted, BusyThresholdsChanged, *_WORKERS, *ENDS}
)
"""After these, somebody who waits may be able to go, or has nobody left to wait for."""

_SUSPICIOUS_SHARE = 0.5
"""A worker whose step takes more of its pool than this has probably announced the pool (SGLang does)."""


class Queued:
    """A mode with a queue in front of it; to a world, and to whoever places legs, it is a router like any other.

    Counters, beside those of the mode: requests `queued`, most at once (`queue_peak`), and workers whose announced step
    budget is so large that they never count as busy (`queue_budget_suspect`).
    """

    subscribes: ClassVar[frozenset[type[Event]]] = Router.subscribes | _FREEING | {TimerFired}
    reads_time = True

    def __init__(self, inner: Router, settings: QueueSettings) -> None:
        self.settings: RouterSettings = inner.settings
        self.subscribes = type(self).subscribes | inner.subscribes  # type: ignore[misc]
        self._inner = inner
        self._limits = settings
        self._classes = Classes(settings.classes)
        self._queue = Queue(self._classes.all)
        inner.count_waiting(lambda: Work(self._queue.tokens, len(self._queue)))
        self._needs_lengths = len(self._classes.all) > 1 or self._classes.all[0].order == "wspt"
        self._deadlines: deque[tuple[float, RequestId]] = deque()
        self._looks = False  # the timer is set
        self._expires = False
        self._calm_s: float | None = None  # when load falls next with time alone, if anybody waits for that
        self._queued = 0
        self._peak = 0
        self._suspects = 0

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        counts = {"queued": self._queued, "queue_peak": self._peak, "queue_budget_suspect": self._suspects}
        return self._inner.counters() | counts

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        if isinstance(event, RequestArrived):
            return self.send(event, view)
        if isinstance(event, TimerFired) and event.name in (LOOK, EXPIRE, CALM):
            return self._fired(event, view)
        orders: Sequence[Action] = ()
        if type(event) in self._inner.subscribes:
            orders = self._inner.decide(event, view)
        if isinstance(event, RequestEvent):
            if isinstance(event, RequestInterrupted) or type(event) in ENDS:
                self.withdraw(event.request_id)
        elif isinstance(event, WorkerUp):
            self._suspects += self._is_suspicious(event)
        return (*orders, *self._look(event.at_s)) if type(event) in _FREEING else orders

    # ------------------------------------------------------------ as one leg of a request

    def serve(self, role: Role, leg: Leg) -> None:
        """Choose among the workers of one role only, for one leg of requests."""
        self._inner.serve(role, leg)

    def best_overlap(self, event: RequestArrived, view: ClusterView) -> tuple[WorkerId | None, int]:
        """As the mode knows it."""
        return self._inner.best_overlap(event, view)

    def lose_index(self, view: ClusterView, at_s: float) -> Iterable[Action]:
        """As the mode takes it."""
        return self._inner.lose_index(view, at_s)

    def peer_sent(self, event: RequestArrived, place: Place, overlap_blocks: int, leg: Leg = Leg.AGG) -> None:
        """Another router sent a request to a worker; nobody who waits here can go for that."""
        self._inner.peer_sent(event, place, overlap_blocks, leg)

    def leg_over(self, request_id: RequestId, at_s: float) -> Sequence[Action]:
        """This router's leg of a request is done."""
        self._inner.leg_over(request_id, at_s)
        return self._look(at_s)

    def withdraw(self, request_id: RequestId) -> None:
        """A request that may wait here is to go nowhere."""
        self._queue.remove(request_id)

    def send(self, event: RequestArrived, view: ClusterView) -> Iterable[Action]:
        """Orders for a request that arrives: it goes, waits, or is refused."""
        inner, queue = self._inner, self._queue
        targets = inner.targets(event, view)
        uncached_tokens = self._uncached(event, targets)
        hints = event.hints
        named, family = (hints.policy_class, hints.family) if hints is not None else (None, None)
        queue_class = self._classes.of(named, family, uncached_tokens)
        backlog = queue.backlog(queue_class)
        busy = self._busy(targets, event.at_s)
        if not targets or not queue_class.waits or not (busy or backlog):
            return (inner.route(event, view),)
        full = self._full(len(targets))
        if full is not None and not isinstance(event, RequestMigrated):  # whose client has been promised an answer
            return (inner.refuse(event.request_id, full, event.at_s),)
        orders: list[Action] = [self._enqueue(event, queue_class, uncached_tokens, busy)]
        if not busy:
            orders += self._look(event.at_s)
        orders += self._watch_deadline(event)
        orders += self._watch_calm(event.at_s, view)
        return orders

    # ------------------------------------------------------------ going in

    def _enqueue(self, event: RequestArrived, queue_class: QueueClass, uncached_tokens: int, busy: bool) -> Enqueue:
        strict = event.hints.strict_priority if event.hints is not None else 0
        entry = self._queue.add(event, queue_class, strict, uncached_tokens)
        self._queued += 1
        self._peak = max(self._peak, len(self._queue))
        share = self._limits.busy_worker_share
        which = "every worker is" if share == 1 else f"at least {share:.0%} of the workers are"
        why = f"{which} busy with prompts" if busy else "others of its class wait"
        return Enqueue(
            request_id=event.request_id,
            policy_class=queue_class.name,
            strict_priority=strict,
            score=entry.score,
            uncached_tokens=entry.uncached_tokens,
            reason=f"{why}; {len(self._queue)} wait",
        )

    def _uncached(self, event: RequestArrived, targets: Sequence[WorkerView]) -> int:
        """Prompt tokens to compute where most of it is cached, if anything depends on it."""
        if not self._needs_lengths:
            return event.isl
        _, blocks = self._inner.best_of(event, targets)
        return max(1, event.isl - blocks * self.settings.block_size)

    def _full(self, workers: int) -> Refusal | None:
        """Why nobody more may wait."""
        waiting, tokens, limits = len(self._queue), self._queue.tokens, self._limits
        if limits.requests_per_worker is not None and waiting >= limits.requests_per_worker * workers:
            limit = f"{limits.requests_per_worker} for each of {workers} workers"
            return Refusal("queue_limit", f"{waiting} requests wait, the limit is {limit}", by_prompts=True)
        if limits.tokens_per_worker is not None and tokens >= limits.tokens_per_worker * workers:
            limit = f"{limits.tokens_per_worker} for each of {workers} workers"
            return Refusal("queue_limit", f"{tokens} prompt tokens wait, the limit is {limit}", by_prompts=True)
        return None

    # ------------------------------------------------------------ busy

    def _busy(self, targets: Sequence[WorkerView], at_s: float) -> bool:
        """Whether enough of the workers that a request could go to are busy with prompts."""
        busy = sum(self._is_busy(worker, at_s) for worker in targets)
        return 0 < busy >= self._limits.busy_worker_share * len(targets)

    def _is_busy(self, worker: WorkerView, at_s: float) -> bool:
        """Whether a worker is; where the router chooses among its ranks, whether the least of them is."""
        tokens, limits = self._inner.prefill_tokens(worker.worker_id, at_s), self._limits
        if limits.prefill_busy_tokens is not None and tokens > limits.prefill_busy_tokens:
            return True
        share, budget = limits.prefill_busy_share, self._budget(worker)
        return share is not None and bool(budget) and tokens > share * budget

    def _budget(self, worker: WorkerView) -> int:
        """What a step takes of a worker's prompts, or of one rank's; 0 where it does not say."""
        return (worker.up.max_batched_tokens or 0) // self._inner.ranks_of(worker)

    def _is_suspicious(self, up: WorkerUp) -> bool:
        pool_tokens = (up.total_blocks or 0) * up.block_size
        by_share = self._limits.prefill_busy_share is not None
        return by_share and bool(pool_tokens) and (up.max_batched_tokens or 0) > _SUSPICIOUS_SHARE * pool_tokens

    # ------------------------------------------------------------ going on

    def _look(self, at_s: float) -> Sequence[Action]:
        """Have a look at the end of this instant, if anybody waits."""
        if self._looks or not self._queue:
            return ()
        self._looks = True
        return (SetTimer(name=LOOK, due_s=at_s, reason="load may have fallen"),)

    def _watch_deadline(self, event: RequestArrived) -> Sequence[Action]:
        longest_s = self._limits.max_wait_s
        if longest_s is None:
            return ()
        self._deadlines.append((event.at_s + longest_s, event.request_id))
        return self._next_deadline()

    def _next_deadline(self) -> Sequence[Action]:
        """One timer at a time, for whoever has waited longest of those who still do."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._queue:
            deadlines.popleft()
        if self._expires or not deadlines:
            return ()
        self._expires = True
        due_s, request_id = deadlines[0]
        return (SetTimer(name=EXPIRE, due_s=due_s, reason=f"request {request_id} waits no longer"),)

    def _fired(self, event: TimerFired, view: ClusterView) -> Iterator[Action]:
        if event.name == LOOK:
            self._looks = False
            yield from self._go(event.at_s, view)
        elif event.name == EXPIRE:
            self._expires = False
            yield from self._expire(event.at_s)
            yield from self._next_deadline()
            yield from self._look(event.at_s)
        elif event.name == CALM:
            self._calm_s = None
            yield from self._go(event.at_s, view)

    def _go(self, at_s: float, view: ClusterView) -> Iterator[Action]:
        """Send whoever can go now. The view takes in each order before the next one is made."""
        while (entry := self._queue.pop(lambda waiting: self._blocked(waiting, at_s, view))) is not None:
            yield self._inner.route(replace(entry.event, at_s=at_s), view)
        yield from self._watch_calm(at_s, view)

    def _watch_calm(self, at_s: float, view: ClusterView) -> Sequence[Action]:
        """Look again when load has fallen with time, where prompts count less while they are computed."""
        if not self._queue:
            return ()
        due_s = min(
            (due_s for worker in view.live if (due_s := self._calm_of(worker, at_s)) is not None),
            default=None,
        )
        if due_s is None or (self._calm_s is not None and self._calm_s <= due_s):
            return ()
        self._calm_s = due_s
        return (SetTimer(name=CALM, due_s=due_s, reason="a prompt will be computed by then"),)

    def _calm_of(self, worker: WorkerView, at_s: float) -> float | None:
        """When a worker's load next falls below a limit with time alone; None: never."""
        limits, budget = [self._limits.prefill_busy_tokens], self._budget(worker)
        if self._limits.prefill_busy_share is not None and budget:
            limits.append(self._limits.prefill_busy_share * budget)
        return self._inner.calm_s(worker, at_s, [limit for limit in limits if limit is not None])

    def _blocked(self, entry: Waiting, at_s: float, view: ClusterView) -> bool:
        """Whether a request still has to wait; one that nobody will ever take does not."""
        now = replace(entry.event, at_s=at_s)
        targets = self._inner.targets(now, view)
        return self._busy(targets, at_s) if targets else self._inner.waits_for_load(now, view)

    def _expire(self, at_s: float) -> Iterator[Action]:
        while self._deadlines and self._deadlines[0][0] <= at_s:
            _, request_id = self._deadlines.popleft()
            entry = self._queue.remove(request_id)
            if entry is not None:
                waited_s = at_s - entry.since_s
                told = Refusal("queue_timeout", f"waited {waited_s:g} s in the queue", by_prompts=True)
                yield self._inner.refuse(request_id, told, at_s)
