"""Migration: what becomes of a request whose worker is lost in the middle of it.

It is sent again, with the tokens that the client already has as part of its prompt, or it fails; either way it ends
exactly once, and it never passes for an answer that was merely short. A retry count belongs to the request; 0 turns
migration off. Where the request goes is the router's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.cluster.actions import Action, Fail, Migrate
from policies.cluster.events import Event, RequestArrived, RequestInterrupted, RequestMigrated
from policies.cluster.ids import WorkerId
from policies.cluster.state import ClusterView, RequestView
from policies.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSettings:
    """`limit`: how often one request may be sent again; `max_seq_len`: only while prompt and emitted tokens together
    do not exceed it (None: always).
    """

    limit: int
    max_seq_len: int | None

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"resilience.migration_limit is {self.limit}, it must be 0 (off) or more")
        if self.max_seq_len is not None and self.max_seq_len < 1:
            raise ConfigError(
                f"resilience.migration_max_seq_len is {self.max_seq_len}, it must be 1 or more; leave it out for none"
            )


class Migration:
    """One order for each interrupted request, at once: `Migrate` or `Fail`.

    Counters: `migrations` ordered before and after the first token, and what was given up, by reason.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset({RequestInterrupted})

    def __init__(self, settings: MigrationSettings) -> None:
        self.settings = settings
        self._counts: dict[str, int] = {}

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        if not isinstance(event, RequestInterrupted):
            return ()
        request = view.requests[event.request_id]
        why_not = self._why_not(request, event)
        if why_not is not None:
            code, reason = why_not
            self._count(f"migration_refused_{code}")
            return (Fail(request_id=event.request_id, code=code, reason=reason),)
        attempt = request.attempt + 1
        self._count("migrations_ongoing_request" if event.emitted_tokens else "migrations_new_request")
        return (
            Migrate(
                request_id=event.request_id,
                attempt=attempt,
                excluded=_still_failed(request, view),
                reason=f"attempt {attempt} of {self.settings.limit}, {event.emitted_tokens} tokens carried",
            ),
        )

    def counters(self) -> dict[str, int]:
        """Counts for the report."""
        return dict(sorted(self._counts.items()))

    def _why_not(self, request: RequestView, event: RequestInterrupted) -> tuple[str, str] | None:
        """Code and text of why the request cannot go on elsewhere; None when it can."""
        limit, longest = self.settings.limit, self.settings.max_seq_len
        lost = f"worker {event.worker_id}: {event.reason}, {event.emitted_tokens} tokens delivered"
        if not limit:
            return "worker_lost", f"{lost}; migration is off"
        if request.attempt >= limit:
            return "migration_limit", f"{lost}; sent again {request.attempt} times, the limit is {limit}"
        seq_len = _prompt_tokens(request.arrived) + event.emitted_tokens
        if longest is not None and seq_len > longest:
            return "migration_max_seq_len", f"{lost}; {seq_len} tokens exceed migration_max_seq_len {longest}"
        return None

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
