"""Laws of pooled gaps: figures computed from leaps are those of the gaps written out one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import gaps
from reports.gaps import GapRows
from reports.metrics import QUANTILES, quantiles

Row = tuple[int, int, float, float, float]

lengths = st.one_of(
    st.sampled_from([0.0, 0.01, 0.01 + 2**-60, 0.1, 3.0]),
    st.floats(0.0, 1e3, allow_subnormal=False),
    st.floats(1e-9, 1e-6, allow_subnormal=False),
)
slopes = st.one_of(st.just(0.0), st.floats(0.0, 1e-2, allow_subnormal=False))
leaps = st.tuples(st.integers(1, 40), st.integers(1, 9), lengths, slopes, slopes)


def columns(rows: list[Row]) -> GapRows:
    steps, weights, *polynomial = zip(*rows, strict=True)
    floats = (np.array(part, dtype=np.float64) for part in polynomial)
    return GapRows(np.array(steps), np.array(weights), *floats)


def written_out(rows: list[Row]) -> np.ndarray:
    """Every gap by itself: what the formula of a row says, token by token."""
    return np.array([a + (b + c * j) * j for k, w, a, b, c in rows for j in range(k) for _ in range(w)])


@given(st.lists(leaps, min_size=1, max_size=30))
def test_percentiles_of_leaps_are_numpys_of_the_expanded_gaps(rows: list[Row]) -> None:
    summary = gaps.summarise(lambda: gaps.expand(columns(rows)), QUANTILES)
    expanded = written_out(rows)
    assert summary is not None
    assert summary.count == len(expanded)
    assert (summary.min, summary.max) == (expanded.min(), expanded.max())
    assert summary.quantiles == tuple(np.quantile(expanded, QUANTILES).tolist())
    assert summary.mean == pytest.approx(expanded.mean(), rel=1e-12, abs=1e-15)
    assert summary.std == pytest.approx(expanded.std(), rel=1e-9, abs=1e-9 * max(summary.max, 1e-9))


@given(st.lists(leaps, min_size=1, max_size=30), st.sampled_from([0, 1, 7]), st.sampled_from([1, 3, 50]))
def test_neither_bounded_memory_nor_small_pieces_change_a_percentile(rows: list[Row], keep: int, piece: int) -> None:
    plain = gaps.summarise(lambda: gaps.expand(columns(rows)), QUANTILES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gaps, "KEEP_VALUES", keep)
        patched.setattr(gaps, "PIECE_VALUES", piece)
        bounded = gaps.summarise(lambda: gaps.expand(columns(rows)), QUANTILES)
    assert plain is not None
    assert bounded is not None
    assert bounded.quantiles == plain.quantiles
    assert (bounded.count, bounded.min, bounded.max) == (plain.count, plain.min, plain.max)


@given(st.lists(leaps, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(rows: list[Row], order) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(rows)
    order.shuffle(shuffled)
    first, second = (gaps.summarise(lambda r=r: gaps.expand(columns(r)), QUANTILES) for r in (rows, shuffled))
    assert first is not None
    assert second is not None
    assert first.quantiles == second.quantiles
    assert first.mean == pytest.approx(second.mean, rel=1e-12, abs=1e-15)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5))
def test_our_quantiles_are_numpys_bit_for_bit(values: list[float], shares: list[float]) -> None:
    sample = np.array(values)
    assert quantiles(sample, shares) == [float(np.quantile(sample, share)) for share in shares]
