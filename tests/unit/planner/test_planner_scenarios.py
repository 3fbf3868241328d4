"""Whole situations (specification §9) in a toy cluster: what the planner does over hours; its journal replays."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plant import RPS, Plant, changed, distinct, planned

from policies.cluster.actions import AddWorker, CancelStart, DrainWorker, RecallWorker
from policies.cluster.ids import Role
from policies.cluster.scaling import GpuBudgetChanged
from policies.cluster.traffic import TrafficWindow, WindowKind
from policies.planner.planner import Planner, WakingPlanner
from policies.planner.settings import with_preset

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
HOUR = 3600.0
STEP = 180.0


def steady(workers: float, role: Role = P) -> Callable[[float], float]:
    """A load of so many workers' worth."""
    return lambda _: workers * RPS[role]


# ---------------------------------------------------------------- steady, dither, none


@pytest.mark.parametrize("predictor", ["constant", "moving-window", "holt", "kalman", "arima"])
@pytest.mark.parametrize("load_scaling", [False, True])
def test_steady_load_is_a_steady_count(predictor: str, load_scaling: bool) -> None:
    made = planned(P, load_predictor=predictor, load_scaling=load_scaling, load_adjustment_interval_s=20.0)
    plant = Plant(made, steady(1.5), {P: 3}, journaled=True).run(HOUR)
    assert plant.seen(P) == [3, 2]
    assert len(plant.changes()) == 1
    plant.check_replay()


@pytest.mark.parametrize("target", ["throughput", "latency"])
@pytest.mark.parametrize("role", [P, D, M])
def test_without_a_forecast_changes_become_ever_rarer(target: str, role: Role) -> None:
    made = planned(role, optimization_target=target, load_scaling=True, load_adjustment_interval_s=20.0, startup_s=60.0)
    plant = Plant(made, steady(1.5, role), {role: 3}).run(4 * HOUR)
    tries = [t for t, _ in plant.changes(DrainWorker)]
    gaps = [round(b - a) for a, b in pairwise(tries) if b - a > 300]  # down and soon up again: after 10, 20, 40 ... min
    assert gaps == sorted(gaps)
    assert not [t for t, _ in plant.changes() if t > 3 * HOUR]


@given(workers=st.floats(0.1, 9.0), start=st.integers(1, 9), load_scaling=st.booleans(), both=st.booleans())
@settings(max_examples=10)
def test_whatever_the_steady_load_changes_end(workers: float, start: int, load_scaling: bool, both: bool) -> None:
    roles = (P, D) if both else (D,)
    made = planned(
        *roles,
        load_scaling=load_scaling,
        throughput_adjustment_interval_s=60.0,
        startup_s=30.0,
        load_adjustment_interval_s=20.0,
    )
    plant = Plant(made, lambda _: workers * RPS[D], dict.fromkeys(roles, start)).run(HOUR)
    early = [t for t, _ in plant.changes()]
    assert all(t <= HOUR / 3 for t in early), early
    assert plant.n(D) >= math.ceil(workers - 1e-6)  # enough of them
    assert plant.n(D) <= max(1, math.ceil(workers / 0.8))


def test_noise_around_a_whole_number_is_at_most_one_change() -> None:
    noisy = Plant(planned(P), lambda t: RPS[P] * (2.0 + 0.01 * (-1) ** int(t / STEP)), {P: 2}).run(3 * HOUR)
    assert len(noisy.changes()) <= 1
    assert set(noisy.finals(P)) <= {2, 3}


@pytest.mark.parametrize("target", ["sla", "throughput", "latency"])
def test_no_load_never_grows_and_ends_at_the_floor_after_the_hold(target: str) -> None:
    made = planned(P, optimization_target=target, load_scaling=True, load_adjustment_interval_s=20.0)
    plant = Plant(made, lambda _: 0.0, {P: 3}).run(HOUR)
    assert not plant.changes(AddWorker)
    assert plant.n(P) == 1
    assert min(t for t, _ in plant.changes()) >= 600
    assert "awaiting_first_traffic" in plant.reasons(P)


# ---------------------------------------------------------------- gaps


def test_an_outage_of_the_metrics_changes_nothing() -> None:
    def gap(i: int, w: TrafficWindow) -> TrafficWindow | None:
        return changed(w, WindowKind.NO_DATA, num_req=0.0) if i in (5, 6) else None if i == 7 else w

    plant = Plant(planned(P), steady(1.5), {P: 2}, window=gap).run(HOUR)
    assert not plant.changes()
    assert plant.reasons(P).count("no_data") == 3
    assert any("no_data_alarm" in tick.notices for _, tick in plant.ticks)


def test_zero_traffic_goes_to_the_floor_and_a_half_seen_window_never_shrinks() -> None:
    ends = Plant(planned(P, load_predictor="constant"), lambda t: 2.4 * RPS[P] * (t < HOUR), {P: 3}).run(HOUR + 500)
    assert ends.seen(P) == [3, 1]
    half = Plant(
        planned(P, load_predictor="constant"),
        lambda t: 2.4 * RPS[P] * (t < HOUR),
        {P: 3},
        window=lambda i, w: changed(w, WindowKind.PARTIAL, coverage=0.5, num_req=w.num_req / 2),
    ).run(2 * HOUR)
    assert not half.changes()
    assert any("partial" in tick.notices for _, tick in half.ticks)


def test_to_zero_and_back_with_the_first_arrival() -> None:
    made = planned(P, D, min_endpoint=0, load_predictor="constant")
    plant = Plant(made, lambda t: RPS[D] * (t < 1800 or 5400 <= t < 7200), {P: 1, D: 1})
    assert isinstance(plant.planner, WakingPlanner)
    plant.run(3000)
    assert (plant.n(P), plant.n(D)) == (0, 0)
    plant.run(5400).arrive()
    assert [(t, a.role) for t, a in plant.changes(AddWorker) if isinstance(a, AddWorker)] == [(5400, P), (5400, D)]
    plant.run(5400 + 120)
    assert (plant.n(P), plant.n(D)) == (1, 1)
    plant.run(6000)  # and the window that saw nothing does not send them away again
    assert (plant.n(P), plant.n(D)) == (1, 1)
    assert not isinstance(Plant(planned(P), steady(1), {P: 1}).planner, WakingPlanner)


# ---------------------------------------------------------------- load that moves


@pytest.mark.parametrize("load_scaling", [False, True])
def test_a_step_of_five_is_followed_within_startup_and_two_intervals(load_scaling: bool) -> None:
    made = planned(P, load_scaling=load_scaling, load_predictor="constant", load_adjustment_interval_s=20.0)
    plant = Plant(made, lambda t: RPS[P] * (1.95 if t < HOUR else 9.75), {P: 3}).run(HOUR + 120 + 2 * STEP)
    assert plant.n(P) >= 10
    if not load_scaling:  # with it, the queue that has grown meanwhile is worked off first
        plant.run(2 * HOUR)
        assert max(plant.finals(P)) <= 10 + 1


def test_a_spike_shorter_than_a_start_is_not_chased() -> None:
    made = with_preset(planned(P, load_predictor="constant"), "calm")
    plant = Plant(made, lambda t: RPS[P] * (6.0 if 3600 <= t < 3630 else 1.5), {P: 2}).run(2 * HOUR)
    downs = [t for t, _ in plant.changes(DrainWorker)]
    assert len({t for t, _ in plant.changes()}) <= 2
    ups = [t for t, _ in plant.changes(AddWorker)]
    assert all(down - max([up for up in ups if up < down], default=-1e9) >= 300 for down in downs)


def test_on_a_ramp_capacity_leads_demand() -> None:
    def ramp(t: float) -> float:
        return RPS[P] * (1.5 + 8.0 * min(max(t - HOUR, 0), 1800) / 1800)

    def kept(predictor: str) -> float:
        plant = Plant(planned(P, load_predictor=predictor, startup_s=120.0), ramp, {P: 2})
        fits, looks = 0, 0
        for t in range(int(HOUR), int(HOUR) + 1800, 30):
            plant.run(t)
            fits += plant.n(P) * RPS[P] >= ramp(t)
            looks += 1
        return fits / looks

    ahead, behind = kept("holt"), kept("constant")
    assert ahead > behind
    assert kept("kalman") >= behind


def test_a_day_with_a_night_costs_little_more_than_an_oracle() -> None:
    def day(t: float) -> float:
        noise = 0.02 * math.sin(t * 1.7) + 0.02 * math.sin(t * 0.31)
        return RPS[P] * (5.0 - 3.5 * math.cos(2 * math.pi * t / (24 * HOUR)) + noise)

    plant = Plant(planned(P, load_predictor="kalman"), day, {P: 2})
    short = looks = 0
    oracle = 0.0
    for t in range(0, 24 * 3600, 300):
        plant.run(t)
        looks += 1
        oracle += math.ceil(day(t) / RPS[P]) * 300
        short += plant.n(P) * RPS[P] < day(t)
    plant.run(24 * HOUR)
    assert short / looks <= 0.05
    assert plant.gpu_s() <= 1.15 * oracle


# ---------------------------------------------------------------- engines that misbehave


def test_cold_workers_do_not_poison_the_cost() -> None:
    made = planned(D, prior=False, load_scaling=True, load_predictor="constant", load_adjustment_interval_s=10.0)
    load = lambda t: RPS[D] * (2.0 + 0.3 * math.sin(t / 400) + 1.5 * (t > HOUR))  # noqa: E731
    warm = Plant(made, load, {D: 3}, passes=3).run(HOUR)
    assert isinstance(warm.planner, Planner)
    model = warm.planner.models[D]
    before = model.coefficients
    assert before is not None
    assert model.source == "live"
    cold = Plant(made, load, {D: 3}, passes=3, slow=lambda _, age: 5.0 if age < 30 else 1.0).run(2 * HOUR)
    assert isinstance(cold.planner, Planner)
    after = cold.planner.models[D].coefficients
    assert after is not None
    assert cold.changes(AddWorker)
    assert after.seconds(60, 60 * 3075) == pytest.approx(before.seconds(60, 60 * 3075), rel=0.05)


def test_half_the_workers_silent_holds_and_never_shrinks() -> None:
    made = planned(P, optimization_target="throughput", load_scaling=True)
    plant = Plant(made, steady(0.5), {P: 4}, silent=lambda w, t: w % 2 == 0).run(HOUR)
    assert not plant.changes()
    assert set(plant.reasons(P)) == {"worker_count_mismatch"}


def test_a_start_that_never_ends_is_given_up_and_the_other_role_scales() -> None:
    made = planned(P, D, load_predictor="constant", scale_timeout_s=600.0)
    plant = Plant(made, lambda t: RPS[D] * (0.9 if t < HOUR else 2.9), {P: 1, D: 1})
    plant.start = lambda w: "never" if plant.controller.view.starting[w].role is D else "ok"  # type: ignore[index]
    plant.run(2 * HOUR)
    assert plant.n(P) >= 3
    assert plant.n(D) == 1
    assert any("scale_timeout.decode" in tick.notices for _, tick in plant.ticks)
    assert any("starts_fail.decode" in tick.notices for _, tick in plant.ticks)
    assert plant.changes(CancelStart)
    assert "scaling_in_progress" in plant.reasons(D)


def test_w5_a_start_that_fails_is_tried_again_later_and_later() -> None:
    made = planned(P, load_predictor="constant", load_scaling=True, startup_s=20.0)
    plant = Plant(made, lambda t: RPS[P] * (0.9 if t < 900 else 1.9), {P: 1}, start=lambda _: "fails").run(HOUR)
    tries = [t for t, _ in plant.changes(AddWorker)]
    gaps = sorted({round(b - a) for a, b in pairwise(tries) if b > a})
    assert len(gaps) >= 3
    assert gaps[-1] >= 8 * 10
    assert any("starts_fail.prefill" in tick.notices for _, tick in plant.ticks)


# ---------------------------------------------------------------- timelines and bills


def test_w1_w2_billed_from_the_order_until_it_is_gone() -> None:
    made = planned(P, load_predictor="constant", throughput_adjustment_interval_s=60.0)
    plant = Plant(made, lambda t: RPS[P] * (1.9 if 60 <= t < 300 else 0.5), {P: 1}).run(600)
    assert plant.billed_s == {1: 260.0}  # ordered at 120, ready at 240, drained from 360 to 380
    short = Plant(made, lambda t: RPS[P] * (1.9 if 60 <= t < 120 else 0.5), {P: 1}).run(600)
    assert short.billed_s == {1: 60.0}  # ordered at 120, called off at 180
    assert not short.changes(DrainWorker)


def test_w4_while_a_start_is_under_way_no_ready_worker_goes() -> None:
    made = planned(P, load_predictor="constant", throughput_adjustment_interval_s=60.0, startup_s=200.0)
    plant = Plant(made, lambda t: RPS[P] * (2.9 if t < 120 else 0.3), {P: 2}).run(181)
    assert [type(a) for _, a in plant.changes()] == [AddWorker, CancelStart]
    plant.run(300)
    assert plant.n(P) == 1


def test_a_draining_worker_is_called_back_before_another_is_started() -> None:
    made = planned(P, load_predictor="constant", throughput_adjustment_interval_s=60.0)
    plant = Plant(made, lambda t: RPS[P] * (1.9 if t < 120 or t > 180 else 0.5), {P: 2}, drain_s=900.0).run(600)
    assert [type(a) for _, a in plant.changes()] == [DrainWorker, RecallWorker]
    assert plant.n(P) == 2


def test_who_was_told_to_go_is_not_told_again_before_it_is_heard_of() -> None:
    made = planned(P, optimization_target="latency", load_scaling=True)
    plant = Plant(made, steady(0.2), {P: 4}, told_after_s=13.0).run(200)
    drained = [a.worker_id for _, a in plant.changes(DrainWorker) if isinstance(a, DrainWorker)]
    assert len(drained) == len(set(drained)) == 3
    assert plant.n(P) == 1


# ---------------------------------------------------------------- budget, hands, presets


def test_a_budget_lowered_live_is_obeyed_first_and_raised_again_used() -> None:
    plant = Plant(planned(P, D, load_predictor="constant"), lambda _: RPS[D] * 3.9, {P: 4, D: 5}).run(HOUR)
    plant.post(GpuBudgetChanged(at_s=plant.now_s, max_gpus=6))
    plant.run(HOUR + 2 * STEP)
    assert plant.n(P) + plant.n(D) == 6
    assert {"budget_fit"} <= set(plant.reasons(P)) | set(plant.reasons(D))
    plant.post(GpuBudgetChanged(at_s=plant.now_s, max_gpus=None))
    plant.run(2 * HOUR)
    assert plant.n(P) + plant.n(D) >= 8


def test_gpus_never_exceed_the_budget() -> None:
    made = planned(P, D, load_predictor="constant", max_gpu_budget=7, throughput_adjustment_interval_s=60.0)
    plant = Plant(made, lambda t: RPS[D] * (2.0 + 3 * math.sin(t / 300) ** 2), {P: 1, D: 1}, drain_s=150.0)
    for t in range(0, 7200, 30):
        plant.run(t)
        assert len(plant.controller.view.workers) + len(plant.controller.view.starting) <= 7
    assert plant.changes(AddWorker)
    assert plant.changes(DrainWorker)


@pytest.mark.parametrize(("policy", "result"), [("adopt", 3), ("enforce", 2)])
def test_what_an_operator_did_is_adopted_or_undone_and_told_once(policy: str, result: int) -> None:
    made = planned(
        M, optimization_target="load", load_scaling=True, load_adjustment_interval_s=60.0, drift_policy=policy
    )
    plant = Plant(made, lambda _: RPS[M], {M: 2}).run(HOUR)  # no thresholds: the loop itself wants nothing
    plant.add_by_hand(M)
    plant.run(2 * HOUR)
    assert plant.n(M) == result
    assert sum("external_change.mixed" in tick.notices for _, tick in plant.ticks) == 1


def test_calm_shrinks_only_after_many_ticks_that_agree() -> None:
    load = lambda t: RPS[P] * (2.3 if t < 800 else 0.3)  # noqa: E731
    made = planned(P, load_scaling=True, load_predictor="constant")
    eager, calm = Plant(made, load, {P: 3}).run(2000), Plant(with_preset(made, "calm"), load, {P: 3}).run(2000)
    first = [min(t for t, _ in one.changes(DrainWorker)) for one in (eager, calm)]
    assert first[1] >= first[0] + 11 * 5
    second = sorted(t for t, _ in calm.changes(DrainWorker))
    assert second[1] - second[0] >= 300
    assert "cooldown" in calm.reasons(P)


def test_advice_is_given_and_nothing_done() -> None:
    plant = Plant(planned(P, advisory=True, load_predictor="constant"), steady(4.9), {P: 1}).run(HOUR)
    assert not plant.changes()
    assert plant.reasons(P)[-1] == "advisory"
    assert plant.finals(P)[-1] == 5


def test_a_bad_predictor_is_the_last_value() -> None:
    class Bad:
        name, ready, n = "bad", True, 0

        def observe(self, y: float) -> None:
            self.n += 1

        def predict(self, h: int) -> float:
            return (math.nan, -1.0, 1e18)[self.n % 3]

    made = planned(P, load_predictor="bad-one")
    plant = Plant(made, steady(1.5), {P: 2}, planner=Planner(made, {"bad-one": Bad})).run(HOUR)
    assert not plant.changes()
    assert plant.ticks[-1][1].forecasts[0].failures > 0


# ---------------------------------------------------------------- records


def test_every_tick_says_what_each_stage_said() -> None:
    made = planned(P, D, load_scaling=True, load_adjustment_interval_s=20.0)
    plant = Plant(made, lambda _: 1.9 * RPS[D], {P: 2, D: 2}, journaled=True).run(1800)
    _, tick = [one for one in plant.ticks if "throughput" in one[1].due][-1]
    assert tick.due == ("throughput", "load")
    assert tick.demand.fed == pytest.approx(1.9 * RPS[D] * STEP)
    assert tick.demand.age_s == 0
    assert {f.quantity for f in tick.forecasts} == {"num_req", "isl", "osl"}
    assert {m.role: m.source for m in tick.models}[P] in ("prior", "live")
    assert [r.role for r in tick.roles] == [P, D]
    assert tick.roles[1].throughput == 2
    assert tick.roles[1].load == 2
    assert tick.roles[0].capacity_rps == pytest.approx(RPS[P], rel=1e-3)
    assert tick.gpus == 4
    plant.check_replay()


def test_half_a_pipeline_is_not_scaled() -> None:
    made = planned(P, D, load_predictor="constant")
    pools = (made.pools[0], type(made.pools[1])(role=D, group="d"))  # decode has no cost to go by, and no passes
    made = type(made)(pools=pools, optimization_target="sla", load_scaling=False, max_gpu_budget=64)
    plant = Plant(made, steady(4.0), {P: 1, D: 1}, silent=lambda *_: True).run(HOUR)
    assert not plant.changes()
    assert plant.reasons(P)[-1] == "partner_not_ready"
    assert plant.reasons(D)[-1] == "model_not_ready"


def test_the_slow_loop_bounds_the_fast_one_from_below() -> None:
    made = planned(P, load_scaling=True, load_predictor="constant", load_adjustment_interval_s=20.0)
    plant = Plant(made, steady(2.9), {P: 4}).run(1800)
    assert plant.n(P) >= 3
    assert "capped_by_throughput" in plant.reasons(P)


def test_an_unreachable_limit_is_said_and_not_scaled_for() -> None:
    plant = Plant(planned(P, ttft_s=0.05, load_scaling=True), steady(1.5), {P: 2}).run(1200)
    assert plant.n(P) == 2
    assert "sla_unreachable" in plant.reasons(P)
    assert all(r.sla_unreachable for t, r in plant.role_ticks(P) if t > 2 * STEP)


def test_the_changes_are_counted() -> None:
    plant = Plant(planned(P), steady(1.5), {P: 3}).run(HOUR)
    assert isinstance(plant.planner, Planner)
    assert plant.planner.counters == {"scale_changes.prefill.down": 1}
    assert distinct(plant.finals(P)) == [2]
