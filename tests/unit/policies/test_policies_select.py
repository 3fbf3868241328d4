"""Ties and softmax: exact equality, the three tie rules, probabilities."""

from __future__ import annotations

import pytest

from policies.cluster.ids import RequestId, WorkerId
from policies.router.select import Ties, shares, softmax

IDS = [WorkerId(i) for i in (3, 5, 8)]
R = RequestId("r1")


def test_one_lowest_cost_needs_no_tie_rule() -> None:
    assert Ties("seeded", 42).lowest(R, [2, 1, 3], IDS) == (1, "min")


def test_costs_are_equal_only_when_exactly_equal() -> None:
    nearly = [1.0, 1.0 - 2**-53, 1.0]
    assert Ties("seeded", 42).lowest(R, nearly, IDS) == (1, "min")


def test_the_lowest_id_wins_under_its_rule() -> None:
    assert Ties("lowest_id", 42).lowest(R, [2, 1, 1], IDS) == (1, "tie")


def test_the_least_recently_used_wins_under_its_rule() -> None:
    ties = Ties("least_recent", 42)
    order = []
    for n in range(5):
        at, _ = ties.lowest(RequestId(f"r{n}"), [1, 1, 1], IDS)
        ties.note(IDS[at])
        order.append(at)
    assert order == [0, 1, 2, 0, 1]
    ties.forget(IDS[1])
    assert ties.lowest(R, [1, 1, 1], IDS) == (1, "tie")  # as if never used


def test_a_seeded_tie_is_a_function_of_seed_and_request() -> None:
    requests = [RequestId(f"r{n}") for n in range(20)]
    picks = [Ties("seeded", 42).lowest(r, [1, 1, 1], IDS)[0] for r in requests]
    backwards = Ties("seeded", 42)
    assert [backwards.lowest(r, [1, 1, 1], IDS)[0] for r in reversed(requests)] == picks[::-1]
    assert picks != [Ties("seeded", 43).lowest(r, [1, 1, 1], IDS)[0] for r in requests]
    assert set(picks) == {0, 1, 2}


@pytest.mark.parametrize(
    ("costs", "temperature", "expected"),
    [
        ([14, 10, 11], 1.0, [0.171371, 0.465836, 0.362793]),
        ([14, 10, 11], 0.5, [0.077696, 0.574097, 0.348207]),
        ([14, 10, 11], 0.1, [0.000042, 0.924103, 0.075855]),
        ([0, 100], 1.0, [0.731059, 0.268941]),
        ([5, 5, 5], 1.0, [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_softmax_shares(costs: list[float], temperature: float, expected: list[float]) -> None:
    found = shares(costs, temperature)
    assert found == pytest.approx(expected, abs=5e-7)
    assert sum(found) == pytest.approx(1.0)


def test_softmax_takes_the_last_where_rounding_leaves_a_gap() -> None:
    assert softmax(0.0, [5, 5, 5], 1.0) == 0
    assert softmax(1.0, [5, 5, 5], 1.0) == 2


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert softmax(0.5, [1e9, 0.0, 1.0], 1e-12) == 1
