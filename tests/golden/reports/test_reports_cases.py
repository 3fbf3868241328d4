"""Acceptance cases of the report: C02 and C04 from their files, the metric part of C01 and C03 from the toy engine.

The figures are those of the cases; a person can check each by hand.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from builders_reports import SERIAL, Ask, meta_of, run_toy

from reports.build import build_report
from reports.record import RunRecord, RunWriter
from reports.report import Report
from reports.sla import parse_sla

MS = 1e-3


def report_of_csv(path: Path, folder: Path, *, sla: str | None = None, arrivals_s: tuple[float, ...] = ()) -> Report:
    """Put the requests of a case file (relative milliseconds) into a run folder and build its report."""
    writer = RunWriter(folder)
    with path.open(encoding="utf-8", newline="") as file:
        for row, line in enumerate(csv.DictReader(file)):
            at_s = arrivals_s[row] if arrivals_s else 0.0
            done, tokens = line["status"] == "ok", int(line["output_tokens"])
            first = at_s + float(line["ttft_ms"]) * MS if done else None
            last = at_s + float(line["latency_ms"]) * MS if done else None
            writer.requests[row] = (
                row, line["request_id"], None, at_s, 100, max(tokens, 1), "completed" if done else "failed",
                None if done else "error", 0, None, at_s, at_s, first, last, tokens, None, 0, 0, None, None,
            )  # fmt: skip
    writer.close()
    return build_report(folder, meta_of(SERIAL), None if sla is None else parse_sla(sla))


# --- C01, C03: throughput is work over elapsed time -------------------------------------------------------------------


def test_c01_ttft_includes_the_queue_and_throughput_is_over_the_makespan(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 11)] * 3)
    report = build_report(run.folder, run.meta)
    ttft = report.latency.ttft_s
    assert [ttft.mean, ttft.p50, ttft.p90, ttft.p99] == pytest.approx([0.3, 0.3, 0.46, 0.496], abs=1e-6)
    requests = RunRecord(run.folder).requests
    assert requests.floats("ttft_s") == pytest.approx([0.1, 0.3, 0.5], abs=1e-6)
    assert requests.floats("e2e_s") == pytest.approx([0.2, 0.4, 0.6], abs=1e-6)
    assert requests.floats("queue_wait_s") == pytest.approx([0.0, 0.2, 0.4], abs=1e-6)
    assert requests.floats("tpot_s") == pytest.approx([0.01] * 3, abs=1e-6)
    assert report.latency.queue_wait_s.mean == pytest.approx(0.2, abs=1e-6)
    assert report.makespan_s == pytest.approx(0.6, abs=1e-6)
    assert report.throughput.requests_per_s == pytest.approx(5.0)
    assert report.throughput.output_tokens_per_s == pytest.approx(55.0)


@pytest.mark.parametrize(
    ("gap_s", "makespan_s", "requests_per_s", "output_tokens_per_s", "busy"),
    [
        (60.0, 60.2, 0.033223, 0.365449, 0.0066445),
        (604_800.0, 604_800.2, 3.306877e-6, 3.637564e-5, 6.613754e-7),
    ],
)
def test_c03_quiet_spells_stay_in_the_duration(
    tmp_path: Path, gap_s: float, makespan_s: float, requests_per_s: float, output_tokens_per_s: float, busy: float
) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 11), Ask(gap_s, 100, 11)])
    report = build_report(run.folder, run.meta)
    assert report.makespan_s == pytest.approx(makespan_s, abs=1e-6)
    assert report.throughput.requests_per_s == pytest.approx(requests_per_s, rel=2e-5)
    assert report.throughput.output_tokens_per_s == pytest.approx(output_tokens_per_s, rel=2e-5)
    assert report.busy_share == pytest.approx(busy, rel=2e-5)
    assert report.latency.ttft_s.max == pytest.approx(0.1, abs=1e-6)


# --- C02: one value per request; a one-token answer has none ----------------------------------------------------------


def test_c02_a_one_token_answer_has_no_time_per_token(root: Path, tmp_path: Path) -> None:
    report = report_of_csv(root / "tests/data/cases/c02_requests.csv", tmp_path)
    tpot = RunRecord(tmp_path).requests.floats("tpot_s")
    assert np.isnan(tpot[0])
    assert tpot[1:] == pytest.approx([0.020, 0.040], abs=1e-9)
    assert (report.latency.tpot_s.count, report.latency.tpot_s.min) == (2, pytest.approx(0.020))
    assert (report.latency.tpot_s.mean, report.latency.tpot_s.p50) == (pytest.approx(0.030), pytest.approx(0.030))
    assert (report.latency.ttft_s.count, report.latency.ttft_s.mean) == (3, pytest.approx(0.070))


def test_c02_speed_per_user_is_the_mean_of_the_inverses(root: Path, tmp_path: Path) -> None:
    report = report_of_csv(root / "tests/data/cases/c02_requests.csv", tmp_path)
    speed = report.tokens_per_s_per_user
    assert (speed.count, speed.min, speed.max) == (2, pytest.approx(25.0), pytest.approx(50.0))
    assert speed.mean == pytest.approx(37.5)


# --- C04: goodput takes all limits, inclusive, with failures in the denominator ---------------------------------------

FOURTH_ENDS_AT_2_S = (0.0, 0.0, 0.0, 1.39, 0.0, 0.0)
"""Arrivals that make the run of the case 2.0 s long: its fourth request takes 610 ms."""


@pytest.mark.parametrize(
    "sla", ["ttft:200 itl:50", "time_to_first_token:200 inter_token_latency:50", "ttft=200ms,tpot<=50ms"]
)
def test_c04_goodput_counts_who_keeps_every_limit(root: Path, tmp_path: Path, sla: str) -> None:
    path = root / "tests/data/cases/c04_requests.csv"
    result = report_of_csv(path, tmp_path, sla=sla, arrivals_s=FOURTH_ENDS_AT_2_S).sla
    assert result is not None
    assert (result.good, result.counted, result.attainment) == (3, 6, 0.5)
    assert result.goodput_rps == pytest.approx(1.5)
    ttft, gap = result.limits
    assert (ttft.requests_met, ttft.requests_missed, ttft.requests_undefined) == (4, 1, 1)
    assert (gap.requests_met, gap.requests_missed, gap.requests_undefined) == (3, 1, 2)


def test_c04_vllms_name_of_the_latency_works(root: Path, tmp_path: Path) -> None:
    result = report_of_csv(root / "tests/data/cases/c04_requests.csv", tmp_path, sla="e2el:610").sla
    assert result is not None
    assert (result.good, result.limits[0].requests_met, result.limits[0].requests_missed) == (4, 4, 1)
