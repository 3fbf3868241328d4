"""Cutting a trace and moving its arrivals: only arrivals change, the first kept one is 0, rates are as asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from traces.errors import TraceError
from traces.load import Trace, open_trace
from traces.schema import canonical_schema
from traces.transform import measure, transform

ARRIVALS = [0.0, 0.4, 0.8, 2.0, 2.0, 6.4]


def batches(arrivals: list[float | None] = ARRIVALS, size: int = 4, **extra: list[object]) -> list[pa.RecordBatch]:
    """Rows with these arrivals and prompts of 1, 2, 3, ... tokens, a few per batch."""
    columns = {"arrival_s": arrivals, "isl": list(range(1, len(arrivals) + 1)), "osl": [1] * len(arrivals), **extra}
    whole = pa.RecordBatch.from_pydict(columns, schema=canonical_schema(columns))
    return [whole.slice(at, size) for at in range(0, len(arrivals), size)]


def arrivals(found: Iterator[pa.RecordBatch]) -> list[float | None]:
    return [row for batch in found for row in batch.column("arrival_s").to_pylist()]


def prompts(found: Iterator[pa.RecordBatch]) -> list[int]:
    return [row for batch in found for row in batch.column("isl").to_pylist()]


@pytest.mark.shared
@pytest.mark.parametrize(("speedup", "expected"), [(1, [0, 0.4, 0.8]), (4, [0, 0.1, 0.2]), (0.5, [0, 0.8, 1.6])])
def test_speed_up_divides_arrivals(shared: Path, speedup: float, expected: list[float]) -> None:
    trace = open_trace(shared / "cases" / "inputs" / "c08_arrivals.jsonl")
    found = list(transform(trace, speedup=speedup))
    assert arrivals(iter(found)) == pytest.approx(expected)
    assert prompts(iter(found)) == [100, 100, 100]


def test_nothing_asked_nothing_changed() -> None:
    assert pa.Table.from_batches(transform(batches())).equals(pa.Table.from_batches(batches()))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_a_slice_starts_at_zero_and_leaves_its_end_out(size: int) -> None:
    found = list(transform(batches(size=size), start_s=0.4, end_s=6.4))
    assert prompts(iter(found)) == [2, 3, 4, 5]
    assert arrivals(iter(found)) == pytest.approx([0.0, 0.4, 1.6, 1.6])


def test_the_slice_comes_before_the_limit() -> None:
    assert prompts(transform(batches(), start_s=0.5, limit=2)) == [3, 4]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_a_limit_counts_rows(size: int) -> None:
    assert prompts(transform(batches(size=size), limit=5)) == [1, 2, 3, 4, 5]
    assert prompts(transform(batches(size=size), limit=100)) == [1, 2, 3, 4, 5, 6]


def test_a_limit_stops_reading() -> None:
    def endless() -> Iterator[pa.RecordBatch]:
        while True:
            yield from batches()

    assert prompts(transform(endless(), limit=8)) == [1, 2, 3, 4, 5, 6, 1, 2]


def test_the_end_of_a_slice_stops_reading() -> None:
    def then_fail() -> Iterator[pa.RecordBatch]:
        yield from batches()
        raise AssertionError("read on behind the end")

    assert prompts(transform(then_fail(), end_s=2.0)) == [1, 2, 3]


def test_later_turns_go_with_their_session() -> None:
    found = list(
        transform(
            batches(
                [0.0, None, 1.0, None, None, 5.0],
                session_id=["a", "a", "b", "b", "a", None],
                delay_s=[None, 0.5, None, 0.25, 0.5, None],
            ),
            start_s=0.5,
            end_s=4.0,
            speedup=2.0,
        )
    )
    assert prompts(iter(found)) == [3, 4]
    assert arrivals(iter(found)) == [0.0, None]
    assert [row for batch in found for row in batch.column("delay_s").to_pylist()] == [None, 0.25]


@pytest.mark.shared
def test_speed_up_leaves_the_pauses_of_sessions_alone(shared: Path) -> None:
    trace = open_trace(shared / "parity" / "traces" / "sessions.jsonl")
    plain, fast = pa.Table.from_batches(trace), pa.Table.from_batches(transform(trace, speedup=3.0))
    assert fast.drop_columns("arrival_s").equals(plain.drop_columns("arrival_s"))
    assert fast["arrival_s"].null_count == plain["arrival_s"].null_count == 144
    given = plain["arrival_s"].drop_null().to_numpy()
    assert fast["arrival_s"].drop_null().to_numpy() == pytest.approx(given / 3)


@pytest.mark.parametrize("rate_rps", [0.01, 1.0, 250.0])
def test_a_rate_is_the_mean_from_the_first_to_the_last(rate_rps: float) -> None:
    found = list(transform(iter(batches()), rate_rps=rate_rps))
    assert measure(found).rate_rps == pytest.approx(rate_rps)
    gaps = np.diff(arrivals(iter(found))) * rate_rps
    assert gaps == pytest.approx(np.diff(ARRIVALS) * measure(batches()).rate_rps)


def test_a_rate_is_that_of_the_rows_that_are_kept() -> None:
    assert measure(transform(batches(), limit=3, rate_rps=5.0)).rate_rps == pytest.approx(5.0)


def test_a_trace_is_read_twice_rather_than_held(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = ({"timestamp": 100 * i, "input_length": 1, "output_length": 1} for i in range(100))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace: Trace = open_trace(path)
    assert measure(transform(trace, rate_rps=7.0)).rate_rps == pytest.approx(7.0)


# ---------------------------------------------------------------- Poisson


def poisson(count: int, seed: int, size: int = 1000, **options: float) -> np.ndarray:
    given = batches(np.linspace(0, count / 10, count).tolist(), size=size)
    return np.array(arrivals(transform(given, poisson=True, seed=seed, **options)))


def test_poisson_arrivals_are_poisson() -> None:
    found = poisson(40_000, seed=3, rate_rps=8.0)
    gaps = np.diff(found)
    assert found[0] == 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=4 / 200)  # four standard errors: 1/sqrt(40,000) = 1/200
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03)
    assert np.quantile(gaps, 0.9) == pytest.approx(np.log(10) / 8, rel=0.05)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_poisson_keeps_the_mean_rate_times_the_speed_up() -> None:
    assert 40_000 / poisson(40_000, seed=1)[-1] == pytest.approx(10, rel=0.02)
    assert 40_000 / poisson(40_000, seed=1, speedup=2.0)[-1] == pytest.approx(20, rel=0.02)


def test_poisson_depends_on_the_seed_alone() -> None:
    assert (poisson(500, seed=1, size=1) == poisson(500, seed=1, size=1000)).all()
    assert (poisson(500, seed=1) != poisson(500, seed=2))[1:].all()


def test_poisson_leaves_later_turns_to_their_delays() -> None:
    given = batches([0.0, None, 1.0], session_id=["a", "a", "b"], delay_s=[None, 1.0, None])
    found = arrivals(transform(given, poisson=True, rate_rps=1.0, seed=5))
    assert found[:2] == [0.0, None]
    assert found[2] is not None


# ---------------------------------------------------------------- what makes no sense


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"start_s": -1.0}, "start_s is -1.0"),
        ({"start_s": float("nan")}, "start_s is nan"),
        ({"start_s": 5.0, "end_s": 5.0}, "end_s is 5.0; it must lie behind start_s"),
        ({"end_s": float("nan")}, "end_s is nan"),
        ({"speedup": 0.0}, "speedup is 0.0"),
        ({"speedup": float("inf")}, "speedup is inf"),
        ({"rate_rps": -2.0}, "rate_rps is -2.0"),
        ({"rate_rps": 2.0, "speedup": 2.0}, "give one of them"),
    ],
)
def test_values_that_make_no_sense(options: dict[str, float], said: str) -> None:
    with pytest.raises(TraceError) as caught:
        transform(batches(), **options)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_an_empty_slice_and_a_trace_without_span() -> None:
    with pytest.raises(TraceError, match="no request arrives from 100 s to the end"):
        list(transform(batches(), start_s=100.0))
    with pytest.raises(TraceError, match="2 arrivals within 0 s have no mean rate"):
        list(transform(batches([1.0, 1.0]), rate_rps=2.0))
