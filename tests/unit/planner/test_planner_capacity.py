"""What an engine can do, against the figures of the specification (M1 to M14), and the model that it is told from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.ids import Role
from policies.planner.capacity import Capacity, Limits, Work, capacity, chunked_s, queued_ttft_s
from policies.planner.settings import PoolSettings
from policies.planner.step_model import Sample, StepCoefficients, StepModel

PREFILL = StepCoefficients(base_s=0.010, per_x_s=20e-6)
DECODE = StepCoefficients(base_s=0.004, per_x_s=0.2e-3, per_kv_s=0.1e-6)
MIXED = StepCoefficients(base_s=0.010, per_x_s=20e-6, per_kv_s=0.1e-6)
COSTS = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.MIXED: MIXED}


def pool(role: Role, max_kv_tokens: int = 1_048_576) -> PoolSettings:
    return PoolSettings(role=role, group="g", max_kv_tokens=max_kv_tokens)


def of(
    role: Role,
    isl: int,
    osl: int = 150,
    ttft_ms: float = 500,
    itl_ms: float = 50,
    hit: float = 0.0,
    accept: float = 1.0,
    max_kv: int = 1_048_576,
) -> Capacity:
    work = Work(isl=isl, osl=osl, hit_rate=hit, accept_length=accept)
    return capacity(role, COSTS[role], pool(role, max_kv), work, Limits(ttft_s=ttft_ms / 1000, itl_s=itl_ms / 1000))


@pytest.mark.parametrize(
    ("name", "found", "batch", "rps", "ms", "unreachable"),
    [
        ("M1", of(Role.PREFILL, 3000), 2, 15.384615, 130, False),
        ("M2", of(Role.PREFILL, 3000, hit=0.5), 5, 31.25, 160, False),
        ("M3", of(Role.PREFILL, 3000, ttft_ms=50), 2, 15.384615, 130, True),
        ("M4", of(Role.PREFILL, 10_000), 1, 4.545455, 220, False),
        ("M5", of(Role.PREFILL, 1000, ttft_ms=100), 4, 44.444444, 90, False),
        ("M6", of(Role.DECODE, 3000), 90, 12.078510, 49.675, False),
        ("M7", of(Role.DECODE, 3000, itl_ms=20), 31, 10.473415, 19.7325, False),
        ("M8", of(Role.DECODE, 3000, max_kv=100_000), 32, 10.540184, 20.24, False),
        ("M9", of(Role.DECODE, 3000, itl_ms=20, accept=1.5), 51, 17.066845, 19.9216667, False),
        ("M10", of(Role.MIXED, 3000), 56, 7.523848, 49.62, False),
        ("M11", of(Role.MIXED, 3000, hit=0.5), 78, 10.487042, 49.585, False),
    ],
)
def test_capacity_of_one_engine(
    name: str, found: Capacity, batch: int, rps: float, ms: float, unreachable: bool
) -> None:
    latency_s = found.ttft_s if found.itl_s is None else found.itl_s
    assert latency_s is not None
    assert (found.batch, found.unreachable) == (batch, unreachable)
    assert found.rps == pytest.approx(rps, abs=1e-6)
    assert latency_s * 1000 == pytest.approx(ms, abs=1e-4)


def test_m10_m11_time_to_first_token_beside_decodes() -> None:
    m10, m11 = of(Role.MIXED, 3000).ttft_s, of(Role.MIXED, 3000, hit=0.5).ttft_s
    assert (m10, m11) == (pytest.approx(0.10962), pytest.approx(0.079585))


@pytest.mark.parametrize(("queued", "hit", "ms"), [(20_000, 0, 490), (20_000, 0.5, 250), (0, 0.99, 13)])
def test_m12_m13_waiting_behind_a_queue(queued: float, hit: float, ms: float) -> None:
    work = Work(isl=3000, osl=150, hit_rate=hit)
    assert queued_ttft_s(PREFILL, pool(Role.PREFILL), queued, work) * 1000 == pytest.approx(ms)


@pytest.mark.parametrize(("tokens", "ms"), [(8192, 173.84), (8193, 183.86)])
def test_m14_a_step_more_for_a_token_more(tokens: int, ms: float) -> None:
    assert chunked_s(PREFILL, tokens, 8192) * 1000 == pytest.approx(ms)


@given(
    isl=st.integers(1, 20_000),
    osl=st.integers(1, 2000),
    itl_ms=st.integers(1, 200),
    role=st.sampled_from([Role.DECODE, Role.MIXED]),
)
def test_no_batch_that_fits_and_keeps_the_limits_is_faster(isl: int, osl: int, itl_ms: int, role: Role) -> None:
    found = of(role, isl, osl, itl_ms=itl_ms)
    tight = PoolSettings(role=role, group="g", max_num_seqs=found.batch + 1)
    work, limits = Work(isl=isl, osl=osl), Limits(ttft_s=0.5, itl_s=itl_ms / 1000)
    more = capacity(role, COSTS[role], tight, work, limits)  # every batch up to one more, looked at one by one
    if not found.unreachable:
        assert not more.unreachable
        assert more.rps <= found.rps * (1 + 1e-9) or more.batch == found.batch + 1


# ---------------------------------------------------------------- the model


def learned(role: Role, *points: tuple[float, float, float], **options: int) -> StepModel:
    model = StepModel(role, **options)
    for at, (x, kv, seconds) in enumerate(points):
        model.learn(Sample(x=x, kv=kv, seconds=seconds, at_s=float(at)))
    return model


def told(cost: StepCoefficients, *points: tuple[float, float]) -> list[tuple[float, float, float]]:
    return [(x, kv, cost.seconds(x, kv)) for x, kv in points]


GRID = [(b, b * ctx) for b in (1, 10, 40, 90) for ctx in (500, 2000, 4000)]


@pytest.mark.parametrize("role", COSTS)
def test_a_model_finds_the_cost_that_made_its_samples(role: Role) -> None:
    model = learned(role, *told(COSTS[role], *GRID))
    assert model.source == "live"
    assert model.r2 == pytest.approx(1)
    found = model.coefficients
    assert found is not None
    assert found.base_s == pytest.approx(COSTS[role].base_s, rel=1e-5)
    assert found.per_x_s == pytest.approx(COSTS[role].per_x_s, rel=1e-5)
    assert found.per_kv_s == pytest.approx(COSTS[role].per_kv_s, rel=1e-5)


def test_what_always_moves_together_is_told_apart_no_further_than_it_can_be() -> None:
    model = learned(Role.DECODE, *told(DECODE, *((b, b * 3000) for b in range(5, 60, 5))))
    found = model.coefficients
    assert found is not None
    assert found.seconds(33, 33 * 3000) == pytest.approx(DECODE.seconds(33, 33 * 3000), rel=1e-6)


@pytest.mark.parametrize(
    ("role", "points"),
    [
        (Role.PREFILL, [(100, 0, 0.01)] * 4),  # too few
        (Role.PREFILL, [(100, 0, 0.01)] * 9),  # all alike: no slope to be told
        (Role.PREFILL, [(x, 0, 0.02 - 1e-5 * x) for x in range(100, 1000, 100)]),  # more work takes less time
        (Role.DECODE, [(b, kv, 0.02 - 1e-9 * kv) for b, kv in GRID]),
        (Role.MIXED, [(b, kv, 0.02 - 1e-5 * b + 1e-7 * kv) for b, kv in GRID]),
    ],
)
def test_a_model_that_cannot_be_is_not_ready(role: Role, points: list[tuple[float, float, float]]) -> None:
    model = learned(role, *points)
    assert not model.ready
    assert model.source == "none"
    assert StepModel(role, PREFILL).source == "prior"


def test_a_slope_of_sequences_below_zero_counts_as_none() -> None:
    found = learned(Role.DECODE, *((b, kv, 0.01 - 1e-5 * b + 1e-7 * kv) for b, kv in GRID)).coefficients
    assert found is not None
    assert found.per_x_s == 0
    assert found.per_kv_s > 0


def test_outliers_and_infinities_are_not_learned() -> None:
    model = learned(Role.PREFILL, *told(PREFILL, *((x, 0) for x in range(100, 2000, 100))))
    before = model.coefficients
    for seconds in (float("inf"), float("nan"), 0.0, 5.0):
        assert not model.learn(Sample(x=1000, kv=0, seconds=seconds, at_s=50))
    assert model.coefficients == before
    assert model.outliers == 1


def test_rare_loads_survive_many_common_ones() -> None:
    rare = told(PREFILL, (8000, 0), (6000, 0), (4000, 0))
    model = learned(Role.PREFILL, *rare, *told(PREFILL, *((100 + i % 7, 0) for i in range(500))))
    assert len(model.samples) == 64
    assert {s.x for s in model.samples} >= {8000, 6000, 4000}
    assert [s.at_s for s in model.samples] == sorted(s.at_s for s in model.samples)
    assert model.age_s(600.0) == 600 - 502
