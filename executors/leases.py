"""The ledger of split prefills: which KV that a prefill worker holds may still be asked for, and by whom.

vLLM does not check its own lease: parameters over blocks that were given to another request since are answered 200,
with tokens made from somebody else's KV. So parameters leave this process once, while their lease surely runs, and only
for the incarnation of the worker that granted them. Pure: every time is handed in, on our own monotonic clock, and a
grant counts from *before* the prefill answer was read. Whatever is past its due time is prefilled again, never tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from policies.cluster.ids import RequestId, WorkerId
from policies.errors import ConfigError, InvariantError
from policies.frozen import frozen

MARGIN_SHARE: Final = 0.2
"""The least share of a lease that is kept off its end: clocks run apart, and an answer takes its way."""


class LeaseState(Enum):
    """held -> sent -> fetched | given back | void, and from held also expired."""

    HELD = "held"
    SENT = "sent"
    FETCHED = "fetched"
    GIVEN_BACK = "given_back"
    EXPIRED = "expired"
    VOID = "void"


OPEN: Final = frozenset({LeaseState.HELD, LeaseState.SENT})


class Refusal(Enum):
    """Why parameters are not sent."""

    UNKNOWN = "no such lease"
    SENT_BEFORE = "sent before"
    OVER = "the lease is over"
    PAST_DUE = "past due"
    OTHER_INCARNATION = "the worker that granted it is gone"


class LeaseKey(NamedTuple):
    """One prefill that waits to be fetched. `incarnation` tells two lives of the same worker apart."""

    worker_id: WorkerId
    incarnation: int
    remote_request_id: str


@frozen
class LeaseTerms:
    """How long a prefill worker keeps KV that nobody fetched, and how much of that we do not use (seconds)."""

    lease_s: float
    margin_s: float

    @staticmethod
    def of(lease_s: float, health_period_s: float, margin_s: float | None = None) -> LeaseTerms:
        """The margin is at least a fifth of the lease and at least one health period. Raises ConfigError where nothing
        of the lease is left, or a smaller margin is asked for."""
        least_s = max(MARGIN_SHARE * lease_s, health_period_s)
        margin_s = least_s if margin_s is None else margin_s
        if margin_s < least_s:
            raise ConfigError(
                f"margin_s = {margin_s:g} is below {least_s:g} s (a fifth of lease_s = {lease_s:g}, and one health "
                f"period of {health_period_s:g} s); leave it out or raise it"
            )
        if margin_s >= lease_s:
            raise ConfigError(
                f"lease_s = {lease_s:g} leaves nothing after a margin of {margin_s:g} s; raise kv_lease_duration of "
                "the engine, or probe its health more often"
            )
        return LeaseTerms(lease_s=lease_s, margin_s=margin_s)


@dataclass(slots=True)
class Lease:
    """An entry. `due_s`: parameters are not sent at or after that time. `to` is the decode worker that has them."""

    key: LeaseKey
    request_id: RequestId
    due_s: float
    state: LeaseState = LeaseState.HELD
    to: WorkerId | None = None


class LeaseLedger:
    """Every split prefill of one run. Entries that are over are kept until their due time, so that a second use of the
    same parameters is told from a made-up one; what becomes of them is counted for ever."""

    def __init__(self) -> None:
        self._leases: dict[LeaseKey, Lease] = {}
        self._incarnations: dict[WorkerId, int] = {}
        self._ended: Counter[LeaseState] = Counter()
        self.refused: Counter[Refusal] = Counter()
        self.granted = 0
        self.sent = 0
        self.suspect = 0

    # ------------------------------------------------------------ workers

    def worker_up(self, worker_id: WorkerId, incarnation: int) -> list[Lease]:
        """This incarnation is the one that counts from now on; what an earlier one granted is void and returned."""
        known = self._incarnations.get(worker_id)
        self._incarnations[worker_id] = incarnation
        return self.worker_gone(worker_id, forget=False) if known not in (None, incarnation) else []

    def worker_lost(self, worker_id: WorkerId) -> list[Lease]:
        """A worker is gone. What it held is void, what it had been sent and not fetched is given back; returns both."""
        void = self.worker_gone(worker_id)
        return void + self._end(LeaseState.GIVEN_BACK, lambda lease: lease.to == worker_id)

    def worker_gone(self, worker_id: WorkerId, *, forget: bool = True) -> list[Lease]:
        """Void what this worker holds, also what was sent already: nobody can fetch it any more."""
        if forget:
            self._incarnations.pop(worker_id, None)
        return self._end(
            LeaseState.VOID,
            lambda lease: (
                lease.key.worker_id == worker_id and lease.key.incarnation != self._incarnations.get(worker_id)
            ),
        )

    # ------------------------------------------------------------ one lease

    def grant(self, key: LeaseKey, request_id: RequestId, granted_s: float, terms: LeaseTerms) -> Lease:
        """A prefill has ended; `granted_s` is from before its answer was read.

        A grant of an incarnation that is not up is void at once. Raises InvariantError for an id used before.
        """
        if key in self._leases:
            raise InvariantError(f"lease {key} was granted before: ids of prefill legs must never be used twice")
        lease = Lease(key, request_id, granted_s + terms.lease_s - terms.margin_s)
        self._leases[key] = lease
        self.granted += 1
        if self._incarnations.get(key.worker_id) != key.incarnation:
            self._close(lease, LeaseState.VOID)
        return lease

    def send(self, key: LeaseKey, to: WorkerId, now_s: float) -> Refusal | None:
        """Take the right to send the parameters to `to`: None, and it is used up; else why they must not be sent.

        A lease that is refused for its time is expired from then on.
        """
        lease = self._leases.get(key)
        refusal = self._refusal(lease, now_s)
        if lease is None or refusal is not None:
            assert refusal is not None
            self.refused[refusal] += 1
            if lease is not None and refusal is Refusal.PAST_DUE:
                self._close(lease, LeaseState.EXPIRED)
            return refusal
        lease.state, lease.to = LeaseState.SENT, to
        self.sent += 1
        return None

    def fetched(self, key: LeaseKey) -> bool:
        """The decode worker has the KV (its first token came). False where the lease was not out with anybody."""
        return self._close_if(key, LeaseState.FETCHED, {LeaseState.SENT})

    def given_back(self, key: LeaseKey) -> bool:
        """The prefill worker was told that nobody comes, or a leg that had the parameters was stopped."""
        return self._close_if(key, LeaseState.GIVEN_BACK, OPEN)

    # ------------------------------------------------------------ time and books

    def expire(self, now_s: float) -> list[Lease]:
        """End what is held and due, forget what is over and due; returns the former. What was sent stays open until its
        leg ends: from then on the decode worker's heartbeat keeps it."""
        over = self._end(LeaseState.EXPIRED, lambda lease: lease.state is LeaseState.HELD and lease.due_s <= now_s)
        keep = {k: lease for k, lease in self._leases.items() if lease.state in OPEN or lease.due_s > now_s}
        self._leases = keep
        return over

    def next_due_s(self) -> float | None:
        """When `expire` has something to do next; None while nothing is held."""
        return min((lease.due_s for lease in self._leases.values() if lease.state is LeaseState.HELD), default=None)

    def suspects(self, worker_id: WorkerId, incarnation: int) -> list[Lease]:
        """Somebody fetched from this worker after it had let go (`notifications_after_expiry` rose): which requests it
        may have been. Their tokens are not to be trusted, whoever is asked."""
        taken = (LeaseState.SENT, LeaseState.FETCHED)
        found = [
            lease for key, lease in self._leases.items() if key[:2] == (worker_id, incarnation) and lease.state in taken
        ]
        self.suspect += len(found)
        return found

    def counts(self) -> dict[str, int]:
        """By state, open ones now and ended ones ever; granted is their sum. Beside them sent, refused, suspect."""
        states = Counter(lease.state for lease in self._leases.values() if lease.state in OPEN) + self._ended
        return {
            **{state.value: states[state] for state in LeaseState},
            "granted": self.granted,
            "ever_sent": self.sent,
            "refused": self.refused.total(),
            "suspect": self.suspect,
        }

    def _refusal(self, lease: Lease | None, now_s: float) -> Refusal | None:
        if lease is None:
            return Refusal.UNKNOWN
        if lease.state is LeaseState.VOID:
            return Refusal.OTHER_INCARNATION
        if lease.state is not LeaseState.HELD:
            return Refusal.OVER if lease.to is None else Refusal.SENT_BEFORE
        return Refusal.PAST_DUE if now_s >= lease.due_s else None

    def _end(self, state: LeaseState, which: Callable[[Lease], bool]) -> list[Lease]:
        ended = [lease for lease in self._leases.values() if lease.state in OPEN and which(lease)]
        for lease in ended:
            self._close(lease, state)
        return ended

    def _close_if(self, key: LeaseKey, state: LeaseState, allowed: Iterable[LeaseState]) -> bool:
        lease = self._leases.get(key)
        if lease is None or lease.state not in allowed:
            return False
        self._close(lease, state)
        return True

    def _close(self, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        self._ended[state] += 1
