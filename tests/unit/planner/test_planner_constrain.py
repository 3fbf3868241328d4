"""GPUs (G1 to G11, C19), steps, patience, and who goes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import worker
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.events import WorkerReported, WorkerStarting
from policies.cluster.ids import Role, WorkerId
from policies.cluster.state import Cluster, WorkerView
from policies.cluster.ticks import PlanReason
from policies.errors import ConfigError
from policies.planner.budget import Share, above_floor, fit, fit_from
from policies.planner.constrain import Bounds, Claim, Verdict, constrain
from policies.planner.lookahead_settings import LookaheadSettings
from policies.planner.merge import Kind, Proposal, TimeBudget, merged
from policies.planner.settings import PlannerSettings, PoolSettings, with_preset
from policies.planner.who_goes import to_cancel, to_drain, to_recall


def shares(p: int, d: int, g_p: int, g_d: int, least: int = 1) -> tuple[Share, Share]:
    return Share(want=p, least=least, gpus=g_p), Share(want=d, least=least, gpus=g_d)


@pytest.mark.parametrize(
    ("name", "want", "gpus", "budget", "least", "result"),
    [
        ("G1", (5, 2), (8, 1), 30, 1, (3, 2)),
        ("G2", (2, 3), (8, 1), 15, 1, (1, 3)),
        ("G4", (4, 4), (2, 1), 10, 1, (3, 4)),
        ("G5", (5, 3), (1, 8), 20, 1, (4, 2)),
        ("G6", (6, 6), (1, 1), 8, 1, (4, 4)),
        ("G7", (1, 10), (8, 1), 12, 1, (1, 4)),
        ("G8", (8, 1), (1, 4), 8, 1, (4, 1)),
        ("G9", (4, 4), (4, 4), 20, 2, (2, 3)),
    ],
)
def test_as_much_as_fits(
    name: str, want: tuple[int, int], gpus: tuple[int, int], budget: int, least: int, result: tuple[int, int]
) -> None:
    assert fit(shares(*want, *gpus, least), budget) == result


@pytest.mark.shared
def test_c19_a_budget_is_a_ceiling(shared: Path) -> None:
    cases = json.loads((shared / "cases/inputs/c19_budget.json").read_text(encoding="utf-8"))["cases"]
    found = {}
    for case in cases:
        claims = (
            Share(want=case["want_prefill"], least=case["min_each"], gpus=case["gpus_per_prefill"]),
            Share(want=case["want_decode"], least=case["min_each"], gpus=case["gpus_per_decode"]),
        )
        if case["name"] == "c":
            with pytest.raises(ConfigError, match=r"needs 9 GPUs.*budget is 8"):
                fit(claims, case["budget"])
        else:
            found[case["name"]] = fit(claims, case["budget"])
    assert found == {"a": (3, 2), "b": (1, 3)}


def test_g3_an_infeasible_minimum_is_refused_at_the_start_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"needs 9 GPUs.*max_gpu_budget is 8"):
        settings(g_p=8, max_gpu_budget=8)


@pytest.mark.parametrize(("counts", "result"), [((5, 4), (5, 4)), ((4, 2), (4, 2)), ((4, 1), (4, 2)), ((1, 1), (4, 2))])
def test_g11_a_floor_keeps_the_total_from_shrinking_below_it(counts: tuple[int, int], result: tuple[int, int]) -> None:
    claims = shares(*counts, 1, 1)
    assert above_floor(counts, (5, 4), claims, 12, 7) == result  # 7 less a tolerance of 1


def test_a_floor_never_invents_growth() -> None:
    assert above_floor((1, 1), (2, 1), shares(1, 1, 1, 1), 12, 8) == (2, 1)
    assert above_floor((3, 3), (3, 3), shares(3, 3, 1, 1), 12, 8) == (3, 3)


COUNTS = st.integers(1, 12)
GPUS = st.sampled_from([1, 2, 4, 8])


@given(want=st.tuples(COUNTS, COUNTS), gpus=st.tuples(GPUS, GPUS), budget=st.integers(16, 80))
def test_never_above_what_is_wanted_nor_the_budget_and_nothing_left_that_would_fit(
    want: tuple[int, int], gpus: tuple[int, int], budget: int
) -> None:
    p, d = fit(shares(*want, *gpus), budget)
    used = p * gpus[0] + d * gpus[1]
    assert 1 <= p <= want[0]
    assert 1 <= d <= want[1]
    assert used <= budget
    for n, wanted, size in ((p, want[0], gpus[0]), (d, want[1], gpus[1])):
        assert n == wanted or used + size > budget


@given(
    want=st.tuples(COUNTS, COUNTS), now=st.tuples(COUNTS, COUNTS), gpus=st.tuples(GPUS, GPUS), spare=st.integers(0, 40)
)
def test_the_budget_never_turns_an_up_into_a_down(
    want: tuple[int, int], now: tuple[int, int], gpus: tuple[int, int], spare: int
) -> None:
    budget = now[0] * gpus[0] + now[1] * gpus[1] + spare
    found = fit_from(shares(*want, *gpus), now, budget)
    for n, wanted, before in zip(found, want, now, strict=True):
        assert n >= min(wanted, before)


# ---------------------------------------------------------------- all constraints


def settings(g_p: int = 1, g_d: int = 1, least: int = 1, **changes: object) -> PlannerSettings:
    pools = (
        PoolSettings(role=Role.PREFILL, group="p", engine_num_gpu=g_p, min_endpoint=least),
        PoolSettings(role=Role.DECODE, group="d", engine_num_gpu=g_d, min_endpoint=least),
    )
    return replace(PlannerSettings(pools=pools, max_gpu_budget=1000), **changes)  # type: ignore[arg-type]


def claim(role: Role, ready: int, want: int, **changes: object) -> Claim:
    reason = PlanReason.SCALE_UP if want > ready else PlanReason.SCALE_DOWN if want < ready else PlanReason.NO_CHANGE
    return replace(Claim(role=role, ready=ready, pending=0, draining=0, want=want, reason=reason), **changes)  # type: ignore[arg-type]


def judged(p: Claim, d: Claim, made: PlannerSettings | None = None, most: int | None = None) -> tuple[Verdict, Verdict]:
    made = made or settings()
    found = constrain(
        (p, d), made, Bounds(most=made.max_gpu_budget if most is None else most, least=made.min_gpu_budget)
    )
    return found[Role.PREFILL], found[Role.DECODE]


def prefill(ready: int, want: int, **changes: object) -> Claim:
    return claim(Role.PREFILL, ready, want, **changes)


def decode(ready: int = 1, want: int = 1, **changes: object) -> Claim:
    return claim(Role.DECODE, ready, want, **changes)


@pytest.mark.parametrize(
    ("of", "final", "reason"),
    [
        (prefill(2, 3), 3, PlanReason.SCALE_UP),
        (prefill(2, 0), 1, PlanReason.FLOOR),
        (prefill(2, 20), 10, PlanReason.DELTA_CLAMPED),
        (prefill(20, 3), 12, PlanReason.DELTA_CLAMPED),
        (prefill(3, 2, patient=False), 3, PlanReason.COOLDOWN),
        (prefill(2, 3, cool_up=False), 2, PlanReason.COOLDOWN),
        (prefill(2, 5, pending=1, growing=True), 3, PlanReason.SCALING_IN_PROGRESS),
        (prefill(2, 1, pending=1, growing=True), 2, PlanReason.SCALING_IN_PROGRESS),  # W4: only the start is called off
        (prefill(2, 2, pending=1, growing=True, reason=PlanReason.SCALE_DOWN), 2, PlanReason.SCALE_DOWN),
        (prefill(0, 0), 1, PlanReason.FLOOR),
    ],
)
def test_one_constraint_at_a_time(of: Claim, final: int, reason: PlanReason) -> None:
    found, _ = judged(of, decode())
    assert (found.final, found.reason) == (final, reason)


def test_a_floor_is_repaired_at_once_however_far_away_it_is() -> None:
    found, _ = judged(prefill(1, 1), decode(12, 12), settings(least=12))
    assert (found.final, found.reason) == (12, PlanReason.FLOOR)


def test_g10_growth_within_the_budget_is_not_all_or_nothing() -> None:
    p, d = judged(prefill(1, 5), decode(1, 2), settings(g_p=8), most=30)
    assert (p.final, d.final) == (3, 2)
    assert p.reason is PlanReason.BUDGET_FIT


def test_gpus_of_draining_workers_are_not_free_and_calling_back_costs_none() -> None:
    p, _ = judged(prefill(2, 4), decode(1, 1, draining=4), most=8)
    assert (p.final, p.reason) == (3, PlanReason.BUDGET_FIT)
    p, _ = judged(prefill(2, 4, draining=2), decode(4, 4), most=8)
    assert p.final == 4


def test_growth_waits_for_gpus_that_are_only_about_to_be_free() -> None:
    p, d = judged(prefill(2, 4), decode(6, 4), most=8)
    assert (p.final, p.reason) == (2, PlanReason.BUDGET_HOLD)
    assert d.final == 4


@given(
    ready=st.tuples(COUNTS, COUNTS), pending=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    draining=st.tuples(st.integers(0, 3), st.integers(0, 3)), want=st.tuples(COUNTS, COUNTS),
    gpus=st.tuples(GPUS, GPUS), most=st.integers(16, 120),
)  # fmt: skip
def test_the_ceiling_holds_at_every_instant(
    ready: tuple[int, int],
    pending: tuple[int, int],
    draining: tuple[int, int],
    want: tuple[int, int],
    gpus: tuple[int, int],
    most: int,
) -> None:
    claims = [
        claim(role, ready[i], want[i], pending=pending[i], draining=draining[i])
        for i, role in enumerate((Role.PREFILL, Role.DECODE))
    ]
    found = judged(claims[0], claims[1], settings(*gpus), most=most)
    before = after = 0
    for i, (of, verdict) in enumerate(zip(claims, found, strict=True)):
        cancelled = min(of.pending, max(0, of.current - verdict.final))
        added = max(0, verdict.final - of.current - of.draining)  # beyond those that are called back
        before += (of.current + of.draining) * gpus[i]
        after += (of.current + of.draining - cancelled + added) * gpus[i]
    assert after <= max(most, before)


def test_a_lower_budget_is_obeyed_first_and_without_patience() -> None:
    p, d = judged(prefill(4, 4, patient=False), decode(4, 4, patient=False), most=6)
    assert (p.final, d.final) == (3, 3)
    assert p.reason is d.reason is PlanReason.BUDGET_FIT
    p, d = judged(prefill(4, 4), decode(4, 4), settings(g_p=8), most=8)  # below what must be: only that stays
    assert (p.final, d.final) == (1, 1)


# ---------------------------------------------------------------- who goes


def views(*told: tuple[int, int, float]) -> list[WorkerView]:
    """Workers 0, 1, ... with (running, cached blocks, up since)."""
    cluster = Cluster()
    for i, (running, cached, at_s) in enumerate(told):
        cluster.fold(worker(i, at_s=at_s))
        cluster.fold(
            WorkerReported(
                at_s=at_s, worker_id=WorkerId(i), measured_s=at_s, running=running, waiting=0, active_blocks=0,
                cached_blocks=cached,
            )
        )  # fmt: skip
    return list(cluster.workers.values())


@pytest.mark.parametrize(
    ("told", "gone"),
    [
        (((2, 0, 0.0), (1, 9, 0.0)), 1),  # fewest open requests
        (((1, 5, 9.0), (1, 3, 0.0)), 1),  # then fewest cached blocks
        (((1, 3, 0.0), (1, 3, 5.0)), 1),  # then the youngest
        (((1, 3, 0.0), (1, 3, 0.0)), 0),  # then the lowest id
    ],
)
def test_who_goes_first(told: tuple[tuple[int, int, float], ...], gone: int) -> None:
    assert [w.worker_id for w in to_drain(views(*told), 1)] == [gone]
    assert [w.worker_id for w in to_recall(views(*told), 1)] == [1 - gone]


def test_the_last_start_is_called_off_first() -> None:
    starts = [
        WorkerStarting(at_s=at_s, worker_id=WorkerId(i), name=f"w{i}", role=Role.MIXED, group="g", decision_id=1)
        for i, at_s in enumerate((1.0, 5.0, 5.0))
    ]
    assert to_cancel(starts, 2) == [2, 1]


def test_blocks_that_nobody_else_holds_may_come_from_an_index() -> None:
    two = views((1, 3, 0.0), (1, 9, 0.0))
    assert [w.worker_id for w in to_drain(two, 1, lambda w: -w.worker_id)] == [1]


# ---------------------------------------------------------------- proposals


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ([], 3),
        ([Proposal(kind=Kind.SET, workers=5)], 5),
        ([Proposal(kind=Kind.SET, workers=5, rank=2), Proposal(kind=Kind.SET, workers=7, rank=1)], 7),
        ([Proposal(kind=Kind.SET, workers=1), Proposal(kind=Kind.AT_LEAST, workers=2)], 2),
        ([Proposal(kind=Kind.AT_LEAST, workers=6), Proposal(kind=Kind.AT_MOST, workers=4)], 4),
        ([Proposal(kind=Kind.AT_LEAST, workers=2), Proposal(kind=Kind.AT_LEAST, workers=4)], 4),
        ([Proposal(kind=Kind.SET, workers=9), Proposal(kind=Kind.REJECT)], None),
    ],
)
def test_proposals_are_made_into_one(said: list[Proposal], result: int | None) -> None:
    assert merged(said, 3) == result


def test_a_slow_plug_in_is_left_alone_for_a_minute() -> None:
    budget = TimeBudget()
    for at_s in (0.0, 5.0):
        budget.took("x", 1.5, at_s)
    budget.took("x", 0.5, 10.0)
    for at_s in (15.0, 20.0):
        budget.took("x", 1.5, at_s)
    assert budget.asks("x", 20.0)
    budget.took("x", 1.5, 25.0)
    assert not budget.asks("x", 84.9)
    assert budget.asks("x", 85.0)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("ttft_s is 0", {"ttft_s": 0.0}),
        ("itl_s is -1", {"itl_s": -1.0}),
        ("perfect square", {"fpm_sample_bucket_size": 12}),
        ("must be shorter", {"optimization_target": "sla", "load_adjustment_interval_s": 180.0}),
        ("must be one of", {"optimization_target": "cost"}),
        ("plans workers of role mixed", {"mode": "agg"}),
        ("both off", {"load_scaling": False}),
        ("above max_gpu_budget", {"min_gpu_budget": 2000}),
        ("optimization_target = sla", {"lookahead": LookaheadSettings()}),
    ],
)
def test_settings_that_cannot_be_are_refused(match: str, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=match):
        settings(**changes)  # type: ignore[arg-type]


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    pool = PoolSettings(role=Role.MIXED, group="g", engine_num_gpu=None)
    with pytest.raises(ConfigError, match="could not be kept"):
        PlannerSettings(pools=(pool,), mode="agg")
    assert PlannerSettings(pools=(pool,), mode="agg", max_gpu_budget=None).pools[0].gpus == 1


def test_defaults_of_the_specification() -> None:
    made = settings()
    assert (made.optimization_target, made.ttft_s, made.itl_s) == ("throughput", 0.5, 0.05)
    assert (made.throughput_adjustment_interval_s, made.load_adjustment_interval_s) == (180, 5)
    assert (made.scales_throughput, made.scales_load, made.tick_s) == (False, True, 5)
    assert made.notices
    sla = settings(optimization_target="sla", throughput_adjustment_interval_s=12.5)
    assert (sla.scales_throughput, sla.scales_load, sla.tick_s) == (True, True, 2.5)
    assert sla.notices == ()
    assert settings(optimization_target="sla").horizon == 2
    calm = with_preset(made, "calm")
    assert (calm.down_after_ticks, calm.up_cooldown_s, calm.down_cooldown_s) == (12, 0, 300)
    with pytest.raises(ConfigError, match="one of calm"):
        with_preset(made, "wild")
