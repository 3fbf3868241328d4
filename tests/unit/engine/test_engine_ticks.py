"""Instants are whole nanoseconds: who is woken when a time has passed finds that it has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twin.engine.ticks import instant, not_before

SUMS = st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)).map(sum)


@given(SUMS)
def test_the_first_instant_that_is_not_before_a_time_is_one_and_the_first(seconds: float) -> None:
    at_s = not_before(seconds)
    assert at_s == instant(at_s) >= seconds
    assert at_s - seconds <= 1.2e-9  # a float of a million seconds is good to 0.1 ns


def test_a_sum_that_rounding_left_below_an_instant_means_that_instant() -> None:
    below = 59.6384 + 10.0
    assert below < 69.6384
    assert not_before(below) == 69.6384
