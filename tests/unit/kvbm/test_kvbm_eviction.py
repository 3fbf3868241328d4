"""Which block goes first, by order: the worked examples E1 to E7, and the bound that knows the future."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from kvbm_builders import Chains, put

from policies.errors import CapabilityError, ConfigError
from policies.kvbm.build import KvSettings, build_eviction
from policies.kvbm.eviction.belady import most_hits
from policies.kvbm.eviction.multi_lru import MultiLru
from policies.kvbm.eviction.order import EvictionOrder
from policies.kvbm.sketch import MOST, Sketch, chain_of
from policies.kvbm.store import TierStore

ORDER = ("a1", "a2", "a3", "b1", "b2", "c1")
E1 = "a1 a2 a3 b1 b2 c1"
E3 = "a3 a2 a1 b2 b1 c1 +a1 +a2 a2 a1"  # +x is a hit


def evictions(
    name: str, releases: str, *, hits: Mapping[str, int] | None = None, pinned: str | None = None, keep: int = 0
) -> tuple[list[str], tuple[int, int]]:
    """The order in which blocks go, and the usable prefix of a and b once all but `keep` have gone."""
    chains = Chains()
    sketch = Sketch(1000)
    for block, count in (hits or {}).items():
        branch, at, _ = chains.run(block)
        for _ in range(count):
            sketch.touch(chain_of(branch, at))
    store = TierStore(len(ORDER), build_eviction(name, KvSettings(sketch=lambda: sketch)))
    holds = {block: put(store, chains.run(block)) for block in ORDER}
    for step in releases.split():
        if step.startswith("+"):
            holds[step[1:]] = store.upgrade(store.find(*chains.run(step[1:])))
        else:
            store.release(holds[step])
    if pinned is not None:
        store.upgrade(store.find(*chains.run(pinned)))
    gone: list[str] = []
    while len(gone) < len(ORDER) - keep and (out := store.evict(1, 0.0)):
        store.audit()
        gone += [block for each in out for block in chains.names(each.run)]
    prefixes = tuple(sum(part.hi - part.lo for part in store.find(chains.branch(name), 0, 3)) for name in ("a", "b"))
    return gone, prefixes  # type: ignore[return-value]


LFU = {"a1": 7, "a2": 3}


@pytest.mark.parametrize(
    ("case", "name", "releases", "order"),
    [
        ("E1", "lru", E1, "a1 a2 a3 b1 b2 c1"),
        ("E1", "lineage", E1, "a3 a2 a1 b2 b1 c1"),
        ("E1", "multi_lru", E1, "a3 b1 b2 c1 a2 a1"),
        ("E1", "fifo", E1, "a1 a2 a3 b1 b2 c1"),
        ("E3", "lru", E3, "a3 b2 b1 c1 a2 a1"),
        ("E3", "lineage", E3, "a3 b2 b1 c1 a2 a1"),
        ("E3", "multi_lru", E3, "a3 b2 b1 c1 a2 a1"),
        ("E3", "fifo", E3, "a1 a2 a3 b1 b2 c1"),
    ],
)
def test_e1_and_e3_in_which_order_blocks_go(case: str, name: str, releases: str, order: str) -> None:
    assert evictions(name, releases, hits=LFU)[0] == order.split(), case


@pytest.mark.parametrize(
    ("case", "name", "releases", "prefixes"),
    [
        ("E2", "lru", E1, (0, 2)),
        ("E2", "lineage", E1, (1, 2)),
        ("E2", "multi_lru", E1, (2, 0)),
        ("E2", "fifo", E1, (0, 2)),
        ("E4", "lru", E3, (2, 1)),
        ("E4", "lineage", E3, (2, 1)),
        ("E4", "multi_lru", E3, (2, 1)),
        ("E4", "fifo", E3, (0, 2)),
    ],
)
def test_e2_and_e4_what_is_left_to_find(case: str, name: str, releases: str, prefixes: tuple[int, int]) -> None:
    assert evictions(name, releases, hits=LFU, keep=4)[1] == prefixes, case


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", "a1 a3 b1 b2 c1"),
        ("lineage", "a3 b2 b1 c1"),
        ("multi_lru", "a3 b1 b2 c1 a1"),
        ("fifo", "a1 a3 b1 b2 c1"),
    ],
)
def test_e5_a_pinned_block_stays_and_keeps_its_parent_where_lineage_counts(name: str, order: str) -> None:
    assert evictions(name, E1, hits=LFU, pinned="a2")[0] == order.split()


def test_e6_levels_by_count() -> None:
    order = MultiLru(Sketch(100))
    assert [order.level(min(n, MOST)) for n in (0, 1, 2, 5, 6, 14, 15, 40)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_e7_counts_are_halved_after_ten_times_the_capacity() -> None:
    sketch = Sketch(100)
    for _ in range(8):
        sketch.touch(1)
    for n in range(991):
        sketch.touch(1000 + n)
    assert sketch.halvings == 0
    assert sketch.count(1) >= 8
    sketch.touch(2)
    assert sketch.halvings == 1
    assert sketch.count(1) <= MOST // 2


def test_a_counter_stops_at_fifteen() -> None:
    sketch = Sketch(1000)
    for _ in range(40):
        sketch.touch(7)
    assert sketch.count(7) == MOST
    assert sketch.count(8) == 0


def test_a_prefix_that_others_stand_on_outlives_them() -> None:
    """Branches of a tree: b hangs on a's first block, so a2 may go and a1 may not."""
    from policies.cluster.blocks import BlockRun, Branch

    a = Branch(1, keys=[1])
    b = Branch(2, parent=a, start=1, keys=[2])
    store = TierStore(4, build_eviction("lineage", KvSettings(sketch=lambda: Sketch(1))))
    for run in (BlockRun(a, 0, 2), BlockRun(b, 1, 3)):
        store.release(put(store, run))
    gone = [(g.run.branch.uid, block) for g in store.evict(4, 0.0) for block in reversed(range(g.run.lo, g.run.hi))]
    assert gone == [(1, 1), (2, 2), (2, 1), (1, 0)]


@pytest.mark.parametrize("thresholds", [(), (0, 2), (2, 2), (6, 2), (2, 16)])
def test_levels_must_ascend_and_be_countable(thresholds: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="thresholds"):
        MultiLru(Sketch(1), thresholds)


def test_belady_is_a_bound_and_not_an_order() -> None:
    with pytest.raises(CapabilityError, match="looks into the future"):
        build_eviction("belady", KvSettings(sketch=lambda: Sketch(1)))
    a, b, c = "abc"
    assert most_hits([[a], [b], [a], [c], [b], [a]], 1) == 2
    assert most_hits([[a], [b], [a], [c], [b], [a]], 2) == 3
    assert most_hits([[a, b], [c], [a, b]], 2) == 2


def test_an_unknown_name_names_the_nearest_and_plug_ins_are_known() -> None:
    settings = KvSettings(sketch=lambda: Sketch(1))
    with pytest.raises(ConfigError, match="did you mean 'lineage'"):
        build_eviction("linage", settings)
    made: Callable[[KvSettings], EvictionOrder] = lambda _: build_eviction("fifo", settings)  # noqa: E731
    assert build_eviction("mine", settings, {"eviction.mine": made}).name == "fifo"
    with pytest.raises(ConfigError, match="not known"):
        build_eviction("mine", settings, {"offload.mine": made})
