"""A registry of what lies outside a worker, in tiers that all share and in host memory of peers, as one worker asks it.

A look-up takes time, and its answer is a hint: it says what was on record when the question was asked, and the read may
still fail. What was said to be nowhere is not asked for again for a while. Whoever owns the clock carries questions and
answers; nothing here asks anybody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import Tier, WorkerId
from policies.frozen import frozen
from policies.kvbm.health import NegativeCache
from policies.kvbm.look_up import Pieces, blocks_of
from policies.kvbm.spans import Span, Spans, reach_together
from policies.kvbm.store import Found, TierStore

LOOK_UP_TIMEOUT_S = 0.020
"""A look-up without an answer by then is a miss."""
RENEWALS = 3
"""How often in the time of a lease its owner renews it: every 20 s of 60."""


@frozen
class RegistryRules:
    """How long a look-up takes, how long entries outlast an owner that is not heard of, how long it is known that
    nobody has a block."""

    lookup_s: float
    lease_s: float
    negative_s: float


class Lease:
    """What one owner has on record holds as long as it can renew its one lease, from `now_s` on every third of it; and
    if it cannot, until the lease that it renewed last is over."""

    __slots__ = ("_lease_s", "_since_s", "_until_s")

    def __init__(self, lease_s: float, now_s: float) -> None:
        self._lease_s = lease_s
        self._since_s = now_s
        self._until_s = math.inf

    @property
    def is_renewed(self) -> bool:
        """Whether its owner can reach the registry."""
        return self._until_s == math.inf

    def holds(self, now_s: float) -> bool:
        """Whether what its owner has put is on record."""
        return now_s < self._until_s

    def cut(self, now_s: float) -> None:
        """The owner cannot renew it from now on."""
        if self.is_renewed:
            every_s = self._lease_s / RENEWALS
            spent_s = (now_s - self._since_s) % every_s if every_s else 0.0
            self._until_s = now_s - spent_s + self._lease_s

    def back(self, now_s: float) -> None:
        """The owner can reach the registry again, and puts all that it has at once."""
        self._since_s, self._until_s = now_s, math.inf


class Told:
    """A store as far as an answer told of it: what came since is not known of, what has left since is not there."""

    __slots__ = ("_spans", "_store")

    def __init__(self, store: TierStore, spans: Spans) -> None:
        self._store = store
        self._spans = spans

    def find(self, branch: Branch, lo: int, hi: int) -> list[Found]:
        """Those of the blocks [lo, hi) that are there from `lo` on without a gap."""
        hi = min(hi, self._spans.reach(branch, lo))
        return self._store.find(branch, lo, hi) if lo < hi else []

    def lacking(self, branch: Branch, lo: int, hi: int) -> list[Span]:
        """Those of the blocks [lo, hi) that are not there, or not known to be."""
        gone = [gap for a, b in self._spans.common(branch, lo, hi) for gap in self._store.lacking(branch, a, b)]
        spans = sorted([*self._spans.lacking(branch, lo, hi), *gone])
        joined: list[Span] = []
        for a, b in spans:
            if joined and joined[-1][1] == a:
                a = joined.pop()[0]
            joined.append((a, b))
        return joined


class Answer:
    """What was on record for a prompt, by tier that all share and by peer (those that had most of it first)."""

    __slots__ = ("_peers", "_shared")

    def __init__(self, shared: Mapping[Tier, Spans], peers: Mapping[WorkerId, Spans]) -> None:
        self._shared = shared
        self._peers = peers

    @property
    def peers(self) -> Sequence[WorkerId]:
        return tuple(self._peers)

    def of_tier(self, tier: Tier, store: TierStore) -> Told:
        """A tier that all share, as far as it was told of."""
        return Told(store, self._shared.get(tier, _NONE))

    def of_peer(self, owner: WorkerId, store: TierStore) -> Told:
        """Host memory of a peer, as far as it was told of."""
        return Told(store, self._peers[owner])

    def reach(self, branch: Branch, at: int) -> int:
        """How far somebody was said to have each block from `at` on."""
        return reach_together([*self._shared.values(), *self._peers.values()], branch, at)


_NONE = Spans()
NOTHING = Answer({}, {})
"""Of a look-up that nobody answered, or that was not worth asking."""


class Ask:
    """A question: who has which of these blocks of a prompt? `first` is the first one that the asker lacks, and `end`
    is before the first one that it does not ask for. Over at some time after it was asked, with an `answer`; `unknown`
    is the first block that nobody has then."""

    __slots__ = ("answer", "end", "first", "is_over", "pieces", "runs", "unknown")

    def __init__(self, pieces: Pieces, runs: Sequence[BlockRun], first: int, end: int) -> None:
        self.pieces = pieces
        self.runs = runs
        self.first = first
        self.end = end
        self.answer: Answer | None = None
        self.unknown: BlockRun | None = None
        self.is_over = False


class RegistryView:
    """One worker's way to the registry. `is_reached`: what it says gets there now. `asked` counts look-ups, `late`
    those that nobody answered in time."""

    __slots__ = ("_owes", "asked", "is_reached", "late", "negative", "rules")

    def __init__(self, rules: RegistryRules) -> None:
        self.rules = rules
        self.negative = NegativeCache(rules.negative_s)
        self.is_reached = True
        self._owes: list[tuple[Spans, BlockRun]] = []
        self.asked = 0
        self.late = 0

    def question(self, pieces: Pieces, first: BlockRun, usable: int, blocks: int, now_s: float) -> Ask | None:
        """What to ask for the `blocks` of a prompt, of which the asker lacks the `first` one, and `usable` need not be
        computed; None if that is known to be nowhere. From such a block on nothing is asked."""
        runs = blocks_of(pieces, blocks)
        for n, run in enumerate(runs):
            lo = max(run.lo, first.lo)
            unknown = self.negative.first_in(BlockRun(run.branch, lo, run.hi), now_s) if lo < run.hi else None
            if unknown is not None:
                if unknown == first.lo:
                    return None
                asked = [*runs[:n], BlockRun(run.branch, run.lo, unknown)]
                return Ask(pieces, asked, first.lo, min(usable, unknown))
        return Ask(pieces, runs, first.lo, usable)

    def asks(self, ask: Ask, answer: Answer, unknown: BlockRun | None, *, is_out: bool) -> float:
        """The question is on its way, `answer` what it will be unless the registry `is_out`; returns how long that
        takes."""
        self.asked += 1
        if self.is_reached and not is_out and self.rules.lookup_s <= LOOK_UP_TIMEOUT_S:
            ask.answer, ask.unknown = answer, unknown
            return self.rules.lookup_s
        self.late += 1
        ask.answer = NOTHING
        return LOOK_UP_TIMEOUT_S

    def answered(self, ask: Ask, now_s: float) -> None:
        """The answer is there, or is waited for no longer."""
        ask.is_over = True
        if ask.unknown is not None:
            self.negative.add(ask.unknown, now_s)

    def put(self, unlisted: Spans, runs: Sequence[BlockRun]) -> None:
        """This worker has written blocks to a tier that all share: they are put on record, or `unlisted` until it can
        reach the registry."""
        for run in runs:
            self.negative.forget(run)
            if self.is_reached:
                unlisted.remove(*run)
            else:
                unlisted.add(*run)
                self._owes.append((unlisted, run))

    def cut(self) -> None:
        """The registry cannot be reached any more."""
        self.is_reached = False

    def back(self) -> None:
        """The registry can be reached again: what this worker owes it is put."""
        self.is_reached = True
        for unlisted, run in self._owes:
            unlisted.remove(*run)
        self._owes.clear()
