"""Layers that are computed as they come: never later than all at once, never earlier than both can be, no idle second
given away twice; leaping changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from simulate import Seen, engine_settings, simulate, trace_row
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import Blow, blows, perform
from test_kvbm_faults import tier_blows
from test_kvbm_kinds import DEMANDS, KINDS, TIERS, Kind, sized
from test_kvbm_legs import same, tiered_programs
from test_kvbm_world import LATENCY, LINKS, nothing_is_left, returning, tight
from test_legs_programs import Below, Program

from policies.cluster.ids import Tier
from policies.kvbm.lane import BatchRules
from policies.kvbm.look_up import Rule
from policies.kvbm.onboard import inter_layer_s, intra_layer_s
from policies.kvbm.tiers import TierSpec
from twin.engine.layerwise import Arrival, Span, ahead_s, without_last
from twin.engine.settings import EngineSettings, Layers
from twin.mocker.demand import Row
from twin.mocker.tierplan import LevelPlan, TierPlan
from twin.perf.fixed import FixedLatency
from twin.perf.links import FAIR, Link

WHOLE = Layers(stage=5, model=5)
PIPED = Layers(stage=3, model=6)
ALL_KINDS = [Kind("vllm", lambda options: engine_settings(**options)), *KINDS]
EACH = pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)


# ---------------------------------------------------------------- the ledger


@st.composite
def idle_spans(draw: st.DrawFn) -> list[Span]:
    """Spans apart from each other, ends in whole seconds from 0 to 200."""
    ends = sorted(draw(st.sets(st.integers(0, 200), max_size=12)))
    return [(float(lo), float(hi)) for lo, hi in zip(ends[::2], ends[1::2], strict=False)]


def naive_ahead_s(idle: list[Span], since: int, each: int, layer: int, layers: int) -> int:
    """Tick by tick: a layer that has come is computed while the engine is idle; the last one comes at the end."""
    done = 0
    for now in range(since, since + each * layers):
        come = min((now - since) // each, layers - 1)
        if any(lo <= now < hi for lo, hi in idle) and done < come * layer:
            done += 1
    return done


@examples(100)
@given(idle_spans(), st.integers(0, 100), st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_what_is_won_is_what_an_engine_computes_tick_by_tick(
    idle: list[Span], since: int, each: int, layer: int, layers: int
) -> None:
    arrival = Arrival(since, since + each * layers)
    won_s = ahead_s(arrival, idle, layer, layers)
    assert max(won_s, 0.0) == naive_ahead_s(idle, since, each, layer, layers)


@examples(100)
@given(idle_spans(), st.integers(0, 200), st.floats(0, 300))
def test_what_is_taken_is_gone_and_nothing_else(idle: list[Span], before_s: int, seconds: float) -> None:
    there = sum(max(0.0, min(hi, before_s) - lo) for lo, hi in idle)
    left = without_last(idle, seconds, before_s)
    assert sum(hi - lo for lo, hi in left) == pytest.approx(sum(hi - lo for lo, hi in idle) - min(seconds, there))
    assert all(any(a <= lo and hi <= b for a, b in idle) for lo, hi in left), "no idle time is made up"
    assert left == sorted(left)
    kept_s = max((min(hi, before_s) for lo, hi in left if lo < before_s), default=0.0)
    behind = sum(max(0.0, min(hi, before_s) - max(lo, kept_s)) for lo, hi in idle)
    assert behind == pytest.approx(min(seconds, there)), "the last of it was taken"


# ---------------------------------------------------------------- one request alone


def alone(settings: EngineSettings, load_s: float, token_s: float) -> Seen:
    """A prompt of four keys, another one that pushes it out of the device, and the first one again: four keys less a
    token, of which three come up in `load_s`."""
    blocks = 3 * KEY_TOKENS // settings.block_size
    lanes = ((("cpu:w0",),), (("cpu:w0",),))
    spec = TierSpec(
        tier=Tier.G2_HOST, capacity_bytes=10**9, block_bytes=10**6, latency_s=0.0, bytes_per_s=blocks * 1e6 / load_s
    )
    level = LevelPlan(
        spec=spec,
        offload="presence",
        trigger="on_complete",
        eviction="lru",
        when_full="evict",
        down=lanes[0],
        hops=(lanes[1],),
    )
    plan = TierPlan(levels=(level,), rule=Rule(), batches=BatchRules(), min_lfu_count=1, decay_s=1.0)
    isl = 4 * KEY_TOKENS - 1
    rows = [trace_row(n, 1000.0 * n, isl, 1, [10 * (n % 4) + i for i in range(4)]) for n in range(5)]
    link = Link(name="cpu:w0", bytes_per_s=spec.bytes_per_s, discipline=FAIR, duplex=False)
    latency = FixedLatency(prefill_s=0.0, prefill_s_per_token=token_s, decode_s=0.001)
    return simulate(rows, [(settings, latency)], key_tokens=KEY_TOKENS, tiers=[plan], links=(link,))


@EACH
@examples(25)
@given(st.floats(1e-3, 9.0), st.floats(1e-5, 1.0), st.integers(1, 80), st.booleans())
def test_alone_it_takes_what_the_formula_says(
    kind: Kind, load_s: float, token_s: float, layers: int, leap: bool
) -> None:
    """Between both at once, but for one layer of the shorter, and one after the other."""
    sizes = {"block_size": KEY_TOKENS, "blocks": 6, "max_num_seqs": 4, "max_num_batched_tokens": 4096}
    sizes |= {"chunked_prefill": True, "exclusive_prefill": False, "preemption": "lifo"}
    settings = replace(kind.make(sizes), leap=leap, tiers=True)
    if kind.name == "sglang in chunks":
        settings = replace(settings, chunked_prefill_size=4096, max_prefill_tokens=4096)  # type: ignore[call-arg]
    compute_s = (KEY_TOKENS - 1) * token_s
    each = alone(replace(settings, layers=Layers(stage=layers, model=layers)), load_s, token_s)
    found_s = each.ended[4][0].sequence.first_token_s - 4000.0
    assert each.ended[4][0].sequence.host_blocks == 3
    assert found_s == pytest.approx(intra_layer_s(load_s, compute_s, layers), abs=5e-9)
    longer, shorter = max(load_s, compute_s), min(load_s, compute_s)
    assert longer + shorter / layers - 5e-9 <= found_s <= load_s + compute_s + 5e-9
    plain = alone(settings, load_s, token_s)
    assert plain.ended[4][0].sequence.first_token_s - 4000.0 == pytest.approx(
        inter_layer_s(load_s, compute_s), abs=5e-9
    )


# ---------------------------------------------------------------- in company


def run(rows: list[Row], settings: EngineSettings, plans: list[TierPlan]) -> Seen:
    engines = [(replace(settings, tiers=True), LATENCY)] * 2
    return simulate(rows, engines, key_tokens=KEY_TOKENS, kv_events=True, tiers=plans, links=LINKS)


@EACH
@examples(40)
@given(DEMANDS, TIERS, st.sampled_from([WHOLE, PIPED]), st.data())
def test_leaping_changes_nothing_and_idle_time_is_given_away_once(
    kind: Kind, demand: tuple[list[Row], dict], plans: list[TierPlan], layers: Layers, data: st.DataObject
) -> None:
    rows, settings = kind.rows(demand[0], data), replace(sized(kind, demand[1]), layers=layers)
    leapt, stepped = (run(rows, replace(settings, leap=leap), plans) for leap in (True, False))
    assert leapt.sinks.requests == stepped.sinks.requests
    assert leapt.watcher.notes == stepped.watcher.notes
    assert leapt.world.block_tiers is not None
    assert stepped.world.block_tiers is not None
    assert leapt.world.block_tiers.figures() == stepped.world.block_tiers.figures()
    assert len(leapt.ended) == len(rows)
    nothing_is_left(leapt.world)
    for worker in leapt.world.workers.values():
        overlap = worker.engine.below.overlap  # type: ignore[attr-defined]
        assert 0.0 <= overlap.saved_s <= overlap.idle_s + 1e-9
        assert not overlap.loads or overlap.saved_s


@EACH
@examples(25)
@given(DEMANDS, TIERS, st.data())
def test_one_layer_is_all_layers(
    kind: Kind, demand: tuple[list[Row], dict], plans: list[TierPlan], data: st.DataObject
) -> None:
    rows, settings = kind.rows(demand[0], data), sized(kind, demand[1])
    one, none = (run(rows, replace(settings, layers=layers), plans) for layers in (Layers(stage=1, model=1), None))
    assert one.sinks.requests == none.sinks.requests
    assert one.events == none.events


@EACH
@examples(25)
@given(returning(), tight(), TIERS, blows(ties=True), tier_blows(), st.data())
def test_leaping_changes_nothing_when_workers_and_tiers_break(
    kind: Kind,
    rows: list[Row],
    options: dict,
    plans: list[TierPlan],
    program: list[Blow],
    more: list[Blow],
    data: st.DataObject,
) -> None:
    rows, settings = kind.rows(rows, data), replace(sized(kind, options), tiers=True, layers=WHOLE)
    leapt, stepped = (
        perform(rows, program + more, replace(settings, leap=leap), LATENCY, "kv", workers=2, tiers=plans, links=LINKS)
        for leap in (True, False)
    )
    assert leapt[0].requests == stepped[0].requests
    assert leapt[0].decisions == stepped[0].decisions
    assert leapt[1].events == stepped[1].events
    assert leapt[2].notes == stepped[2].notes


@EACH
@examples(20)
@given(tiered_programs(), st.data())
def test_hand_offs(kind: Kind, case: tuple[Program, Below], data: st.DataObject) -> None:
    """Prefill and decode workers of one kind, with leaps and without."""
    program, below = case
    prefill, decode = (replace(kind.of(side), tiers=True, layers=WHOLE) for side in (program.prefill, program.decode))
    program = replace(program, rows=tuple(kind.rows(program.rows, data)), prefill=prefill, decode=decode)
    _, _, world = same((program, below))
    nothing_is_left(world)
