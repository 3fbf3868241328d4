"""One small run, its report.json and its terminal text, kept to the byte.

`DYNATWIN_WRITE_GOLDEN=1 python -m pytest tests/golden/reports` writes the files anew; the invariants beside them would
notice figures that are wrong rather than new.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from builders_reports import Ask, Toy, ToyRun, run_toy

from reports.build import build_report
from reports.record import RunState
from reports.report import Report
from reports.sla import parse_sla
from reports.tables import report_text

HERE = Path(__file__).parent
TOY = Toy(workers=2, max_seqs=2, total_blocks=20, decode_s_per_ctx=1e-5)
ASKS = [
    Ask(0.0, 100, 11), Ask(0.0, 50, 1), Ask(0.05, 120, 6, cached=32), Ask(0.1, 64, 9), Ask(0.4, 400, 5),
    Ask(0.5, 90, 40, cancel_at_s=0.8), Ask(2.0, 30, 3), Ask(2.0, 160, 12, cached=64),
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return run_toy(tmp_path_factory.mktemp("golden"), ASKS, TOY, hash_known=True)


@pytest.fixture(scope="module")
def report(run: ToyRun) -> Report:
    return build_report(run.folder, run.meta, parse_sla("ttft=200ms, itl=15ms@p90, goodput>=80%"))


def check(name: str, text: str) -> None:
    path = HERE / name
    if os.environ.get("DYNATWIN_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_report_json(report: Report) -> None:
    check("toy.report.json", report.to_json())


def test_terminal_text(report: Report) -> None:
    state = RunState(state="complete", started="", cpu_s=0.25, wall_s=0.5)
    check("toy.report.txt", report_text(report, path="runs/toy/report.html", run=state) + "\n")


def test_the_kept_figures_are_those_of_the_token_times(run: ToyRun) -> None:
    kept = json.loads((HERE / "toy.report.json").read_text(encoding="utf-8"))
    answered = [row for row, ask in enumerate(ASKS) if len(run.token_times[row]) == ask.osl]
    ttft = [run.token_times[row][0] - ASKS[row].arrival_s for row in answered]
    assert kept["counts"]["completed"] == len(answered) == 6
    assert kept["latency"]["ttft_s"]["mean"] == pytest.approx(np.mean(ttft))
    assert kept["latency"]["ttft_s"]["p95"] == pytest.approx(np.quantile(ttft, 0.95))
    assert kept["latency"]["itl_s"]["count"] == len(run.gaps)
    assert kept["latency"]["itl_s"]["p99"] == pytest.approx(np.quantile(run.gaps, 0.99))
    end_s = max(times[-1] for times in run.token_times.values() if times)
    assert kept["makespan_s"] == pytest.approx(end_s)
    tokens = sum(ASKS[row].osl for row in answered)
    assert kept["throughput"]["output_tokens_per_s"] == pytest.approx(tokens / end_s)
    good = sum(value <= 0.2 for value in ttft) - sum(
        value <= 0.2 and len(times) > 1 and (times[-1] - times[0]) / (len(times) - 1) > 0.015
        for value, times in ((ttft[i], run.token_times[row]) for i, row in enumerate(answered))
    )
    assert (kept["sla"]["good"], kept["sla"]["counted"], kept["sla"]["cancelled"]) == (good, 7, 1)
