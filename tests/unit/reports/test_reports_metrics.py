"""The definitions: each metric on numbers that a person can check, and null where it is undefined."""

from __future__ import annotations

import numpy as np
import pytest

from reports import gaps, metrics
from reports.gaps import GapRows
from reports.metrics import Distribution, distribution

NAN = np.nan


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_tpot_is_the_mean_gap_and_undefined_for_one_token() -> None:
    tpot = metrics.tpot_s(column(1, 1, NAN), column(3, 1, NAN), column(5, 1, 0))
    assert tpot[0] == 0.5
    assert np.isnan(tpot[1:]).all()


def test_a_distribution_of_nothing_is_null() -> None:
    assert distribution(column()) == distribution(column(NAN, NAN)) == Distribution(count=0)


def test_percentiles_interpolate_and_std_is_that_of_the_population() -> None:
    sample = distribution(column(0.5, 0.1, NAN, 0.3))
    assert (sample.count, sample.p50) == (3, 0.3)
    assert (sample.mean, sample.p90, sample.p99) == pytest.approx((0.3, 0.46, 0.496))
    assert sample.std == pytest.approx(np.std([0.1, 0.3, 0.5]))


def test_the_peers_percentile_takes_the_nearest_rank() -> None:
    values = column(4, 1, 3, 2, NAN)
    assert [metrics.rank_percentile(values, q) for q in (0.0, 0.5, 0.8, 1.0)] == [1, 3, 3, 4]
    assert metrics.rank_percentile(column(NAN), 0.5) is None


def test_makespan_is_first_arrival_to_what_came_last() -> None:
    assert metrics.makespan_s(column(1, 2, NAN), column(NAN, 7, 5)) == 6.0
    assert metrics.makespan_s(column(1, 9), column(7, NAN)) == 8.0, "an arrival that got nothing"
    assert metrics.makespan_s(column(1, 2), column(7, 5), 8.5) == 7.5, "a step that gave no token"
    assert metrics.makespan_s(column(1, 2), column(7, 5), 6.0) == 6.0
    assert metrics.makespan_s(column(1, 3), column(NAN, NAN)) == 2.0
    assert metrics.makespan_s(column(1), column(NAN)) is None
    assert metrics.makespan_s(column(), column()) is None


def test_rates_of_no_time_are_null() -> None:
    assert metrics.per_second(3, None) is None
    assert metrics.per_second(3, 0.0) is None
    assert metrics.per_second(3, 2.0) == 1.5


def test_hit_rate_weighs_tokens() -> None:
    assert metrics.hit_rate(column(0, 1024), column(1024, 1536)) == 0.4
    assert metrics.hit_rate(column(), column()) is None


@pytest.mark.parametrize(("loads", "index"), [((5, 5, 5, 5), 1.0), ((7, 0, 0, 0), 0.25), ((0, 0), None)])
def test_jain_index(loads: tuple[float, ...], index: float | None) -> None:
    assert metrics.jain_fairness(column(*loads)) == index


def test_speed_per_user_leaves_out_what_took_no_time() -> None:
    speed = metrics.tokens_per_s_per_user(column(0.02, 0.0, NAN))
    assert speed[0] == 50.0
    assert np.isnan(speed[1:]).all()


# --- the interval of a mean -------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_batch_means() -> None:
    values = np.random.default_rng(7).normal(10.0, 2.0, 2_000)
    interval = metrics.mean_ci95(values)
    assert interval is not None
    means = values.reshape(20, 100).mean(axis=1)
    half = 2.093024054408263 * means.std(ddof=1) / np.sqrt(20)
    assert interval == pytest.approx((values.mean() - half, values.mean() + half))


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3).exponential(1.0, (400, 400))
    hits = sum(low <= 1.0 <= high for low, high in filter(None, map(metrics.mean_ci95, draws)))
    assert 0.92 <= hits / 400 <= 0.98


def test_correlation_widens_the_interval() -> None:
    noise = np.random.default_rng(5).normal(size=4_000)
    slow = np.repeat(noise[:40], 100)
    wide, narrow = metrics.mean_ci95(slow), metrics.mean_ci95(noise)
    assert wide is not None
    assert narrow is not None
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])


def test_too_few_values_have_no_interval() -> None:
    assert metrics.mean_ci95(np.arange(199.0)) is None
    assert metrics.mean_ci95(np.arange(200.0)) is not None


# --- gaps of leaps ----------------------------------------------------------------------------------------------------


def rows(*given: tuple[int, int, float, float, float]) -> GapRows:
    steps, weights, gap0, gap1, gap2 = zip(*given, strict=True)
    floats = (np.array(part, dtype=np.float64) for part in (gap0, gap1, gap2))
    return GapRows(np.array(steps), np.array(weights), *floats)


def test_a_leap_expands_to_its_polynomial() -> None:
    values, weights = next(iter(gaps.expand(rows((3, 2, 1.0, 0.5, 0.25)))))
    assert values.tolist() == [1.0, 1.75, 3.0]
    assert weights.tolist() == [2, 2, 2]


def test_a_level_leap_becomes_one_value() -> None:
    values, weights = next(iter(gaps.expand(rows((1_000_000, 8, 0.01, 0.0, 0.0)))))
    assert (values.tolist(), weights.tolist()) == ([0.01], [8_000_000])


def test_a_long_row_is_cut_into_pieces() -> None:
    pieces = list(gaps.expand(rows((gaps.PIECE_VALUES * 2 + 5, 1, 1.0, 1e-6, 0.0), (2, 1, 9.0, 1.0, 0.0))))
    assert [len(values) for values, _ in pieces] == [gaps.PIECE_VALUES, gaps.PIECE_VALUES, 7]
    assert np.concatenate([values for values, _ in pieces])[-3:].tolist() == [1.0 + 1e-6 * (2**19 + 4), 9.0, 10.0]


def test_no_gaps_no_figures() -> None:
    assert gaps.summarise(list, (0.5,)) is None


def test_a_negative_gap_is_a_broken_promise() -> None:
    with pytest.raises(Exception, match=r"gap of -0\.5 s"):
        gaps.summarise(lambda: gaps.expand(rows((1, 1, -0.5, 0.0, 0.0))), (0.5,))


def test_definitions_are_the_docstrings() -> None:
    for name in metrics.DEFINITIONS:
        assert len(metrics.definition(name)) > 30, name
    assert metrics.definition("TTFT").startswith("Time to first token = first token - arrival")
