"""Small parts of the planner: least squares, experience, patience, and decisions that a connector confirms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plant import RPS, Plant, planned

from policies.cluster.actions import AddWorker
from policies.cluster.ids import Role
from policies.cluster.scaling import RoleProgress, ScaleDone, ScaleFailed, ScaleProgress
from policies.planner.experience import Experience
from policies.planner.fleet import Count
from policies.planner.least_squares import solve, solve_ridge
from policies.planner.patience import Patience

P = Role.PREFILL


# ---------------------------------------------------------------- least squares


@given(
    rows=st.lists(st.tuples(*[st.integers(-9, 9)] * 3), min_size=4, max_size=20),
    y=st.lists(st.integers(-9, 9), min_size=20, max_size=20),
)
def test_least_squares_against_a_library(rows: list[tuple[int, ...]], y: list[int]) -> None:
    matrix = np.array(rows, dtype=float)
    found = solve([[float(v) for v in row] for row in rows], [float(v) for v in y[: len(rows)]])
    if np.linalg.matrix_rank(matrix) < 3:
        assert found is None
    else:
        right, *_ = np.linalg.lstsq(matrix, np.array(y[: len(rows)], dtype=float), rcond=None)
        assert found == pytest.approx(right.tolist(), rel=1e-7, abs=1e-7)


def test_a_ridge_shares_a_slope_among_columns_that_are_the_same() -> None:
    rows = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert solve(rows, [2.0, 4.0, 6.0]) is None
    assert solve_ridge(rows, [2.0, 4.0, 6.0], [1e-9, 1e-9]) == pytest.approx([1.0, 1.0])


# ---------------------------------------------------------------- experience


def test_a_count_that_was_too_few_is_not_gone_back_to_at_that_demand() -> None:
    past = Experience(600.0, 0.8)
    past.grew(2, 10.0, 0.0)
    assert past.forbids(2, 10.0, 599.0)
    assert past.forbids(2, 8.0, 599.0)
    assert past.forbids(2, None, 599.0)
    assert not past.forbids(2, 7.9, 599.0)  # less is asked for now
    assert not past.forbids(3, 10.0, 599.0)
    assert not past.forbids(2, 10.0, 600.0)


def test_what_proves_right_again_is_remembered_for_twice_as_long() -> None:
    past = Experience(600.0, 0.8)
    past.grew(2, 10.0, 0.0)
    past.grew(2, 10.0, 300.0)  # known already: counts once
    assert not past.forbids(2, 10.0, 601.0)
    past.grew(2, 10.0, 700.0)
    assert past.forbids(2, 10.0, 1899.0)
    assert not past.forbids(2, 10.0, 1901.0)


# ---------------------------------------------------------------- patience


def at(pending: int = 0, draining: int = 0) -> Count:
    return Count(ready=2, pending=pending, draining=draining, recallable=draining)


def test_a_cooldown_counts_from_the_end_of_the_last_change() -> None:
    patience = Patience(planned(down_cooldown_s=100.0, up_cooldown_s=50.0))
    patience.wants_fewer(True)
    assert patience.may_shrink(0.0)
    patience.ordered()
    patience.wants_fewer(True)
    patience.look(at(draining=1), 10.0)
    assert not patience.may_shrink(10.0)
    patience.look(at(), 30.0)
    assert not patience.may_shrink(129.0)
    assert not patience.may_grow(79.0)
    assert patience.may_grow(80.0)
    assert patience.may_shrink(130.0)


def test_to_shrink_takes_ticks_that_agree_one_after_the_other() -> None:
    patience = Patience(planned(down_after_ticks=3))
    for says in (True, True, False, True, True):
        patience.wants_fewer(says)
    assert not patience.may_shrink(0.0)
    patience.wants_fewer(True)
    assert patience.may_shrink(0.0)
    assert patience.may_grow(0.0)


def test_w5_back_off_doubles_and_ends_with_the_first_success() -> None:
    patience = Patience(planned())
    waits = []
    for _ in range(4):
        patience.failed(0.0)
        waits.append(patience.retry_s)
    assert waits == [10.0, 20.0, 40.0, 80.0]
    assert patience.alarmed
    assert patience.backs_off(79.0)
    patience.succeeded()
    assert not patience.alarmed
    assert not patience.backs_off(1.0)


def test_starts_that_take_too_long_are_given_up_once_per_time_out() -> None:
    patience = Patience(planned(scale_timeout_s=100.0))
    late = [patience.look(at(pending=1), float(t)) for t in range(0, 301, 50)]
    assert late == [False, False, True, False, True, False, True]


# ---------------------------------------------------------------- connectors that confirm


def confirming() -> Plant:
    made = planned(P, load_predictor="constant", confirm=True)
    return Plant(made, lambda t: RPS[P] * (1.5 if t < 300 else 3.5 if t < 1000 else 5.5), {P: 2})


def test_nothing_is_ordered_while_a_decision_is_not_confirmed() -> None:
    plant = confirming().run(1500)
    assert len({t for t, _ in plant.changes()}) == 1
    assert "scaling_in_progress" in plant.reasons(P)
    assert isinstance(plant.changes()[0][1], AddWorker)
    done = RoleProgress(role=P, ready=4, pending=0, draining=0)
    plant.post(ScaleProgress(at_s=plant.now_s, decision_id=1, roles=(done,)))
    plant.post(ScaleDone(at_s=plant.now_s, decision_id=1))
    plant.run(2000)
    assert plant.n(P) == 6


def test_a_decision_that_failed_is_looked_at_again_and_made_anew() -> None:
    plant = confirming()
    plant.start = lambda _: "never"
    plant.run(800)
    assert plant.n(P) == 2
    plant.post(ScaleFailed(at_s=plant.now_s, decision_id=1, reason="no such group"))
    assert plant.controller.view.pending(P) == 1  # it was seen starting, and still is
    assert plant.planner is not None
    assert plant.planner.counters["decisions_failed"] == 1
