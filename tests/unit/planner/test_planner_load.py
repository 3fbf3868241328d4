"""Scaling by forecast (U1 to U9, C18) and by what runs and waits (L1 to L14), with the specification's figures."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.ids import Role, WorkerId
from policies.cluster.ticks import PlanReason
from policies.planner.capacity import Limits, Work
from policies.planner.constrain import clamped
from policies.planner.load import by_sla, by_thresholds, consolidates
from policies.planner.samples import Engine
from policies.planner.settings import PoolSettings
from policies.planner.step_model import StepCoefficients
from policies.planner.throughput import needed, workers_for

COSTS = {
    Role.PREFILL: StepCoefficients(base_s=0.010, per_x_s=20e-6),
    Role.DECODE: StepCoefficients(base_s=0.004, per_x_s=0.2e-3, per_kv_s=0.1e-6),
    Role.MIXED: StepCoefficients(base_s=0.010, per_x_s=20e-6, per_kv_s=0.1e-6),
}
RPS = 15.384615
UP, DOWN, STAY = PlanReason.SCALE_UP, PlanReason.SCALE_DOWN, PlanReason.NO_CHANGE
REFUSED = PlanReason.REFUSED_CONSOLIDATION


# ---------------------------------------------------------------- throughput


@pytest.mark.parametrize(
    ("name", "n", "demand", "rps", "result"),
    [("U1", 2, 30, RPS, 2), ("U2", 2, 46.2, RPS, 4), ("U3", 2, 30.76923, RPS, 2), ("U4", 2, 0, RPS, 1)],
)
def test_workers_for_a_demand(name: str, n: int, demand: float, rps: float, result: int) -> None:
    assert workers_for(n, demand, rps, 0.8, 1) == result


@pytest.mark.shared
def test_u5_c18c_noise_around_a_whole_number_is_one_change(shared: Path) -> None:
    with (shared / "cases/inputs/c18_demand.csv").open(encoding="utf-8") as lines:
        demands = [float(row["requests_per_second"]) for row in csv.DictReader(lines)]
    n, seen = 2, []
    for demand in demands:
        n = workers_for(n, demand, 5.0, 0.8, 1)
        seen.append(n)
    assert seen == [2, *[3] * 11]
    plain = [needed(demand, 5.0) for demand in demands]
    assert sum(a != b for a, b in pairwise(plain)) == 11
    assert workers_for(n, 24.0, 5.0, 0.8, 1) == 5


def test_u6_c18b_steady_load_is_a_steady_count() -> None:
    n, seen = 3, []
    for _ in range(20):
        n = workers_for(n, 1.5, 1.0, 0.8, 1)
        seen.append(n)
    assert seen == [2] * 20


@pytest.mark.parametrize(
    ("name", "n", "demand", "rps", "seen"), [("U7", 2, 200, 10, [10, 18, 20]), ("U8", 20, 10, 5, [12, 4, 3])]
)
def test_no_more_than_eight_at_once(name: str, n: int, demand: float, rps: float, seen: list[int]) -> None:
    found = []
    for _ in range(3):
        n = clamped(workers_for(n, demand, rps, 0.8, 1), n, 8, 1)
        found.append(n)
    assert found == seen


def test_u9_a_floor_is_kept_whatever_else_is_known() -> None:
    assert clamped(1, 1, 8, 2) == 2
    assert clamped(1, 1, 8, 12) == 12  # more than the clamp


@given(n=st.integers(1, 30), demand=st.floats(0, 100), rps=st.floats(0.5, 20))
def test_a_demand_that_stays_is_answered_once(n: int, demand: float, rps: float) -> None:
    first = workers_for(n, demand, rps, 0.8, 1)
    assert workers_for(first, demand, rps, 0.8, 1) == first
    assert first * rps >= demand - 1e-6


# ---------------------------------------------------------------- load: by promised latency


def prefill(*queued: float) -> list[Engine]:
    return [engine(i, queued=q) for i, q in enumerate(queued)]


def engine(i: int, queued: float = 0.0, kv: float = 0.0, b: float = 0.0, scheduled: float = 0.0) -> Engine:
    return Engine(
        worker_id=WorkerId(i),
        dp_rank=0,
        queued_prefill_tokens=queued,
        scheduled_prefill_tokens=scheduled,
        running_kv_tokens=kv,
        queued_kv_tokens=0.0,
        decode_requests=b,
    )


def sla(role: Role, engines: list[Engine], max_kv: int = 1_048_576) -> tuple[int, PlanReason]:
    pool = PoolSettings(role=role, group="g", max_kv_tokens=max_kv)
    limits = Limits(ttft_s=0.5, itl_s=0.05)
    vote = by_sla(len(engines), engines, COSTS[role], pool, Work(isl=3000, osl=150), limits, 0.8)
    return vote.workers, vote.reason


@pytest.mark.parametrize(
    ("name", "queued", "result"),
    [
        ("L1", (30_000, 30_000), (3, UP)),
        ("L2", (30_000, 20_000), (2, STAY)),
        ("L3", (8000, 8000), (1, DOWN)),
        ("L4", (9000, 9000), (2, REFUSED)),
        ("L5", (12_000, 12_000, 12_000), (3, REFUSED)),
        ("one worker stays", (0,), (1, STAY)),
    ],
)
def test_prefill_by_sla(name: str, queued: tuple[float, ...], result: tuple[int, PlanReason]) -> None:
    assert sla(Role.PREFILL, prefill(*queued)) == result


@pytest.mark.parametrize(
    ("name", "n", "kv", "b", "result"),
    [
        ("L6", 2, 300_000, 100, (3, UP)),
        ("L7", 2, 100_000, 33, (1, DOWN)),
        ("L8", 2, 120_000, 40, (2, REFUSED)),
        ("L9", 3, 60_000, 20, (2, DOWN)),
    ],
)
def test_decode_by_sla(name: str, n: int, kv: float, b: float, result: tuple[int, PlanReason]) -> None:
    assert sla(Role.DECODE, [engine(i, kv=kv, b=b) for i in range(n)]) == result


def test_a_decode_worker_goes_only_where_its_kv_has_room() -> None:
    engines = [engine(i, kv=60_000, b=20) for i in range(3)]
    assert sla(Role.DECODE, engines, max_kv=90_000) == (3, REFUSED)


def test_mixed_grows_for_either_limit_and_shrinks_for_both() -> None:
    calm = [engine(i, kv=30_000, b=10) for i in range(2)]
    assert sla(Role.MIXED, calm) == (1, DOWN)
    assert sla(Role.MIXED, [engine(i, queued=30_000) for i in range(2)]) == (3, UP)
    assert sla(Role.MIXED, [engine(i, kv=500_000) for i in range(2)]) == (3, UP)
    assert sla(Role.MIXED, [engine(i, queued=9000) for i in range(2)]) == (2, REFUSED)
    assert sla(Role.MIXED, [engine(i, kv=170_000) for i in range(2)]) == (2, REFUSED)


def test_nothing_is_added_for_a_limit_that_an_idle_worker_misses() -> None:
    pool = PoolSettings(role=Role.PREFILL, group="g")
    engines, work = prefill(30_000, 30_000), Work(isl=3000, osl=150)
    vote = by_sla(2, engines, COSTS[Role.PREFILL], pool, work, Limits(ttft_s=0.05, itl_s=0.05), 0.8)
    assert (vote.workers, vote.reason) == (2, PlanReason.SLA_UNREACHABLE)


# ---------------------------------------------------------------- load: by thresholds


def easy(target: str, role: Role, *values: float) -> tuple[int, PlanReason]:
    pool = PoolSettings(role=role, group="g", max_kv_tokens=1000, context_tokens=1000, up_above=0.8, down_below=0.3)
    engines = [
        engine(i, queued=1000 * v) if role is Role.PREFILL else engine(i, kv=1000 * v) for i, v in enumerate(values)
    ]
    vote = by_thresholds(len(engines), engines, pool, target)
    return vote.workers, vote.reason


@pytest.mark.parametrize(
    ("name", "target", "role", "values", "result"),
    [
        ("L10", "throughput", Role.DECODE, (0.45, 0.40), (1, DOWN)),
        ("L10", "throughput", Role.DECODE, (0.55, 0.50), (2, REFUSED)),
        ("L10", "throughput", Role.DECODE, (0.55, 0.55, 0.55), (2, DOWN)),
        ("L11", "throughput", Role.DECODE, (1.0, 1.0), (2, REFUSED)),
        ("L11", "throughput", Role.DECODE, (1.02, 0.3), (3, UP)),
        ("L12", "throughput", Role.PREFILL, (1.0, 0), (3, UP)),
        ("L12", "throughput", Role.PREFILL, (0.10, 0.05), (2, STAY)),
        ("L12", "throughput", Role.PREFILL, (0.09, 0.05), (1, DOWN)),
        ("L13", "latency", Role.PREFILL, (0.1, 0), (3, UP)),
        ("L13", "latency", Role.PREFILL, (0, 0), (1, DOWN)),
        ("L13", "latency", Role.DECODE, (0.4, 0.4), (2, REFUSED)),
        ("own", "load", Role.DECODE, (0.8, 0.1), (3, UP)),
        ("own", "load", Role.DECODE, (0.3, 0.3), (1, DOWN)),
        ("own", "load", Role.DECODE, (0.31, 0.3), (2, STAY)),
    ],
)  # fmt: skip
def test_by_thresholds(
    name: str, target: str, role: Role, values: tuple[float, ...], result: tuple[int, PlanReason]
) -> None:
    assert easy(target, role, *values) == result


@pytest.mark.shared
def test_l14_c18a_what_the_rest_would_carry(shared: Path) -> None:
    with (shared / "cases/inputs/c18_utilisation.csv").open(encoding="utf-8") as lines:
        rows = [(int(row["replicas"]), float(row["kv_utilisation_each"])) for row in csv.DictReader(lines)]
    assert [consolidates(n, each, 0.8) for n, each in rows] == [False, True, False, True, False, True]


@given(
    target=st.sampled_from(["throughput", "latency", "load"]),
    role=st.sampled_from([Role.PREFILL, Role.DECODE]),
    total=st.floats(0, 12),
    n=st.integers(1, 12),
)
def test_a_load_that_stays_never_goes_back_and_forth(target: str, role: Role, total: float, n: int) -> None:
    seen = []
    for _ in range(30):
        n = easy(target, role, *[total / n] * n)[0]
        seen.append(n)
        assert 1 <= n <= 200
    changes = [b - a for a, b in pairwise(seen) if a != b]
    assert len(set(changes)) <= 1, seen  # all up, or all down
