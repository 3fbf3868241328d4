"""The largest load that keeps the limits: on the closed form, and by simulated runs with as few of them as may be."""

from __future__ import annotations

import pytest
from aiconfig_builders import SHORT, agg, disagg, estimated, room
from hypothesis import given
from hypothesis import strategies as st

from aiconfig.candidate import Candidate
from aiconfig.closed_form import ClosedForm
from aiconfig.estimate import MEASURED, Estimate, Load
from aiconfig.load_point import SIMULATED_RUNS, broken, closed_form_load, largest_that, simulated_load
from aiconfig.workload import Workload
from reports.sla import parse_sla

POISSON = Workload(isl=1024, osl=256, arrivals="poisson")


@pytest.mark.parametrize("candidate", [agg(), agg(engine="sglang"), disagg(2, 1)])
@pytest.mark.parametrize("text", ["tpot=12ms@mean", "ttft=300ms@mean,tpot=20ms", "e2e=5s@mean"])
def test_one_user_more_would_break_a_limit(candidate: Candidate, text: str) -> None:
    closed, sla, fitted = ClosedForm(SHORT), parse_sla(text), room(candidate)
    found = closed_form_load(closed, candidate, fitted, sla)
    assert found is not None
    load, estimate = found
    assert load.users is not None
    assert not broken(estimate, sla)
    more = closed.estimate(candidate, Load(users=load.users + 1), fitted)
    assert more is not None
    assert broken(more, sla) or load.users >= int(closed.most(candidate, fitted).users)


def test_without_limits_it_is_what_is_served_without_a_queue() -> None:
    closed, fitted = ClosedForm(SHORT), room(agg())
    found = closed_form_load(closed, agg(), fitted, None)
    assert found is not None
    assert found[0].users == 256  # sequences


def test_a_rate_is_searched_in_an_open_loop() -> None:
    closed, fitted = ClosedForm(POISSON), room(agg(), POISSON)
    found = closed_form_load(closed, agg(), fitted, parse_sla("tpot=20ms@mean"))
    assert found is not None
    assert found[0].rps is not None
    assert 0.0 < found[0].rps < closed.most(agg(), fitted).rps


def test_a_limit_below_the_idle_figure_has_no_load() -> None:
    assert closed_form_load(ClosedForm(SHORT), agg(), room(agg()), parse_sla("tpot=1ms@mean")) is None


@given(edge=st.integers(0, 200), smallest=st.integers(1, 50), width=st.integers(0, 150))
def test_the_largest_that_holds(edge: int, smallest: int, width: int) -> None:
    found = largest_that(lambda n: n <= edge, smallest, smallest + width)
    assert found == (None if edge < smallest else min(edge, smallest + width))


def plays(limit: float) -> tuple[list[float], object]:
    tried: list[float] = []

    def simulate(load: Load) -> Estimate | None:
        size = float(load.users or load.rps or 0.0)
        tried.append(size)
        return estimated(agg(), load=load, level=MEASURED, ttft={"p95": size / limit})

    return tried, simulate


@given(start=st.integers(1, 500), limit=st.floats(0.5, 500.0))
def test_simulated_runs_close_in_on_the_limit(start: int, limit: float) -> None:
    tried, simulate = plays(limit)
    found = simulated_load(simulate, Load(users=start), lambda one: (one.value("ttft", "p95") or 0.0) <= 1.0)  # type: ignore[arg-type]
    assert len(tried) == len(set(tried)) <= SIMULATED_RUNS
    assert len(found.runs) == len(tried)
    kept = [size for size in tried if size <= limit]
    if found.best is None:
        assert not kept
    else:
        assert found.best.load.users == max(kept)


def test_runs_go_up_where_the_start_was_too_careful() -> None:
    _, simulate = plays(100.0)
    found = simulated_load(simulate, Load(rps=60.0), lambda one: (one.value("ttft", "p95") or 0.0) <= 1.0)  # type: ignore[arg-type]
    assert found.best is not None
    assert 90.0 < (found.best.load.rps or 0.0) <= 100.0


def test_a_run_that_cannot_be_made_counts_as_broken() -> None:
    found = simulated_load(lambda load: None, Load(users=64), lambda one: True)
    assert found.best is None
    assert found.runs == ()


@given(
    knee=st.floats(5.0, 400.0),
    idle_s=st.floats(0.1, 1.5),
    rps=st.floats(0.5, 20.0),
    start=st.floats(0.6, 1.8),
)
def test_a_wait_that_grows_by_littles_law_is_found_in_few_runs(
    knee: float, idle_s: float, rps: float, start: float
) -> None:
    """A closed loop: no wait below its knee, 1 / throughput more for each user beyond it."""
    limit_s = 2.0

    def wait_s(users: float) -> float:
        return idle_s + max(0.0, users - knee) / rps

    def simulate(load: Load) -> Estimate:
        assert load.users is not None
        return estimated(agg(), load=load, level=MEASURED, ttft={"p95": wait_s(load.users)}, requests_per_s=rps)

    def value(run: Estimate) -> float:
        return run.value("ttft", "p95") or 0.0

    edge = knee + (limit_s - idle_s) * rps
    first = max(1, round(start * edge))
    found = simulated_load(
        simulate,
        Load(users=first),
        lambda run: value(run) <= limit_s,
        excess=lambda run: value(run) / limit_s - 1.0,
        hint=lambda run: (run.load.users or 0) - (value(run) - limit_s) * run.requests_per_s,
    )
    assert found.best is not None
    assert found.best.load.users is not None
    assert edge / 1.05 - 1.0 < found.best.load.users <= edge
    assert len(found.runs) <= SIMULATED_RUNS
    if first > edge and edge > 40.0:  # the asymptote, one below it, and at most two that close the gap
        assert len(found.runs) <= 4
