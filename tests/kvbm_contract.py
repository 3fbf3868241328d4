"""What must hold for any eviction order and any offload filter: inherit, and say how one is made."""

from __future__ import annotations

from collections.abc import Iterable

from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from policies.cluster.blocks import BlockRun, Branch, ContentTree
from policies.kvbm.eviction.order import EvictionOrder
from policies.kvbm.lifecycle import BlockState, Cause
from policies.kvbm.offload import Candidate, OffloadFilter
from policies.kvbm.spans import Span, Spans
from policies.kvbm.store import Hold, TierStore

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "match", "release", "release", "evict", "evict"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=7),
        st.integers(1, 5),
    ),
    min_size=3,
    max_size=40,
)
CAPACITY = 24
EXAMPLES = examples(60, suppress_health_check=list(HealthCheck))  # one test for many classes, none of them with state


class EvictionContract:
    """Only what nobody holds goes, as much as was asked for at most, everything in the end, and always the same."""

    def make(self) -> EvictionOrder:
        raise NotImplementedError

    @EXAMPLES
    @given(STEPS)
    def test_only_unused_blocks_go_and_counts_add_up(self, steps: list) -> None:
        self._life(steps)

    @EXAMPLES
    @given(STEPS)
    def test_the_same_life_gives_the_same_victims(self, steps: list) -> None:
        assert self._life(steps) == self._life(steps)

    def _life(self, steps: list) -> list[tuple[int, int, int]]:
        tree = ContentTree(1, 1)
        store = TierStore(CAPACITY, self.make())
        holds: list[list[Hold]] = []
        victims: list[tuple[int, int, int]] = []
        paths = []
        for what, keys, n in steps:
            path = tree.path(keys, len(keys))
            paths.append(path)
            if what == "store":
                lot = store.reserve(len(keys))
                if lot is not None:
                    store.advance(lot, Cause.LOAD)
                    holds.append([hold for run in path.runs() for hold in store.register(lot, run, 0.0)[0]])
            elif what == "match":
                holds.append(store.upgrade(store.match(path.pieces, 0, len(keys))))
            elif what == "release" and holds:
                store.release(holds.pop(n % len(holds)))
            elif what == "evict":
                victims += self._evict(store, n)
            store.audit()
            for hold in (hold for held in holds for hold in held):
                assert store.lacking(hold.stretch.branch, hold.lo, hold.hi) == [], "a block that is held has gone"
        for held in holds:
            store.release(held)
        victims += self._evict(store, CAPACITY)
        assert store.gauges[BlockState.FREE] == CAPACITY, "nothing is kept for ever"
        return victims

    @staticmethod
    def _evict(store: TierStore, blocks: int) -> list[tuple[int, int, int]]:
        gone = [(g.run.branch.uid, g.run.lo, g.run.hi) for g in store.evict(blocks, 0.0)]
        assert sum(hi - lo for _, lo, hi in gone) <= blocks
        return gone


class _Place:
    """A target with content, for filters to look at."""

    def __init__(self) -> None:
        self.held = Spans()

    def absent(self, branch: Branch, lo: int, hi: int) -> Iterable[Span]:
        return self.held.lacking(branch, lo, hi)

    def blocks_of(self, tenant: str) -> int:
        return self.held.blocks


class OffloadContract:
    """What passes is part of what was asked about, ascending, and asking changes nothing."""

    def make(self) -> OffloadFilter:
        raise NotImplementedError

    @EXAMPLES
    @given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20), st.booleans()), min_size=1, max_size=20))
    def test_what_passes_is_part_of_the_candidate(self, steps: list[tuple[int, int, bool]]) -> None:
        branch = ContentTree(1, 1).private()
        place, made = _Place(), self.make()
        for n, (lo, blocks, is_used) in enumerate(steps):
            run = BlockRun(branch, lo, lo + blocks)
            if is_used:
                made.used(*run, float(n))
            before = list(place.held)
            passed = list(made.passes(Candidate(run, tenant="a"), place, float(n)))
            assert passed == list(made.passes(Candidate(run, tenant="a"), place, float(n))), "asking changes nothing"
            assert list(place.held) == before
            ends = [end for span in passed for end in span]
            assert ends == sorted(ends)
            assert all(run.lo <= a < b <= run.hi for a, b in passed)
            for span in passed:
                place.held.add(branch, *span)
