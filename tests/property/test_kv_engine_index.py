"""Mode kv decides the same whether the simulator tells it of caches in its own words or as engines do: in random runs,
with tiers below devices, late events and leaps; in random histories; and on recorded traffic."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import toy
from builders import Scene, router, worker
from engine_words import EngineScene
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import KEY_TOKENS, Seen, engine_settings, simulate
from test_engine_against_naive import traces
from test_faults_programs import FIXED, Blow, blows, engine_options, perform
from test_kvbm_peers import reading
from test_kvbm_world import LATENCY, LINKS, returning, tiers, tight

from policies.cluster.events import RequestArrived
from policies.cluster.ids import RequestId, Tier
from policies.router.kv import Kv
from policies.router.kv_engine import KvEngine
from twin.mocker.demand import Row
from twin.mocker.tiers import TierPlan
from twin.mocker.world import Observation

DEMANDS = st.tuples(returning(), tight())
VARIANTS: Sequence[dict[str, object]] = (
    {},
    {"overlap_score_credit_decay": 1.0, "shared_cache_multiplier": 0.5},
    {"router_temperature": 0.5},
    {"predicted_ttl_s": 0.03},
    {"prefill_tokens_per_s": 500.0},
)


def run(
    rows: list[Row], options: dict, index: str, variant: dict[str, object], plans: list[TierPlan] | None, lag_s: float
) -> Seen:
    policy = router(
        "kv", block_size=options["block_size"], explain=True, index=index, **{"shared_cache_multiplier": 0.5, **variant}
    )
    settings = engine_settings(**options | {"prefix_caching": True}, tiers=plans is not None)
    seen = simulate(
        rows,
        [(settings, LATENCY)] * 2,
        key_tokens=KEY_TOKENS,
        policies=[policy],
        observe=Observation(kv_event_lag_s=lag_s, engine_events=index == "engine"),
        tiers=plans,
        links=LINKS if plans is not None else (),
        strict=True,
    )
    seen.policy = policy  # type: ignore[attr-defined]
    return seen


def decisions(seen: Seen) -> list[tuple]:
    """As they were made, but for what an index says of itself."""
    told = []
    for row in seen.sinks.decisions:
        candidates = json.loads(row[-1]) if row[-1] else []
        assert all(one.pop("index_mode") in (None, "live") for one in candidates)
        told.append((*row[:-1], candidates))
    return told


def same(one: Seen, two: Seen) -> None:
    assert decisions(one) == decisions(two)
    assert one.sinks.requests == two.sinks.requests
    assert one.events == [event for event in two.events if event[0] not in _WORDS]


_WORDS = ("KvStored", "KvRemoved", "KvCleared", "IndexDump", "TimerFired")


@examples(200)
@given(DEMANDS, st.sampled_from(VARIANTS), st.sampled_from([0.0, 0.0, 0.004, 0.05]), st.booleans())
def test_decisions_are_the_same(
    demand: tuple[list[Row], dict], variant: dict[str, object], lag_s: float, leap: bool
) -> None:
    rows, options = demand
    options = options | {"leap": leap}
    told, engine = (run(rows, options, index, variant, None, lag_s) for index in ("simulated", "engine"))
    same(told, engine)
    counters = engine.policy.counters()  # type: ignore[attr-defined]
    assert not counters["gaps"]
    assert counters["dumps_done"] == 2
    assert counters["index_blocks"] == told.policy.counters()["index_blocks"]  # type: ignore[attr-defined]


@examples(200)
@given(DEMANDS, tiers() | reading(workers=2), st.sampled_from([0.0, 0.004]), st.sampled_from([None, 0.5]))
def test_decisions_are_the_same_with_tiers(
    demand: tuple[list[Row], dict], plans: list[TierPlan], lag_s: float, weight: float | None
) -> None:
    rows, options = demand
    credit: dict[str, object] = {"peer_cache_hit_weight": weight}
    told, engine = (run(rows, options, index, credit, plans, lag_s) for index in ("simulated", "engine"))
    same(told, engine)


# ---------------------------------------------------------------- workers that come and go


@examples(200)
@given(traces(), engine_options(), st.booleans().flatmap(blows), st.sampled_from([0.0, 0.004]))
def test_decisions_are_the_same_while_workers_come_and_go(
    rows: list[Row], options: dict, program: list[Blow], lag_s: float
) -> None:
    """They die, come back empty, hang, drain, are cut off and return with what they have: no event is lost by that."""
    settings = engine_settings(**options)
    told, engine = (
        perform(rows, program, settings, FIXED, "kv", lag_s=lag_s, in_engine_words=words)[0] for words in (False, True)
    )
    assert told.decisions == engine.decisions
    assert told.requests == engine.requests


# ---------------------------------------------------------------- histories that no simulated engine would make

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send"] * 4 + ["stored"] * 5 + ["removed"] * 3 + ["cleared", "lost"]),
        st.integers(0, 1),
        PROMPTS,
        st.integers(0, 5),
        st.sampled_from([Tier.G1_DEVICE, Tier.G1_DEVICE, Tier.G2_HOST, Tier.G3_DISK, Tier.G4_REMOTE]),
    ),
    max_size=30,
)


@examples(300)
@given(STEPS)
def test_both_indexes_know_the_same_after_any_history(steps: list[tuple[str, int, list[int], int, Tier]]) -> None:
    """Also with holes in what is held; what stands below something that nobody ever heard of is left out."""
    workers = [worker(0), worker(1)]
    told = Scene(router("kv", explain=True), workers)
    engine = EngineScene(router("kv", explain=True, index="engine"), workers)
    for n, (kind, worker_id, prompt, lo, tier) in enumerate(steps):
        for scene in (told, engine):
            one_step(scene, f"r{n}", kind, worker_id, prompt, lo, tier)
        for asked in ([*prompt, 9], [0, 0, 0, 0, 9], [1, 0, 1, 1, 0, 9]):
            assert seen_for(told, asked) == seen_for(engine, asked)


def one_step(scene: Scene, name: str, kind: str, worker_id: int, prompt: list[int], lo: int, tier: Tier) -> None:
    if kind == "send":
        scene.send(name, 64 * len(prompt), prompt)
        scene.finish(name)
    elif kind == "stored":
        scene.stored(worker_id, prompt, tier=tier)
    elif kind == "removed":
        scene.removed(worker_id, prompt[: lo + 2], lo=min(lo, len(prompt) - 1), tier=tier)
    elif kind == "cleared":
        scene.cleared(worker_id, tier)
    else:
        scene.lost(worker_id)
        scene.up(worker_id, epoch=int(name[1:]) + 1)


def seen_for(scene: Scene, prompt: list[int]) -> list[object]:
    """All that a decision would see for a prompt."""
    policy = scene.policy
    assert isinstance(policy, Kv)
    asked = scene.named(
        RequestArrived(at_s=scene.now_s, request_id=RequestId("?"), isl=64 * len(prompt), blocks=scene.path(prompt))
    )
    if isinstance(policy, KvEngine):
        asked = policy._named(asked)
    told = policy._explain(asked, scene.view.live)
    return [replace(candidate, index_mode=None) for candidate in told]


# ---------------------------------------------------------------- recorded traffic


LEGS = """
[[workers]]
name = "p"
count = 2
role = "prefill"

[[workers]]
name = "d"
count = 2
role = "decode"
"""
CLUSTERS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "late": ("observe.kv_event_lag_s=0.02",),
    "several routers": ("replicas.count=2", "replicas.sync_delay_s=0.005", "replicas.kv_event_lag_s=0.01"),
    "two legs": ("disaggregation.conditional=isl", "router.queue.prefill_busy_tokens=8000"),
    "tiers": ("workers.kvbm.cpu_cache_gb=40", "workers.kvbm.disk_cache_gb=100", "workers.engine.kv_blocks=20000"),
    "sglang": ("workers.engine.kind=sglang", "workers.engine.block_size=16"),
}


@pytest.mark.shared
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_decisions_are_the_same_on_recorded_conversations(shared: Path, tmp_path: Path, cluster: str) -> None:
    trace = shared / "traces/mooncake/mooncake_conversation.0-45min.parquet"
    config = None
    if cluster == "two legs":
        config = tmp_path / "legs.toml"
        config.write_text(LEGS)
    tables = []
    for index in ("simulated", "engine"):
        sets = ["router.mode=kv", f"router.index={index}", "trace.limit=300", *CLUSTERS[cluster]]
        done = toy.run(trace, tmp_path / index, *sets, config_file=config)
        tables.append([pq.read_table(done.folder / f"{name}.parquet") for name in ("decisions", "requests", "steps")])
    for one, two in zip(*tables, strict=True):
        assert one.equals(two)
