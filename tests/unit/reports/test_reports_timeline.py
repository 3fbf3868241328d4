"""The run over time: buckets that add up to the run, and stalls that stay visible."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from builders_reports import Ask, Toy, draw_asks, run_toy, step_row

from reports.build import build_report
from reports.record import RunRecord, RunWriter
from reports.report import Report
from reports.timeline import Timeline, bucket_count, timeline

TOY = Toy(workers=2, decode_s=0.008, decode_s_per_ctx=1e-6, prefill_s_per_token=2e-4, max_seqs=8, total_blocks=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Timeline]:
    toy = run_toy(tmp_path_factory.mktemp("run"), draw_asks(400, 8.0, seed=5), TOY, hash_known=True)
    build_report(toy.folder, toy.meta)
    record = RunRecord(toy.folder)
    return record, timeline(record, (0, 1), buckets=50)


def test_buckets_add_up_to_the_run(run: tuple[RunRecord, Timeline]) -> None:
    record, over = run
    requests, width = record.requests, float(over.edges_s[1] - over.edges_s[0])
    tokens = requests.ints("output_tokens").sum()
    assert over.output_tokens_per_s.sum() * width == pytest.approx(tokens)
    assert over.arrivals_per_s.sum() * width == pytest.approx(400)
    assert over.completions_per_s.sum() * width == pytest.approx(400)
    computed = requests.ints("isl").sum() - requests.ints("cached_tokens").sum()
    assert over.prompt_tokens_per_s.sum() * width >= computed  # more where a preempted request is computed again


def test_levels_are_weighted_with_time(run: tuple[RunRecord, Timeline]) -> None:
    record, over = run
    width = float(over.edges_s[1] - over.edges_s[0])
    columns = next(iter(record.steps.batches(("kind", "worker_id", "start_s", "end_s", "running"))))
    kind, labels = columns.codes("kind")
    is_step = np.array([label != "gap" for label in labels])[kind]
    length = (columns.floats("end_s") - columns.floats("start_s"))[is_step]
    for worker in (0, 1):
        mine = columns.ints("worker_id")[is_step] == worker
        assert over.busy[worker].sum() * width == pytest.approx(length[mine].sum())
        weighted = (length * columns.floats("running")[is_step])[mine].sum()
        assert over.levels["running"][worker].sum() * width == pytest.approx(weighted)


def test_a_worker_that_is_not_asked_for_is_left_out(run: tuple[RunRecord, Timeline]) -> None:
    record, over = run
    second = timeline(record, (1,), buckets=50)
    assert np.array_equal(second.busy, over.busy[1:])
    assert np.array_equal(second.levels["active_blocks"], over.levels["active_blocks"][1:])


def test_quantiles_per_bucket_are_near_the_exact_ones(run: tuple[RunRecord, Timeline]) -> None:
    record, over = run
    x, share = over.itl_cdf
    assert share[-1] == 1.0
    exact = Report.load(record.folder).latency.itl_s
    for quantile, value in ((0.5, exact.p50), (0.95, exact.p95), (0.99, exact.p99)):
        assert x[np.searchsorted(share, quantile)] == pytest.approx(value, rel=0.01)
    assert np.nanmax(over.itl_s[2]) == exact.max


def test_a_stall_shows_in_its_bucket(tmp_path: Path) -> None:
    asks = [Ask(0.0, 10, 1_000), Ask(5.0, 2_000, 2)]  # a prompt of 2 s stops a stream of 10 ms gaps
    toy = run_toy(tmp_path, asks, Toy(max_seqs=2))
    over = timeline(RunRecord(toy.folder), (0,), buckets=40)
    longest, median = over.itl_s[2], over.itl_s[0]
    assert np.nanmax(longest) == pytest.approx(2.01, abs=0.02)
    assert np.nanmedian(median) == pytest.approx(0.010, rel=0.01)
    worst = int(np.nanargmax(longest))
    assert over.edges_s[worst] <= 7.02 <= over.edges_s[worst + 1] + 0.5


def test_waiting_is_the_mean_of_who_was_dispatched_and_not_admitted(tmp_path: Path) -> None:
    asks = [Ask(0.0, 10, 500), Ask(1.0, 10, 100), Ask(2.5, 10, 100), Ask(20.0, 10, 100)]
    toy = run_toy(tmp_path, asks, Toy(max_seqs=1))
    over = timeline(RunRecord(toy.folder), (0,), buckets=40)
    requests = RunRecord(toy.folder).requests
    spans = list(zip(requests.floats("dispatch_s"), requests.floats("admit_s"), strict=True))
    for bucket, (low, high) in enumerate(pairwise(over.edges_s)):
        waited_s = sum(max(0.0, min(high, admit) - max(low, dispatch)) for dispatch, admit in spans)
        assert over.levels["waiting"][0, bucket] == pytest.approx(waited_s / (high - low), abs=1e-9)
    assert over.levels["waiting"].max() == pytest.approx(2.0)


def test_buckets_without_anything_are_undefined_or_zero(tmp_path: Path) -> None:
    toy = run_toy(tmp_path, [Ask(0.0, 100, 11), Ask(60.0, 100, 11)])
    over = timeline(RunRecord(toy.folder), (0,), buckets=24)
    quiet = slice(1, -2)
    assert np.isnan(over.ttft_s[:, quiet]).all()
    assert np.isnan(over.itl_s[:, quiet]).all()
    assert (over.busy[:, quiet] == 0).all()


def test_it_ends_where_the_run_ends(tmp_path: Path) -> None:
    """A step that ends after the last token (its request failed, or its client left) belongs to the run."""
    writer = RunWriter(tmp_path)
    writer.requests[0] = (
        0,
        "r0",
        None,
        0.0,
        100,
        11,
        "failed",
        "x",
        0,
        None,
        0.0,
        0.0,
        None,
        None,
        0,
        0,
        0,
        0,
        None,
        None,
    )
    writer.steps.append(step_row(0, 0.0, 7.5))
    writer.close()
    over = timeline(RunRecord(tmp_path), (0,))
    assert over.edges_s[-1] == 7.5
    assert over.busy[0].mean() == pytest.approx(1.0)


def test_no_requests_and_unknown_workers_do_no_harm(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.steps.append(step_row(9, 0.0, 1.0))
    writer.close()
    over = timeline(RunRecord(tmp_path), ())
    assert over.busy.shape == (0, 24)
    assert np.isnan(over.ttft_s).all()


@pytest.mark.parametrize(("requests", "buckets"), [(0, 24), (1_000, 25), (4_000, 100), (1_000_000, 160)])
def test_bucket_count(requests: int, buckets: int) -> None:
    assert bucket_count(requests) == buckets
