"""Look-ahead: which plan is taken (K1 to K8), which are asked for, and when the twin is not believed."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from plant import OSL, RPS, Plant, changed, planned

from policies.cluster.actions import DrainWorker
from policies.cluster.ids import Role
from policies.cluster.traffic import Lengths, TrafficWindow, WindowKind
from policies.cluster.twin_asks import AskTwin, Outcome, Plan, PlanStep, RoleCount
from policies.errors import ConfigError
from policies.planner.asking import inner
from policies.planner.lookahead import Frame, Judged, changes, choose, judged, plans, prescreened
from policies.planner.lookahead_settings import LookaheadSettings
from policies.planner.planner import Planner
from policies.planner.trust import Trust

P, D = Role.PREFILL, Role.DECODE
LIMITS = LookaheadSettings()


def plan(name: str, *steps: tuple[int, int]) -> Plan:
    return Plan(
        name=name,
        steps=tuple(
            PlanStep(after_s=120.0 * i, counts=(RoleCount(role=P, workers=p), RoleCount(role=D, workers=d)))
            for i, (p, d) in enumerate(steps)
        ),
    )


def runs(of: Plan, gpu_s: float, *attainment: float) -> Judged:
    found = [Outcome(plan=0, scenario=0, seed=i, gpu_s=gpu_s, attainment=a) for i, a in enumerate(attainment)]
    return judged(of, found)


K1 = runs(plan("2/2", (2, 2)), 1200, 0.900, 0.910, 0.890, 0.900)
K2 = runs(plan("3/2", (3, 2)), 1500, 0.955, 0.962, 0.948, 0.957)
K3 = runs(plan("2/3", (2, 3)), 1500, 0.931, 0.935, 0.928, 0.930)
K4 = runs(plan("3/3", (3, 3)), 1800, 0.985, 0.990, 0.983, 0.988)
K5 = runs(plan("4/3", (4, 3)), 2100, 0.991, 0.993, 0.990, 0.992)
K6 = runs(plan("3/2 then 3/3", (3, 2), (3, 3)), 1620, 0.972, 0.975, 0.969, 0.970)


@pytest.mark.parametrize(
    ("of", "mean", "low"),
    [
        (K1, 0.9, 0.8904), (K2, 0.9555, 0.9487), (K3, 0.931, 0.9275),
        (K4, 0.9865, 0.9828), (K5, 0.9915, 0.9900), (K6, 0.9715, 0.9684),
    ],
    ids=["K1", "K2", "K3", "K4", "K5", "K6"],
)  # fmt: skip
def test_attainment_and_its_lower_bound(of: Judged, mean: float, low: float) -> None:
    assert (of.attainment, of.low) == (pytest.approx(mean, abs=1e-9), pytest.approx(low, abs=6e-5))


def test_k6_the_cheapest_that_keeps_the_promise_with_confidence() -> None:
    choice = choose([K1, K2, K3, K4, K5, K6], (2, 2), LIMITS)
    assert (choice.judged, choice.unreachable) == (K6, False)
    assert choose([K1, K2, K3, K4, K5], (2, 2), LIMITS).judged == K4


def test_k8_where_none_does_the_one_of_most_attainment_flagged() -> None:
    choice = choose([K1, K2, K3], (2, 2), LIMITS)
    assert (choice.judged, choice.unreachable) == (K2, True)


def test_a_change_must_be_worth_it() -> None:
    rule = replace(K4, plan=plan("rule", (3, 3)))
    assert choose([rule, K6], (2, 2), LIMITS).judged == K6  # saves 10 %
    near = replace(K6, gpu_s=1790.0)
    assert choose([rule, near], (2, 2), LIMITS).judged == rule  # saves half a percent
    missed = replace(K2, plan=plan("rule", (3, 2)))
    assert choose([missed, K4], (2, 2), LIMITS).judged == K4  # what keeps the promise goes before what does not
    dear = replace(LIMITS, change_cost_gpu_s=200.0)
    assert choose([K4, K6], (3, 3), dear).judged == K4  # 1800 against 1620 and two changes


def test_runs_that_contradict_one_another_are_not_believed() -> None:
    rule = replace(K4, plan=plan("rule", (3, 3)))
    worse = runs(plan("4/3", (4, 3)), 2100, 0.95, 0.951, 0.949, 0.95)
    choice = choose([rule, worse, K6], (2, 2), LIMITS)
    assert choice.inconsistent
    assert choice.judged == rule


# ---------------------------------------------------------------- plans


def frame(**changes_: object) -> Frame:
    usual = Frame(
        roles=(P, D), current=(2, 3), rule=(3, 3), least=(1, 1), gpus=(1, 1), budget=64, draining_gpus=0, step=8,
        startup_s=120.0,
    )  # fmt: skip
    return replace(usual, **changes_)  # type: ignore[arg-type]


def counts(of: Plan) -> list[tuple[int, ...]]:
    return [tuple(count.workers for count in step.counts) for step in of.steps]


def test_plans_are_the_rules_the_present_their_neighbours_and_in_two_steps() -> None:
    found = plans(frame(), LIMITS)
    assert [p.name for p in found[:2]] == ["rule", "stay"]
    assert len(found) == 24
    assert len({tuple(counts(p)) for p in found}) == 24
    assert [(2, 3), (2, 4)] in [counts(p) for p in found]
    assert next(p for p in found if len(p.steps) == 2).steps[1].after_s == 120.0
    for p in found:
        assert all(abs(n - now) <= 2 + 1 for step in counts(p) for n, now in zip(step, (2, 3), strict=True))


@pytest.mark.parametrize("changes_", [{"budget": 6}, {"budget": 8, "draining_gpus": 2}, {"least": (2, 3)}, {"step": 1}])
def test_plans_keep_to_floor_step_and_budget(changes_: dict[str, object]) -> None:
    made = frame(**changes_)
    for p in plans(made, LIMITS):
        for step in counts(p):
            assert made.allows(step)


def test_a_pre_screen_keeps_the_rules_and_what_nearly_suffices() -> None:
    found = prescreened(plans(frame(), LIMITS), frame(), 30.0, {P: 10.0, D: 10.0}, 12)
    assert len(found) == 12
    assert {p.name for p in found} >= {"rule", "stay"}
    assert all(min(counts(p)[-1]) >= 2 for p in found)
    assert counts(found[2])[-1] == (3, 3) or sum(counts(found[2])[-1]) <= 7


def test_changes_are_workers_started_and_stopped_along_the_way() -> None:
    assert changes(plan("x", (3, 2), (3, 3)), (2, 2)) == 2
    assert changes(plan("x", (1, 4)), (2, 2)) == 3


# ---------------------------------------------------------------- trust


def told(trust: Trust, said: float, seen: float, completed: int = 100, at_s: float = 0.0) -> None:
    trust.compare({"ttft_p95_s": said}, {"ttft_p95_s": seen}, completed, at_s)


def test_trust_is_earned_lost_and_earned_again() -> None:
    trust = Trust(LIMITS)
    assert not trust.open  # nothing has been measured
    told(trust, 1.0, 1.1)
    assert trust.open
    told(trust, 3.0, 1.0)  # 200 % off
    assert not trust.open
    for _ in range(5):
        told(trust, 1.0, 1.0)
    assert trust.errors["ttft_p95_s"] < 0.25
    for _ in range(5):
        told(trust, 1.0, 1.0)
    assert trust.open


def test_between_the_two_limits_it_stays_as_it_is() -> None:
    fresh = Trust(LIMITS)
    told(fresh, 1.22, 1.0)
    assert not fresh.open
    known = Trust(LIMITS)
    told(known, 1.0, 1.0)
    for _ in range(30):
        told(known, 1.22, 1.0)
    assert known.open


def test_too_few_requests_say_nothing_and_a_day_proves() -> None:
    trust = Trust(LIMITS)
    told(trust, 1.0, 1.0, at_s=100.0)
    told(trust, 9.0, 1.0, completed=29)
    assert not trust.open
    told(trust, 1.0, 1.0)
    assert trust.open
    assert trust.errors["ttft_p95_s"] == 0
    assert not trust.proven(86_499.0)
    assert trust.proven(86_500.0)


# ---------------------------------------------------------------- the planner asks


def measured(i: int, w: TrafficWindow) -> TrafficWindow:
    """A window with latencies and lengths, as the twin foretells them below."""
    lengths = (Lengths(isl=3000, osl=OSL),)
    return changed(w, WindowKind.OBSERVED, ttft_p95_s=0.2, itl_p95_s=0.04, completed=500, lengths=lengths)


def foretold(asked: AskTwin, best: int, ttft_s: float = 0.2) -> tuple[Outcome, ...]:
    """A twin to which a plan of `best` workers at the end is good, fewer are not, and GPUs cost what they do."""
    found = []
    for i, p in enumerate(asked.plans):
        last = p.steps[-1].counts[0].workers
        for scenario in range(len(asked.scenarios)):
            for seed in range(len(asked.seeds)):
                found.append(
                    Outcome(
                        plan=i, scenario=scenario, seed=seed, gpu_s=float(last) * asked.horizon_s,
                        attainment=0.99 if last >= best else 0.8, ttft_p95_s=ttft_s, itl_p95_s=0.04,
                    )
                )  # fmt: skip
    return tuple(found)


def looking(best: int, think_s: float = 0.0, ttft_s: float = 0.2, journaled: bool = False, **changes_: object) -> Plant:
    made = planned(P, load_predictor="constant", lookahead=LIMITS, **changes_)
    return Plant(
        made, lambda _: 2.5 * RPS[P], {P: 3}, window=measured, twin=lambda asked: foretold(asked, best, ttft_s),
        think_s=think_s, journaled=journaled,
    )  # fmt: skip


def planner_of(plant: Plant) -> Planner:
    assert isinstance(plant.planner, Planner)
    return plant.planner


def test_what_the_twin_says_is_done_once_it_is_trusted() -> None:
    plant = looking(best=5, journaled=True).run(3600)
    asked = [a for _, a in plant.orders if isinstance(a, AskTwin)]
    assert plant.finals(P)[0] == 3  # nothing measured yet: the rules
    assert plant.n(P) == 5
    assert plant.ticks[-1][1].trusted
    assert plant.ticks[-1][1].roles[0].lookahead == 5
    assert [s.name for s in asked[-1].scenarios] == ["p50", "p90", "bootstrap"]
    assert asked[-1].horizon_s == 540
    assert len(asked[-1].plans) <= 12
    assert fmean(asked[-1].scenarios[0].arrivals) == pytest.approx(2.5 * RPS[P] * 180)
    plant.check_replay()


def test_the_answer_of_the_same_instant_is_the_only_thing_that_is_done() -> None:
    plant = looking(best=2).run(3600)
    assert plant.n(P) == 2
    assert len(plant.changes()) == 1


def test_the_same_state_is_asked_once() -> None:
    plant = looking(best=3).run(7200)
    assert len([a for _, a in plant.orders if isinstance(a, AskTwin)]) < 10
    assert planner_of(plant).asking.asked == len([a for _, a in plant.orders if isinstance(a, AskTwin)])
    assert plant.ticks[-1][1].plan == "rule"


def test_k7_a_twin_that_is_wrong_is_not_believed() -> None:
    plant = looking(best=5, ttft_s=0.9).run(3600)
    assert not plant.changes()
    assert planner_of(plant).asking.distrusted > 0
    assert plant.ticks[-1][1].trusted is False
    assert planner_of(plant).asking.errors["ttft_p95_s"] == pytest.approx(3.5)


def test_while_it_is_awaited_the_rules_stand_and_what_is_late_is_not_used() -> None:
    plant = looking(best=5, think_s=91.0).run(3600)  # half of an interval is 90 s
    assert not plant.changes()
    assert planner_of(plant).asking.late > 0
    in_time = looking(best=5, think_s=60.0).run(3600)
    assert in_time.n(P) == 5
    assert not in_time.changes(DrainWorker)  # while the next answer is awaited, the last one is not taken back


def test_a_twin_that_never_answers_costs_nothing_but_its_advice() -> None:
    made = planned(P, load_predictor="constant", lookahead=LIMITS)
    dead = Plant(made, lambda t: RPS[P] * (2.5 if t < 1800 else 4.5), {P: 3}, window=measured, think_s=1e9).run(3600)
    assert dead.n(P) == 5
    failing = Plant(made, lambda t: RPS[P] * (2.5 if t < 1800 else 4.5), {P: 3}, window=measured).run(3600)
    assert failing.n(P) == 5
    assert planner_of(failing).asking.failed > 0


def test_the_answer_stays_within_two_of_the_rules() -> None:
    plant = looking(best=2, max_throughput_scaling_replicas=8)
    plant.twin = lambda asked: tuple(
        replace(o, attainment=0.99 if asked.plans[o.plan].steps[0].counts[0].workers >= 9 else 0.5)
        for o in foretold(asked, 9)
    )
    plant.run(3600)
    assert plant.n(P) <= 3 + 2


def test_the_twin_is_told_nothing_of_the_future() -> None:
    def load(after: float) -> Plant:
        made = planned(P, load_predictor="constant", lookahead=LIMITS)
        return Plant(
            made, lambda t: RPS[P] * (2.5 if t < 1800 else after), {P: 3}, window=measured,
            twin=lambda asked: foretold(asked, 4),
        ).run(1799)  # fmt: skip

    calm, wild = load(2.5), load(9.0)
    assert calm.orders == wild.orders


def test_the_planner_inside_a_simulation_asks_nobody() -> None:
    made = planned(P, lookahead=LIMITS)
    assert inner(made).lookahead is None
    inside = Plant(inner(made), lambda _: 2.5 * RPS[P], {P: 3}, window=measured).run(1800)
    assert not [a for _, a in inside.orders if isinstance(a, AskTwin)]


def test_with_the_fast_loop_the_answer_is_a_lower_bound() -> None:
    plant = looking(best=4, load_scaling=True, load_adjustment_interval_s=20.0).run(3600)
    assert plant.n(P) == 4
    assert not plant.changes(DrainWorker)
    assert "capped_by_throughput" in plant.reasons(P)


def test_knobs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="smaller error than it goes"):
        LookaheadSettings(trust_below=0.3)
    with pytest.raises(ConfigError, match="attainment is 2"):
        LookaheadSettings(attainment=2.0)
