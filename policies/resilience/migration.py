"""Migration: what becomes of a request whose worker is lost in the middle of it.

It is sent again, with the tokens that the client already has as part of its prompt, or it fails; either way it ends
exactly once, and it never passes for an answer that was merely short. A retry count belongs to the request; 0 turns
migration off. Tries in a row that came to nothing wait longer each time (`backoff`). Where the request goes is the
router's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from policies.cluster.actions import Action, Fail, Migrate, SetTimer
from policies.cluster.events import (
    ENDS,
    Event,
    FirstToken,
    PrefillDone,
    RequestArrived,
    RequestCancelled,
    RequestEvent,
    RequestFinished,
    RequestInterrupted,
    RequestMigrated,
    TimerFired,
)
from policies.cluster.ids import LossCause, RequestId, Trait, WorkerId
from policies.cluster.state import ClusterView, RequestView
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.resilience.backoff import Backoff

ELIGIBLE = frozenset(LossCause) - {LossCause.ENGINE_ERROR}
"""Causes after which another worker may well succeed; what the engine itself refuses or gets wrong is no such cause."""
_TIMER = "retry "
UNKEPT = (Trait.GUIDED, Trait.MANY, Trait.LOGPROBS, Trait.TOOLS)
"""What no continuation keeps, unless the engine is known to carry it over; in the order in which it is named."""


@frozen
class MigrationSettings:
    """`limit`: how often one request may be sent again; `max_seq_len`: only while prompt and emitted tokens together
    do not exceed it (None: always). `carried`: traits that the engines in use keep when an answer goes on elsewhere.
    `backoff`: how long tries wait that follow one without any answer (None: not at all).
    """

    limit: int
    max_seq_len: int | None
    carried: frozenset[Trait] = frozenset()
    backoff: Backoff | None = None

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"resilience.migration_limit is {self.limit}, it must be 0 (off) or more")
        if self.max_seq_len is not None and self.max_seq_len < 1:
            raise ConfigError(
                f"resilience.migration_max_seq_len is {self.max_seq_len}, it must be 1 or more; leave it out for none"
            )


@dataclass(slots=True)
class Span:
    """Times of one kind, in seconds: how many, their sum, the longest."""

    count: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0

    def add(self, took_s: float) -> None:
        self.count += 1
        self.sum_s += took_s
        self.max_s = max(self.max_s, took_s)


@dataclass(slots=True)
class _Attempt:
    """A migration under way: of which type, since when; None once the client hears of it again."""

    kind: str
    since_s: float | None


class _Tries(NamedTuple):
    """How often in a row a request was interrupted without a sign of life between, and the tokens it had then."""

    in_a_row: int
    emitted_tokens: int


class Migration:
    """One order for each interrupted request: `Migrate`, at once or when it has waited, or `Fail`.

    Counters: `migrations_<type>` ordered, where the type says whether the client had a token (`ongoing_request`) or not
    (`new_request`); `migrations_<type>_<outcome>`, an attempt being a `success` when it answered to the end, a
    `failure` when it was interrupted too or the request failed, or `cancelled`; `migration_refused_<code>`;
    `migrations_sampled`, answers that are not what they would have been; `migrations_waited`, those that did not go at
    once. `took`: from the loss to the first sign of
    life of the next attempt.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset(
        {RequestInterrupted, PrefillDone, FirstToken, TimerFired, *ENDS}
    )

    def __init__(self, settings: MigrationSettings) -> None:
        self.settings = settings
        self.took = Span()
        self._counts: dict[str, int] = {}
        self._open: dict[RequestId, _Attempt] = {}
        self._tries: dict[RequestId, _Tries] = {}
        self._waiting: dict[RequestId, Migrate] = {}

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        if isinstance(event, RequestInterrupted):
            return (self._order(event, view),)
        if isinstance(event, TimerFired):
            return self._go_on(event.name, view) if self._waiting else ()
        if (self._open or self._tries) and isinstance(event, RequestEvent):
            self._learn(event)
        return ()

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        return dict(sorted(self._counts.items()))

    def _order(self, event: RequestInterrupted, view: ClusterView) -> Action:
        request = view.requests[event.request_id]
        self._close(event.request_id, "failure")
        why_not = self._why_not(request, event)
        if why_not is not None:
            code, reason = why_not
            self._count(f"migration_refused_{code}")
            return Fail(request_id=event.request_id, code=code, reason=reason)
        attempt = request.attempt + 1
        kind = "ongoing_request" if event.emitted_tokens else "new_request"
        self._count(f"migrations_{kind}")
        if event.emitted_tokens and Trait.SAMPLED in request.arrived.traits:
            self._count("migrations_sampled")
        self._open[event.request_id] = _Attempt(kind, event.at_s)
        order = Migrate(
            request_id=event.request_id,
            attempt=attempt,
            excluded=_still_failed(request, view),
            reason=f"attempt {attempt} of {self.settings.limit}, {event.emitted_tokens} tokens carried",
        )
        wait_s = self._wait_s(event)
        if not wait_s:
            return order
        self._count("migrations_waited")
        self._waiting[event.request_id] = order
        return SetTimer(name=f"{_TIMER}{event.request_id}", due_s=event.at_s + wait_s, reason=order.reason)

    def _wait_s(self, event: RequestInterrupted) -> float:
        """How long the next try waits: not at all behind a sign of life, nor while KV is held for it."""
        backoff = self.settings.backoff
        if backoff is None or event.kept_on is not None:
            return 0.0
        last = self._tries.get(event.request_id)
        went_on = last is None or event.emitted_tokens > last.emitted_tokens
        tries = 1 if last is None or went_on else last.in_a_row + 1
        self._tries[event.request_id] = _Tries(tries, event.emitted_tokens)
        return backoff.wait_s(f"retry {event.request_id}", tries)

    def _go_on(self, timer: str, view: ClusterView) -> Sequence[Action]:
        """A request has waited, and goes to none of those that failed it and are there still."""
        request_id = RequestId(timer.removeprefix(_TIMER))
        order = self._waiting.pop(request_id, None) if timer.startswith(_TIMER) else None
        if order is None:
            return ()
        return (replace(order, excluded=_still_failed(view.requests[request_id], view)),)

    def _learn(self, event: RequestEvent) -> None:
        """What became of an attempt."""
        if type(event) in ENDS:
            self._waiting.pop(event.request_id, None)
        self._tries.pop(event.request_id, None)
        if isinstance(event, RequestFinished):
            self._close(event.request_id, "success")
        elif type(event) in ENDS:
            self._close(event.request_id, "cancelled" if isinstance(event, RequestCancelled) else "failure")
        elif (attempt := self._open.get(event.request_id)) is not None and attempt.since_s is not None:
            self.took.add(event.at_s - attempt.since_s)
            attempt.since_s = None

    def _close(self, request_id: RequestId, outcome: str) -> None:
        attempt = self._open.pop(request_id, None)
        if attempt is not None:
            self._count(f"migrations_{attempt.kind}_{outcome}")

    def _why_not(self, request: RequestView, event: RequestInterrupted) -> tuple[str, str] | None:
        """Code and text of why the request cannot go on elsewhere; None when it can."""
        limit, longest = self.settings.limit, self.settings.max_seq_len
        lost = f"worker {event.worker_id}: {event.reason}, {event.emitted_tokens} tokens delivered"
        if event.cause not in ELIGIBLE:
            return event.cause.value, f"{lost}; another worker would not do better"
        if not limit:
            return event.cause.value, f"{lost}; migration is off"
        if request.attempt >= limit:
            return "migration_limit", f"{lost}; sent again {request.attempt} times, the limit is {limit}"
        seq_len = _prompt_tokens(request.arrived) + event.emitted_tokens
        if longest is not None and seq_len > longest:
            return "migration_max_seq_len", f"{lost}; {seq_len} tokens exceed migration_max_seq_len {longest}"
        trait = self._unkept(request.arrived) if event.emitted_tokens else None
        if trait is not None:
            return "not_migratable", f"{trait.value}; {lost}"
        return None

    def _unkept(self, arrived: RequestArrived) -> Trait | None:
        """What the answer must keep and would lose if it went on elsewhere; before its first token it loses nothing."""
        kept = self.settings.carried
        return next((trait for trait in UNKEPT if trait in arrived.traits and trait not in kept), None)

    def _count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1


def _prompt_tokens(arrived: RequestArrived) -> int:
    """The client's own prompt, without what was carried over before."""
    return arrived.isl - (arrived.emitted_tokens if isinstance(arrived, RequestMigrated) else 0)


def _still_failed(request: RequestView, view: ClusterView) -> tuple[WorkerId, ...]:
    """Workers that failed this request and are there still; one that came back with a new epoch is another worker."""
    return tuple(
        worker_id
        for worker_id, epoch in request.failed_on
        if (worker := view.workers.get(worker_id)) is not None and worker.up.epoch == epoch
    )
