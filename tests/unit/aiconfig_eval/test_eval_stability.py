"""Steady states that theory knows: a closed loop by its own times, an open loop on either side of what it can serve."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from aiconfig_eval_builders import candidate, workload

from aiconfig.estimate import Estimate, Load
from aiconfig.evaluate import simulate
from aiconfig.reasons import Rejection
from aiconfig.stability import growth
from reports.columns import F64, Columns

SMALL = {"isl": 1000, "osl": 50, "min_ratio": 0.8}


def _simulated(load: Load, **changes: object) -> Estimate | Rejection:
    demand = workload(**{**SMALL, "requests": None, "arrivals": "closed" if load.users else "poisson", **changes})
    return simulate(candidate(max_num_seqs=32), demand, load)


@pytest.mark.parametrize("users", [1, 8, 24])
def test_a_closed_loop_is_served_as_fast_as_its_users_come_round(users: int) -> None:
    """Specification R2: X = N / (TTFT + TPOT (O - 1)), within 2 % in steady state."""
    found = _simulated(Load(users=users), requests=40 * users)
    assert isinstance(found, Estimate)
    e2e_s = found.value("e2e", "mean")
    assert e2e_s is not None
    assert found.requests_per_s == pytest.approx(users / e2e_s, rel=0.02)


@pytest.fixture(scope="module")
def capacity_rps() -> float:
    """Requests a second with as many users as ever run at once, and as many waiting: more cannot be served."""
    full = _simulated(Load(users=64))
    assert isinstance(full, Estimate)
    return full.requests_per_s


@pytest.mark.parametrize("share", [0.5, 0.85])
def test_below_its_capacity_an_open_loop_is_stable(share: float, capacity_rps: float) -> None:
    found = _simulated(Load(rps=share * capacity_rps))
    assert isinstance(found, Estimate), found
    assert found.requests_per_s == pytest.approx(share * capacity_rps, rel=0.05)


@pytest.mark.parametrize("share", [1.25, 2.0])
def test_above_it_the_queue_grows_by_what_is_too_much(share: float, capacity_rps: float) -> None:
    found = _simulated(Load(rps=share * capacity_rps))
    assert isinstance(found, Rejection)
    assert found.reason == "unstable"
    assert found.needs is not None
    assert found.has is not None
    assert found.needs == pytest.approx(share * capacity_rps, rel=0.1)
    assert found.has == pytest.approx(capacity_rps, rel=0.1), "it serves what it can"
    assert "queue grows at" in found.detail


def test_a_warm_up_shorter_than_an_answer_is_made_longer() -> None:
    """Two hundred arrivals at 150/s are over in 1.3 seconds, and an answer of 400 tokens takes about four."""
    demand = {"isl": 50, "osl": 400, "min_ratio": 1.0, "arrivals": "poisson"}
    found = simulate(candidate(replicas=8), workload(**demand, requests=None), Load(rps=150.0))
    assert isinstance(found, Estimate), found
    assert "1,200 requests" not in found.notes[0]
    assert not any("too short" in note for note in found.notes)
    told = simulate(candidate(replicas=8), workload(**demand, requests=1200), Load(rps=150.0))
    assert isinstance(told, Estimate), "what grows only because nothing has ended yet is not called unstable"
    assert any("too short" in note for note in told.notes)


# ---------------------------------------------------------------- the judge alone


def _requests(arrival_s: F64, end_s: F64) -> Columns:
    batch = pa.RecordBatch.from_pydict({"arrival_s": arrival_s, "last_token_s": end_s})
    return Columns(batch.num_rows, lambda name: [batch.column(name)])  # type: ignore[arg-type]


def test_a_server_slower_than_the_arrivals_grows_and_a_faster_one_does_not() -> None:
    arrival_s = np.arange(1000.0)
    slow = growth(_requests(arrival_s, 1.5 * np.arange(1, 1001)))
    assert slow is not None
    assert slow.grows
    assert slow.slows
    assert slow.growth_rps == pytest.approx(1 - 1 / 1.5, rel=0.01)
    fast = growth(_requests(arrival_s, arrival_s + 300.0))
    assert fast is not None
    assert not fast.grows, "a long way through is no growth"
    assert not fast.slows


def test_until_the_first_answers_the_number_inside_grows_but_nothing_gets_slower() -> None:
    arrival_s = np.arange(1000.0)
    begun = growth(_requests(arrival_s, arrival_s + 2000.0))
    assert begun is not None
    assert (begun.grows, begun.slows) == (True, False)


def test_requests_that_never_end_count_as_inside() -> None:
    arrival_s = np.arange(1000.0)
    stuck = growth(_requests(arrival_s, np.where(arrival_s < 600, arrival_s + 1, np.nan)))
    assert stuck is not None
    assert stuck.grows
    assert stuck.slows


def test_one_moment_says_nothing() -> None:
    assert growth(_requests(np.zeros(50), np.ones(50))) is None
    assert growth(_requests(np.zeros(1), np.ones(1))) is None
