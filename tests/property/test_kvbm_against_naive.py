"""Tiers in runs of blocks against tiers block by block: the same blocks are found, held and evicted, in every order."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from naive_tier import NaiveTier, Name

from policies.cluster.blocks import BlockPath, BlockRun, ContentTree
from policies.kvbm.build import EVICTIONS, KvSettings, build_eviction
from policies.kvbm.eviction.belady import most_hits
from policies.kvbm.eviction.multi_lru import MultiLru
from policies.kvbm.lifecycle import BlockState, Cause
from policies.kvbm.sketch import Sketch, chain_of
from policies.kvbm.spans import Spans
from policies.kvbm.store import Gone, Hold, TierStore

PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=7)
STEP = st.tuples(
    st.sampled_from(["store"] * 4 + ["match"] * 3 + ["release"] * 5 + ["evict"] * 3 + ["drop"]),
    PROMPT,
    st.integers(0, 3),
    st.integers(1, 6),
)


class Twice:
    """One tier, both ways."""

    def __init__(self, rank: str, duplicates: str, capacity: int) -> None:
        self.tree = ContentTree(1, 1)
        sketch = Sketch(64)
        self.sketch = sketch
        self.names: dict[tuple[int, int], Name] = {}
        self.blocks: dict[Name, tuple] = {}
        self.paths: list[BlockPath] = []  # keep the tree alive: a branch that nobody holds is forgotten
        settings = KvSettings(sketch=lambda: sketch)
        self.store = TierStore(capacity, build_eviction(rank, settings), duplicates=duplicates)
        levels = MultiLru(sketch)
        self.naive = NaiveTier(capacity, rank, duplicates, lambda name: levels.level(sketch.count(self.chain(name))))
        self.held: list[tuple[list[Hold], list]] = []

    def chain(self, name: Name) -> int:
        branch, block = self.blocks[name]
        return chain_of(branch, block)

    def path(self, keys: list[int]) -> BlockPath:
        path = self.tree.path(keys, len(keys))
        self.paths.append(path)
        for run in path.runs():
            for block in range(run.lo, run.hi):
                name = tuple(keys[: block + 1])
                assert self.names.setdefault((run.branch.uid, block), name) == name
                self.blocks.setdefault(name, (run.branch, block))
        return path

    def gone(self, gone: list[Gone]) -> list[tuple[Name, bool]]:
        return [(self.names[g.run.branch.uid, b], g.is_last) for g in gone for b in range(g.run.lo, g.run.hi)]

    def put(self, keys: list[int], lo: int) -> None:
        path = self.path(keys)
        runs = [BlockRun(r.branch, max(r.lo, lo), r.hi) for r in path.runs() if r.hi > lo]
        blocks = sum(run.hi - run.lo for run in runs)
        if not blocks or blocks > self.naive.free:
            return
        lot = self.store.reserve(blocks)
        assert lot is not None
        self.store.advance(lot, Cause.LOAD)
        holds: list[Hold] = []
        for run in runs:
            held, _ = self.store.register(lot, run, 0.0)
            holds += held
        names = [tuple(keys[: at + 1]) for at in range(lo, len(keys))]
        self.held.append((holds, self.naive.register(names)))

    def match(self, keys: list[int], lo: int) -> None:
        path = self.path(keys)
        found = self.store.match(path.pieces, lo, len(keys))
        held = self.naive.match([tuple(keys[: at + 1]) for at in range(lo, len(keys))])
        assert sum(part.hi - part.lo for part in found) == len(held)
        for part in found:
            self.sketch.touch_run(part.stretch.branch, part.lo, part.hi)
        holds = self.store.upgrade(found)
        assert sum(hold.hi - hold.lo for hold in holds) == len(held), "what was just found is still there"
        if held:
            self.held.append((holds, held))

    def check(self) -> None:
        store, naive = self.store, self.naive
        store.audit()
        assert store.gauges[BlockState.FREE] == naive.free
        assert store.gauges[BlockState.REGISTERED] == sum(copy.refs > 0 for copy in naive.copies)
        there = {copy.name for copy in naive.copies}
        for name, (branch, block) in self.blocks.items():
            assert (store.lacking(branch, block, block + 1) == []) is (name in there)


@examples(300)
@given(
    st.sampled_from(sorted(EVICTIONS)),
    st.sampled_from(["allow", "reject"]),
    st.integers(3, 14),
    st.lists(STEP, min_size=5, max_size=40),
)
def test_runs_of_blocks_are_what_single_blocks_are(rank: str, duplicates: str, capacity: int, steps: list) -> None:
    both = Twice(rank, duplicates, capacity)
    for what, keys, lo, n in steps:
        lo = min(lo, len(keys))
        if what == "store":
            both.put(keys, lo)
        elif what == "match":
            both.match(keys, lo)
        elif what == "release" and both.held:
            holds, held = both.held.pop(n % len(both.held))
            both.store.release(holds)
            both.naive.release(held)
        elif what == "evict":
            assert sorted(both.gone(both.store.evict(n, 0.0))) == sorted(both.naive.evict(n))
        elif what == "drop":
            path = both.path(keys)
            for run in path.runs():
                if run.hi > lo:
                    both.store.drop(run.branch, max(run.lo, lo), run.hi, 0.0)
            both.naive.drop([tuple(keys[: at + 1]) for at in range(lo, len(keys))])
        both.check()
    for holds, held in both.held:
        both.store.release(holds)
        both.naive.release(held)
    both.check()
    order = []
    while gone := both.store.evict(1, 0.0):
        order += both.gone(gone)
    assert order == both.naive.evict(10_000)
    assert both.store.gauges[BlockState.FREE] == capacity, "everything can be evicted once nobody holds anything"


@examples(300)
@given(st.lists(st.tuples(PROMPT, st.integers(1, 5)), min_size=3, max_size=25))
def test_lineage_never_evicts_a_parent_before_a_child(steps: list[tuple[list[int], int]]) -> None:
    both = Twice("lineage", "reject", 64)
    for keys, n in steps:
        both.put(keys, 0)
        if both.held:
            holds, held = both.held.pop()
            both.store.release(holds)
            both.naive.release(held)
        for _ in range(n):
            for name, _ in both.gone(both.store.evict(1, 0.0)):
                children = [other for other in both.blocks if other[:-1] == name]
                assert all(both.store.lacking(b, at, at + 1) for b, at in (both.blocks[c] for c in children))


@examples(300)
@given(st.sampled_from(sorted(EVICTIONS)), st.integers(1, 8), st.lists(PROMPT, min_size=2, max_size=25))
def test_no_order_finds_more_than_the_one_that_knows_the_future(rank: str, capacity: int, prompts: list) -> None:
    both = Twice(rank, "reject", capacity)
    hits = 0
    for keys in prompts:
        path = both.path(keys)
        found = both.store.match(path.pieces, 0, len(keys))
        start = found[-1].hi if found else 0
        hits += start
        holds = both.store.upgrade(found)
        both.store.evict(max(0, len(keys) - start - both.store.gauges[BlockState.FREE]), 0.0)
        room = min(both.store.gauges[BlockState.FREE], len(keys) - start)
        lot = both.store.reserve(room)
        assert lot is not None
        both.store.advance(lot, Cause.LOAD)
        for run in path.runs():
            lo, hi = max(run.lo, start), min(run.hi, start + room)
            if lo < hi:
                holds += both.store.register(lot, BlockRun(run.branch, lo, hi), 0.0)[0]
        if lot.blocks:
            both.store.free(lot, Cause.LOAD_CANCELLED)
        both.store.release(holds)
        both.store.audit()
    names = [[tuple(keys[: at + 1]) for at in range(len(keys))] for keys in prompts]
    assert hits <= most_hits(names, capacity)


@examples(300)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(1, 6)), max_size=30), st.integers(0, 15))
def test_spans_are_sets(steps: list[tuple[bool, int, int]], at: int) -> None:
    branch = ContentTree(1, 1).private()
    spans, blocks = Spans(), set()
    for adds, lo, n in steps:
        run = set(range(lo, lo + n))
        changed = spans.add(branch, lo, lo + n) if adds else spans.remove(branch, lo, lo + n)
        assert {b for a, c in changed for b in range(a, c)} == (run - blocks if adds else run & blocks)
        blocks = blocks | run if adds else blocks - run
        assert {b for r in spans for b in range(r.lo, r.hi)} == blocks
        assert spans.blocks == len(blocks)
        assert {b for a, c in spans.lacking(branch, lo, lo + n) for b in range(a, c)} == run - blocks
        end = at
        while end in blocks:
            end += 1
        assert spans.reach(branch, at) == end
