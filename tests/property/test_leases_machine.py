"""Random lives of the ledger of split prefills, against an onlooker who only knows what must never happen."""

from __future__ import annotations

from collections import Counter

from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from executors.leases import LeaseKey, LeaseLedger, LeaseState, LeaseTerms, Refusal
from policies.cluster.ids import RequestId, WorkerId

WORKERS = st.integers(0, 2).map(WorkerId)
TERMS = LeaseTerms.of(10.0, 1.0)
USABLE_S = 8.0
PICK = st.integers(0, 1000)


class Leases(RuleBasedStateMachine):
    """Three workers that come and go, each both prefilling and decoding."""

    @initialize()
    def start(self) -> None:
        self.ledger = LeaseLedger()
        self.now_s = 0.0
        self.up = {WorkerId(n): 0 for n in range(3)}
        self.made = 0
        self.granted: dict[LeaseKey, float] = {}
        self.sent: Counter[LeaseKey] = Counter()
        self.out: dict[LeaseKey, WorkerId] = {}
        for worker, incarnation in self.up.items():
            assert self.ledger.worker_up(worker, incarnation) == []

    def key(self, pick: int) -> LeaseKey:
        return list(self.granted)[pick % len(self.granted)]

    @rule(worker=WORKERS, stale=st.booleans(), read_s=st.floats(0, 3))
    def grant(self, worker: WorkerId, stale: bool, read_s: float) -> None:
        incarnation = self.up.get(worker, 99) - (1 if stale else 0)
        self.made += 1
        key = LeaseKey(worker, incarnation, f"r{self.made}")
        lease = self.ledger.grant(key, RequestId(f"q{self.made}"), self.now_s - read_s, TERMS)
        self.granted[key] = self.now_s - read_s
        assert (lease.state is LeaseState.HELD) == (self.up.get(worker) == incarnation)

    @rule(pick=PICK, to=WORKERS)
    def send(self, pick: int, to: WorkerId) -> None:
        if not self.granted:
            assert self.ledger.send(LeaseKey(to, 0, "never-was"), to, self.now_s) is Refusal.UNKNOWN
            return
        key = self.key(pick)
        if self.ledger.send(key, to, self.now_s) is None:
            self.sent[key] += 1
            self.out[key] = to
            assert self.now_s < self.granted[key] + USABLE_S, "sent past due"
            assert self.up.get(key.worker_id) == key.incarnation, "sent to a worker that is gone"

    @rule(pick=PICK)
    def fetch(self, pick: int) -> None:
        if self.granted:
            key = self.key(pick)
            assert self.ledger.fetched(key) == (self.out.pop(key, None) is not None)

    @rule(pick=PICK)
    def give_back(self, pick: int) -> None:
        if self.granted:
            key = self.key(pick)
            done = self.ledger.given_back(key)
            assert done or key not in self.out
            self.out.pop(key, None)

    @rule(worker=WORKERS)
    def lose(self, worker: WorkerId) -> None:
        self.up.pop(worker, None)
        for lease in self.ledger.worker_lost(worker):
            gone = lease.key.worker_id == worker
            assert lease.state is (LeaseState.VOID if gone else LeaseState.GIVEN_BACK)
            self.out.pop(lease.key, None)
        assert worker not in self.out.values()
        assert all(key.worker_id != worker for key in self.out)

    @rule(worker=WORKERS)
    def restart(self, worker: WorkerId) -> None:
        self.made += 1
        self.up[worker] = self.made
        for lease in self.ledger.worker_up(worker, self.made):
            assert lease.key.worker_id == worker
            assert lease.state is LeaseState.VOID
            self.out.pop(lease.key, None)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def expire(self) -> None:
        for lease in self.ledger.expire(self.now_s):
            assert lease.due_s <= self.now_s
            assert lease.key not in self.out, "what was sent does not expire"
        due_s = self.ledger.next_due_s()
        assert due_s is None or due_s > self.now_s

    @invariant()
    def sent_once(self) -> None:
        assert not self.sent or max(self.sent.values()) == 1

    @invariant()
    def balanced(self) -> None:
        counts = self.ledger.counts()
        assert counts["granted"] == len(self.granted) == sum(counts[state.value] for state in LeaseState)
        assert counts["ever_sent"] == self.sent.total()
        assert counts["sent"] == len(self.out)


Leases.TestCase.settings = examples(40, stateful_step_count=30)
TestLeases = Leases.TestCase
