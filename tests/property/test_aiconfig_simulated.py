"""Laws of simulated estimates: more load never answers sooner, more workers never later, chance is the seed's alone."""

from __future__ import annotations

import math

from aiconfig_eval_builders import candidate, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from aiconfig.candidate import Candidate
from aiconfig.demand import draw_rows
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluate import simulate
from aiconfig.workload import Workload

ONES = st.builds(candidate, st.sampled_from(("vllm", "sglang", "trtllm")), st.sampled_from(("agg", "disagg")))
DEMANDS = st.builds(
    workload,
    isl=st.integers(50, 3000),
    osl=st.integers(2, 60),
    min_ratio=st.sampled_from((0.3, 0.8, 1.0)),
    prefix_tokens=st.sampled_from((0, 40)),
    requests=st.just(120),
    seed=st.integers(0, 5),
)
NOISE = 0.10
"""By so much a mean of a hundred requests may be better by chance although the load is higher."""


def _mean(one: Candidate, demand: Workload, users: int, metric: str) -> float:
    found = simulate(one, demand, Load(users=users))
    assert isinstance(found, Estimate), found
    value = found.value(metric, "mean")
    assert value is not None
    return value


@settings(max_examples=12)
@given(one=ONES, demand=DEMANDS, users=st.integers(1, 12))
def test_more_users_never_get_answers_much_sooner(one: Candidate, demand: Workload, users: int) -> None:
    for metric in ("ttft", "e2e"):
        few, many = (_mean(one, demand, count, metric) for count in (users, 4 * users))
        assert many >= few * (1 - NOISE), metric


@settings(max_examples=12)
@given(one=ONES, demand=DEMANDS, users=st.integers(1, 30))
def test_figures_are_in_order_and_repeat(one: Candidate, demand: Workload, users: int) -> None:
    found = simulate(one, demand, Load(users=users))
    assert isinstance(found, Estimate), found
    for metric, stats in found.stats.items():
        ranked = [stats[name] for name in ("p50", "p90", "p95", "p99", "max")]
        assert all(value is not None and math.isfinite(value) for value in ranked), metric
        assert ranked == sorted(ranked, reverse=metric == "tps_user"), metric
    assert 0 < found.kv_share <= 1
    assert found.energy_j is not None
    assert found.energy_j > 0
    assert simulate(one, demand, Load(users=users)) == found


@given(demand=DEMANDS, rows=st.integers(1, 300))
def test_rows_are_those_of_any_longer_draw(demand: Workload, rows: int) -> None:
    drawn = draw_rows(demand, rows)
    assert draw_rows(demand, rows + 50).slice(0, rows).equals(drawn)
    isl, osl = drawn.column("isl").to_pylist(), drawn.column("osl").to_pylist()
    assert min(isl) >= 1
    assert max(isl) <= demand.isl
    assert min(osl) >= 1
    assert max(osl) <= demand.osl
