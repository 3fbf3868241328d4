"""Random lives of a block manager: blocks are conserved, never moved twice at once, never used after they have gone,
and the same life gives the same orders."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kvbm_builders import Bench, level

from policies.cluster.blocks import BlockPath, BlockRun, ContentTree
from policies.cluster.ids import Tier
from policies.kvbm.build import EVICTIONS, OFFLOADS, KvSettings, build_eviction, build_offload
from policies.kvbm.lane import BatchRules
from policies.kvbm.level import TRIGGERS, WHEN_FULL, Level
from policies.kvbm.lifecycle import BlockState
from policies.kvbm.orders import Offload, Onboard, PublishKv
from policies.kvbm.sketch import Sketch
from policies.kvbm.spans import Spans

G2, G3 = Tier.G2_HOST, Tier.G3_DISK
FILTERS = sorted(set(OFFLOADS) - {"tenant_quota"})
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=8)
STEP = st.tuples(
    st.sampled_from(
        ["complete"] * 5 + ["evict"] * 4 + ["wait"] * 3 + ["land"] * 4 + ["load"] * 4 + ["loaded"] * 3 + ["cancel"]
        + ["fail", "lost", "restored", "refuse"]
    ),
    PROMPT,
    st.integers(0, 4),
)  # fmt: skip


@st.composite
def setups(draw: st.DrawFn) -> dict:
    edges = [
        {
            "capacity": draw(st.integers(2, 12)),
            "trigger": draw(st.sampled_from(TRIGGERS)),
            "when_full": draw(st.sampled_from(WHEN_FULL)),
            "filter": draw(st.sampled_from(FILTERS)),
            "order": draw(st.sampled_from(sorted(EVICTIONS))),
            "at_once": draw(st.integers(1, 2)),
        }
        for _ in range(2)
    ]
    return {"edges": edges[: draw(st.integers(1, 2))], "max": draw(st.integers(1, 6))}


class Life:
    """A manager, what happens to it, and what an onlooker notes."""

    def __init__(self, setup: dict) -> None:
        sketch = Sketch(32)
        settings = KvSettings(sketch=lambda: sketch, min_lfu_count=1, decay_s=1.0)
        levels = [self._level(tier, edge, settings, setup["max"])
                  for tier, edge in zip((G2, G3), setup["edges"], strict=False)]  # fmt: skip
        self.bench = Bench(*levels, sketch=sketch)
        self.tree = ContentTree(1, 1)
        self.paths: list[BlockPath] = []
        self.loads: list[tuple[Onboard, list[BlockRun]]] = []
        self.told: dict[Tier, Spans] = {G2: Spans(), G3: Spans()}
        self.log: list[str] = []
        self.now_s = 0.0

    @staticmethod
    def _level(tier: Tier, edge: dict, settings: KvSettings, most: int) -> Level:
        return level(
            tier,
            edge["capacity"],
            offload=build_offload(edge["filter"], settings),
            order=lambda: build_eviction(edge["order"], settings),
            rules=BatchRules(max_blocks=most, min_blocks=min(2, most), at_once=edge["at_once"]),
            trigger=edge["trigger"],
            when_full=edge["when_full"],
        )

    def runs(self, keys: list[int]) -> tuple[BlockRun, ...]:
        path = self.tree.path(keys, len(keys))
        self.paths.append(path)
        return path.runs()

    def step(self, what: str, keys: list[int], n: int) -> None:
        bench, manager = self.bench, self.bench.manager
        self.now_s += 0.001 * n
        tier = manager.levels[n % len(manager.levels)].body.tier
        if what == "complete":
            for run in self.runs(keys):
                bench.complete(run, self.now_s)
        elif what == "evict":
            for run in self.runs(keys):
                for lo, hi in bench.device.held.common(*run):
                    bench.evict(BlockRun(run.branch, lo, hi), self.now_s)
        elif what == "wait":
            self.now_s += 0.010
        elif what in ("land", "fail") and bench.moving:
            moved = bench.moving.pop(n % len(bench.moving))
            manager.moved(moved.batch_id, self.now_s, ok=what == "land")
        elif what == "load":
            self.load(keys)
        elif what in ("loaded", "cancel") and self.loads:
            self.end_load(what, n)
        elif what == "lost":
            manager.lost(tier)
        elif what == "restored":
            manager.restored(tier)
        elif what == "refuse":
            manager.refuse(tier, n % 2 == 0)
        self.look()

    def load(self, keys: list[int]) -> None:
        manager = self.bench.manager
        runs = self.runs(keys)
        device = next((lo for run in runs for lo, _ in self.bench.device.lacking(*run)), len(keys))
        pieces = [(run.branch, run.hi) for run in runs]
        plan = manager.look_up(pieces, blocks=len(keys), usable=len(keys), device_blocks=device, now_s=self.now_s)
        assert device + plan.load_blocks + sum(plan.misses.values()) == len(keys), "each block is in one class"
        held = []
        for run in plan.runs:
            store = next(each.body.store for each in manager.levels if each.body.tier is run.tier)
            for part in run.found:
                assert store.lacking(part.stretch.branch, part.lo, part.hi) == [], "what is loaded is there"
                held.append(BlockRun(part.stretch.branch, part.lo, part.hi))
        if plan.runs:
            self.loads.append((manager.begin(plan, self.now_s), held))

    def end_load(self, what: str, n: int) -> None:
        manager = self.bench.manager
        load, held = self.loads.pop(n % len(self.loads))
        if what == "cancel":
            manager.dropped(load)
            return
        bad = [BlockRun(held[-1].branch, held[-1].hi - 1, held[-1].hi)] if n == 4 else []
        good = manager.loaded(load, self.now_s, bad)
        assert 0 <= good <= load.plan.load_blocks - len(bad)

    def look(self) -> None:
        bench = self.bench
        for order in bench.manager.poll(self.now_s):
            self.log.append(f"{self.now_s:.3f} {order!r}")
            if isinstance(order, Offload):
                bench.moving.append(order)
            elif isinstance(order, PublishKv):
                is_store, tier, runs = order.change
                for run in runs:
                    changed = self.told[tier].add(*run) if is_store else self.told[tier].remove(*run)
                    assert sum(hi - lo for lo, hi in changed) == run.hi - run.lo, "stored once, removed once"
            else:
                self.told[order.tier].clear()
        bench.manager.audit()
        for each in bench.manager.levels:
            body = each.body
            assert body.underway.blocks == each.lane.queued_blocks + sum(
                order.blocks for order in bench.moving if order.target is body.tier
            ), "a block is on its way to a tier once"
            for run in self.told[body.tier]:
                assert body.store.lacking(*run) == [], "what was told is true"

    def end(self) -> None:
        manager = self.bench.manager
        while self.loads:
            manager.dropped(self.loads.pop()[0])
        self.now_s = self.bench.settle(self.now_s)
        assert manager.idle
        manager.audit()
        for each in manager.levels:
            gauges = each.body.store.gauges
            assert gauges[BlockState.FREE] + gauges[BlockState.INACTIVE] == gauges.capacity, "nothing has leaked"
            assert not each.body.underway.blocks


@examples(300)
@given(setups(), st.lists(STEP, min_size=5, max_size=60))
def test_whatever_happens_blocks_are_conserved_and_moved_once(setup: dict, steps: list) -> None:
    life = Life(setup)
    for step in steps:
        life.step(*step)
    life.end()
    again = Life(setup)
    for step in steps:
        again.step(*step)
    assert again.log == life.log, "the same life gives the same orders"


@examples(300)
@given(st.lists(PROMPT, min_size=1, max_size=20), st.sampled_from(["on_complete", "on_idle"]))
def test_after_a_rest_all_that_was_complete_lies_below(prompts: list[list[int]], trigger: str) -> None:
    bench = Bench(level(G2, 200, trigger=trigger), level(G3, 400, trigger=trigger))
    tree = ContentTree(1, 1)
    now_s, paths = 0.0, []
    for keys in prompts:
        path = tree.path(keys, len(keys))
        paths.append(path)
        for run in path.runs():
            for lo, hi in bench.device.lacking(*run):
                bench.complete(BlockRun(run.branch, lo, hi), now_s)
        bench.poll(now_s)
        now_s += 0.003
    assert bench.settle(now_s) < now_s + 1.0
    for each in bench.manager.levels:
        for path in paths:
            assert all(each.body.store.lacking(*run) == [] for run in path.runs())
