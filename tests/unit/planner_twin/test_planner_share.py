"""The small model behind the look-ahead: exact where step costs are the engine's; one answer to one question."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from simulate import InTurn, RowsDemand, engine_settings, trace_row

from policies.cluster.controller import Controller
from policies.cluster.ids import Role, WorkerId
from policies.cluster.traffic import Lengths
from policies.cluster.twin_asks import AskTwin, Outcome, Plan, PlanStep, RoleCount, RoleState, Scenario, Snapshot
from policies.planner.settings import PlannerSettings, PoolSettings
from policies.planner.step_model import StepCoefficients
from twin.ahead.answer import answer, draw, timeline
from twin.ahead.share import Begun, Engine, Share, serve
from twin.config_read import load
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld
from twin.perf.linear import LinearCoefficients, LinearLatency
from twin.perf.protocol import PrefillChunk
from twin.planning import step_cost
from twin.wiring import build_cluster
from twin.worker_spec import WorkerSpec

COST = StepCoefficients(base_s=0.012, per_x_s=4.7e-5, per_kv_s=8e-8)
LATENCY = LinearLatency(LinearCoefficients(step_s=0.012, prefill_s_per_token=4.7e-5, decode_s_per_ctx_token=8e-8))
POOL = PoolSettings(role=Role.MIXED, group="pool", engine_num_gpu=4)
SETTINGS = PlannerSettings(pools=(POOL,), mode="agg", optimization_target="sla", max_gpu_budget=None, startup_s=60.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rate_rps", [0.5, 4.0, 12.0])
def test_a_worker_alone_is_served_as_the_simulated_engine_serves(seed: int, rate_rps: float) -> None:
    """Every first and last token at the same time, with chunked prompts, leaps and a full batch."""
    rng = random.Random(seed)
    at_s, rows = 0.0, []
    for i in range(120):
        at_s += rng.expovariate(rate_rps)
        rows.append(trace_row(i, round(at_s, 6), rng.choice([3, 900, 5000, 12_000]), rng.choice([1, 2, 30, 300])))
    sinks = MemorySinks()
    settings = engine_settings(blocks=200_000, max_num_seqs=24, prefix_caching=False)
    spec = WorkerSpec(worker_id=WorkerId(0), name="w", settings=settings, latency=LATENCY)
    world = MockWorld(
        controller=Controller([InTurn()]), workers=[spec], demand=RowsDemand(rows), sinks=sinks, router="turn"
    )
    world.run()
    engine = Engine(COST, max_num_seqs=24, max_batched_tokens=8192, max_kv_tokens=200_000 * 16, sequences=False)
    share = Share(
        [row.arrival_s or 0.0 for row in rows], [r.isl for r in rows], [r.isl for r in rows], [r.osl for r in rows]
    )
    served = serve(engine, share, Begun((), ()), 1e6)
    told = [row for _, row in sorted(sinks.requests.items())]
    assert served.first_s == pytest.approx([row[12] for row in told], abs=1e-5)
    assert served.last_s == pytest.approx([row[13] for row in told], abs=1e-5)


def state(ready: int = 4, **changes: object) -> RoleState:
    base = RoleState(
        role=Role.MIXED,
        group="pool",
        ready=ready,
        pending=0,
        draining=0,
        queued_prefill_tokens=0.0,
        queued_decode_kv_tokens=0.0,
        running_decode_kv_tokens=8000.0,
        running_decode_requests=8.0,
        base_s=COST.base_s,
        per_x_s=COST.per_x_s,
        per_kv_s=COST.per_kv_s,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def plan(*steps: tuple[float, int]) -> Plan:
    return Plan(
        name=str(steps),
        steps=tuple(PlanStep(after_s=after_s, counts=(RoleCount(role=Role.MIXED, workers=n),)) for after_s, n in steps),
    )


def question(plans: tuple[Plan, ...], rate_rps: float = 8.0, now: RoleState | None = None) -> AskTwin:
    lengths = tuple(Lengths(isl=200 + 97 * i % 2800, osl=10 + 31 * i % 290) for i in range(64))
    scenarios = tuple(
        Scenario(name=name, interval_s=60.0, arrivals=(rate_rps * 60 * k,) * 3, lengths=lengths, hit_rate=0.0)
        for name, k in (("p50", 1.0), ("p90", 1.3), ("bootstrap", 1.0))
    )
    snapshot = Snapshot(taken_s=0.0, roles=(now or state(),), hit_rate=0.0, accept_length=1.0, isl=1500.0, osl=150.0)
    return AskTwin(
        reason="",
        query_id=0,
        key="",
        snapshot=snapshot,
        plans=plans,
        scenarios=scenarios,
        seeds=(0, 1),
        horizon_s=180.0,
        deadline_s=30.0,
    )


def attained(outcomes: tuple[Outcome, ...], i: int) -> float:
    mine = [one.attainment for one in outcomes if one.plan == i]
    return sum(mine) / len(mine)


def test_the_same_question_has_the_same_answer_whatever_else_is_asked() -> None:
    few, many = plan((0.0, 2)), plan((0.0, 6))
    both = answer(question((few, many)), SETTINGS)
    assert both == answer(question((few, many)), SETTINGS)
    alone = answer(question((many,)), SETTINGS)
    assert [replace(one, plan=0) for one in both if one.plan == 1] == list(alone)
    assert [(one.plan, one.scenario, one.seed) for one in both] == [
        (i, j, k) for i in range(2) for j in range(3) for k in range(2)
    ]


def test_more_workers_keep_more_and_cost_more() -> None:
    found = answer(question(tuple(plan((0.0, n)) for n in (1, 2, 4, 8))), SETTINGS)
    shares = [attained(found, i) for i in range(4)]
    costs = [found[6 * i].gpu_s for i in range(4)]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 < 0.95 < shares[3]
    assert costs == sorted(costs)


def test_a_worker_is_paid_for_from_its_order_and_serves_from_its_start() -> None:
    ready = timeline(plan((0.0, 6)), state(), SETTINGS, 180.0)
    assert list(zip(ready.at_s, ready.workers, strict=True)) == [(0.0, 4.0), (60.0, 6.0)]
    assert ready.gpu_s == 6 * 180 * 4
    later = timeline(plan((0.0, 4), (60.0, 5)), state(), SETTINGS, 180.0)
    assert later.gpu_s == (4 * 180 + 120) * 4
    assert later.workers[-1] == 5


def test_who_starts_is_called_off_first() -> None:
    ready = timeline(plan((0.0, 4)), state(pending=2), SETTINGS, 180.0)
    assert ready.workers[-1] == 4
    assert ready.gpu_s == 4 * 180 * 4


def test_arrivals_are_those_of_the_path_and_the_same_for_every_plan() -> None:
    (scenario, *_) = question(()).scenarios
    one, again = draw(scenario, 0, 180.0, (1.0, 1.0)), draw(scenario, 0, 180.0, (1.0, 1.0))
    other = draw(scenario, 1, 180.0, (1.0, 1.0))
    assert (one.at_s == again.at_s).all()
    assert len(one.at_s) == pytest.approx(8 * 180, rel=0.1)
    assert len(other.at_s) != len(one.at_s) or (other.at_s != one.at_s).any()
    assert (one.at_s[1:] >= one.at_s[:-1]).all()


def test_no_demand_and_no_worker_are_answered_too() -> None:
    nobody = question((plan((0.0, 1)), plan((0.0, 0))), rate_rps=0.0)
    assert [one.attainment for one in answer(nobody, SETTINGS)] == [1.0] * 12
    asleep = question((plan((0.0, 0)),), now=state(ready=0, running_decode_requests=0.0, running_decode_kv_tokens=0.0))
    assert all(0.0 <= one.attainment <= 1.0 for one in answer(asleep, SETTINGS))


@pytest.mark.parametrize(("model", "tp"), [("llama-3.1-70b", 4), ("llama-3.1-8b", 1)])
def test_the_line_to_begin_with_is_near_the_latency_model(model: str, tp: int) -> None:
    """Within a fifth of decode steps of usual batches, and of steps with a prompt beside them."""
    (group,) = build_cluster(load(sets=[f"workers.model={model}", f"workers.tp={tp}"])).groups
    cost = step_cost(Role.MIXED, group)
    assert cost is not None
    for batch in (8, 16, 64):
        kv = batch * 1500
        assert cost.seconds(0, kv) == pytest.approx(group.latency.decode_piece(batch, kv).g0, rel=0.2)
        true = group.latency.step_s((PrefillChunk(1500, 0, 0, True),), batch, kv, 0, 0)
        assert cost.seconds(1500, kv) == pytest.approx(true, rel=0.2)
