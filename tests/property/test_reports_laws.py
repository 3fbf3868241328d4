"""Laws of reports: shares stay shares, the order of rows says nothing, files give back what was put in."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from builders_reports import Ask, Toy, run_toy
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from reports.build import build_report
from reports.columns import distinct, floats, numbers_to_arrow
from reports.metrics import Distribution, distribution, hit_rate, jain_fairness
from reports.record import RunRecord, RunWriter
from reports.sla import Slo, parse_sla
from reports.verdict import Outcomes, judge

NO_GAPS = Distribution(count=0)

maybe_s = st.one_of(st.just(math.nan), st.floats(0.0, 30.0))
ends = st.sampled_from(["completed", "rejected", "failed", "cancelled", "open"])
requests = st.lists(st.tuples(ends, maybe_s, maybe_s), max_size=40)
limits = st.sampled_from(
    ["ttft=1s", "tpot=50ms", "itl=1s@max", "e2e=5s", "ttft=1s,tpot=50ms", "tps_user>=20", "goodput>=50% ttft=9s"]
)


def outcomes(rows: list[tuple[str, float, float]]) -> Outcomes:
    status = np.array([row[0] for row in rows], dtype=object)
    ttft, tpot = (np.array([row[i] for row in rows], dtype=np.float64) for i in (1, 2))
    return Outcomes(
        completed=status == "completed",
        cancelled=status == "cancelled",
        ttft_s=ttft,
        tpot_s=np.where(status == "completed", tpot, np.nan),
        e2e_s=np.where(status == "completed", ttft + 1.0, np.nan),
    )


@given(requests, limits)
def test_attainment_is_a_share_and_counts_add_up(rows: list[tuple[str, float, float]], sla: str) -> None:
    result = judge(parse_sla(sla), outcomes(rows), NO_GAPS, 10.0, 10.0)
    assert 0 <= result.good <= result.counted <= len(rows)
    assert result.counted + result.cancelled == len(rows)
    assert result.attainment is None or 0.0 <= result.attainment <= 1.0
    for limit in result.limits:
        if limit.statistic is not None:
            assert limit.requests_met + limit.requests_missed + limit.requests_undefined == result.counted


@given(requests, limits, st.sampled_from(["rejected", "failed", "open"]))
def test_another_unanswered_request_never_helps(rows: list[tuple[str, float, float]], sla: str, end: str) -> None:
    before = judge(parse_sla(sla), outcomes(rows), NO_GAPS, 10.0, 10.0)
    after = judge(parse_sla(sla), outcomes([*rows, (end, math.nan, math.nan)]), NO_GAPS, 10.0, 10.0)
    assert (after.attainment or 0.0) <= (before.attainment or 0.0)
    assert not (before.verdict == "missed" and after.verdict == "met")


@given(requests, st.floats(0.01, 20.0), st.floats(0.01, 20.0))
def test_a_looser_limit_is_never_harder(rows: list[tuple[str, float, float]], one: float, other: float) -> None:
    tight, loose = (
        judge(parse_sla(f"ttft={limit!r}s"), outcomes(rows), NO_GAPS, 10.0, 10.0) for limit in sorted((one, other))
    )
    assert tight.good <= loose.good
    assert not (tight.verdict == "met" and loose.verdict == "missed")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ttft", "tpot", "itl", "e2e"]),
            st.floats(0.001, 1e6),
            st.sampled_from(["us", "ms", "s", "min"]),
            st.sampled_from([None, "mean", "p50", "p90", "p95", "p99", "max"]),
            st.booleans(),
            st.sampled_from(["=", "<", "<=", ":"]),
            st.sampled_from([", ", ";", " ", ",", " ; "]),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda item: (item[0], item[3] or "p95"),
    )
)
def test_every_sentence_of_the_grammar_is_read(items: list[tuple]) -> None:  # type: ignore[type-arg]
    text, expected = "", []
    for metric, limit, unit, statistic, before, op, separator in items:
        head = f"{statistic}:" if statistic and before else ""
        tail = f"@{statistic}" if statistic and not before else ""
        text += f"{separator if text else ''}{head}{metric}{op}{limit!r}{unit}{tail}"
        factor = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[unit]
        expected.append(Slo(metric=metric, limit=limit * factor, unit="s", statistic=statistic or "p95"))
    assert parse_sla(text).slos == tuple(expected)


# --- metrics ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.just(math.nan), st.floats(0.0, 1e6)), max_size=50))
def test_a_distribution_is_ordered(values: list[float]) -> None:
    sample = distribution(np.array(values, dtype=np.float64))
    assert sample.count == sum(not math.isnan(value) for value in values)
    if sample.count:
        ranked = [sample.min, sample.p50, sample.p90, sample.p95, sample.p99, sample.max]
        assert ranked == sorted(ranked)  # type: ignore[type-var]
        assert sample.min <= sample.mean * (1 + 1e-12)  # type: ignore[operator]
        assert sample.mean <= sample.max * (1 + 1e-12)  # type: ignore[operator]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_fairness_lies_between_one_worker_and_all(loads: list[int]) -> None:
    index = jain_fairness(np.array(loads, dtype=np.float64))
    assert (index is None) == (sum(loads) == 0)
    assert index is None or 1 / len(loads) - 1e-12 <= index <= 1 + 1e-12


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), min_size=1, max_size=20))
def test_hit_rate_is_a_share(prompts: list[tuple[int, int]]) -> None:
    asked = np.array([tokens for _, tokens in prompts], dtype=np.float64)
    cached = np.minimum([tokens for tokens, _ in prompts], asked)
    rate = hit_rate(cached, asked)
    assert rate is not None
    assert 0.0 <= rate <= 1.0


# --- columns ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=False)), max_size=40), st.integers(0, 5))
def test_floats_survive_arrow_and_none_is_null(values: list[float | None], cut: int) -> None:
    column = numbers_to_arrow(np.array(values, dtype=np.float64), pa.float64())
    assert column.to_pylist() == values
    expected = np.array(values[cut:], dtype=np.float64)
    assert np.array_equal(floats(column[cut:]), expected, equal_nan=True)


@given(st.lists(st.integers(-50, 50), max_size=40))
def test_distinct_is_what_sets_say(values: list[int]) -> None:
    assert distinct(np.array(values, dtype=np.int64)).tolist() == sorted(set(values))


# --- whole reports ----------------------------------------------------------------------------------------------------

asks = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=12)


@examples(25)
@given(asks, st.integers(1, 3), st.booleans())
def test_pooled_gaps_of_any_run_are_those_of_its_tokens(
    rows: list[tuple[int, int, int]], seqs: int, leap: bool
) -> None:
    demand = [Ask(tenths / 10, isl, osl) for tenths, isl, osl in sorted(rows)]
    with tempfile.TemporaryDirectory() as folder:
        toy = Toy(workers=2, max_seqs=seqs, decode_s_per_ctx=1e-5, total_blocks=40, leap=leap)
        run = run_toy(Path(folder), demand, toy)
        report = build_report(run.folder, run.meta)
        assert report.latency.itl_s.count == len(run.gaps)
        if run.gaps:
            assert report.latency.itl_s.p95 == pytest.approx(np.quantile(run.gaps, 0.95), rel=1e-9)
        done = sum(len(run.token_times[row]) for row, ask in enumerate(demand) if len(run.token_times[row]) == ask.osl)
        assert report.demand.output_tokens >= done
        assert report.counts.completed + report.counts.rejected == len(demand)


@examples(25)
@given(asks, st.randoms(use_true_random=False))
def test_a_report_does_not_depend_on_the_order_of_step_rows(rows: list[tuple[int, int, int]], order) -> None:  # type: ignore[no-untyped-def]
    demand = [Ask(tenths / 10, isl, osl) for tenths, isl, osl in sorted(rows)]
    with tempfile.TemporaryDirectory() as top:
        first = run_toy(Path(top) / "first", demand, Toy(workers=3, max_seqs=2, decode_s_per_ctx=1e-5))
        steps = rows_of(RunRecord(first.folder))
        order.shuffle(steps)
        writer = RunWriter(Path(top) / "second")
        writer.steps.extend(steps)
        writer.close()
        for name in ("requests.parquet", "decisions.parquet"):
            (writer.folder / name).write_bytes((first.folder / name).read_bytes())
        one, two = (build_report(folder, first.meta) for folder in (first.folder, writer.folder))
        assert same_but_for_rounding(one.latency.itl_s, two.latency.itl_s)
        assert replace(one.latency, itl_s=NO_GAPS) == replace(two.latency, itl_s=NO_GAPS)
        assert [replace(w, busy_s=0, busy_share=0, mean_running=0) for w in one.workers] == [
            replace(w, busy_s=0, busy_share=0, mean_running=0) for w in two.workers
        ]
        assert one.busy_share == pytest.approx(two.busy_share, rel=1e-12)


def rows_of(record: RunRecord) -> list[tuple]:  # type: ignore[type-arg]
    from pyarrow import parquet

    return [tuple(row.values()) for row in parquet.read_table(record.folder / "steps.parquet").to_pylist()]


def same_but_for_rounding(one: Distribution, two: Distribution) -> bool:
    exact = ("count", "min", "p50", "p90", "p95", "p99", "max")
    near = all(
        a == b or a == pytest.approx(b, rel=1e-9, abs=1e-15) for a, b in ((one.mean, two.mean), (one.std, two.std))
    )
    return near and all(getattr(one, name) == getattr(two, name) for name in exact)


@examples(25)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=20, unique=True))
def test_samples_are_the_seconds_that_steps_cover(cuts: list[int]) -> None:
    edges = [cut / 4 for cut in sorted(cuts)]
    covered = {second for a, b in pairwise(edges) for second in range(16) if a <= second < b}
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder))
        writer.steps.extend(
            (0, "step", a, b, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, b - a, 0.0, 0.0) for a, b in pairwise(edges)
        )
        writer.close()
        assert RunRecord(Path(folder)).samples.floats("at_s").tolist() == sorted(covered)
