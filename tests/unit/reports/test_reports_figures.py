"""Figures by name: each reads a report, and says its value with a unit."""

from __future__ import annotations

from pathlib import Path

from builders_reports import Ask, Toy, run_toy

from reports.build import build_report
from reports.figures import FIGURES, USUAL_FIGURES, figures_of
from reports.sla import parse_sla


def test_every_figure_reads_a_report_and_can_be_said(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(at / 10, 100, 11) for at in range(20)], Toy(workers=2), hash_known=True)
    report = build_report(run.folder, run.meta, parse_sla("ttft=1s"))
    figures = figures_of(report)
    assert list(figures) == list(FIGURES)
    assert figures["ttft_p95"] == report.latency.ttft_s.p95
    assert figures["attainment"] == 1.0
    assert figures["oracle_regret_s"] is None
    assert all(value is None or isinstance(value, int | float) for value in figures.values())
    assert all(figure.say(figures[name]) for name, figure in FIGURES.items())
    assert set(USUAL_FIGURES) <= set(FIGURES)


def test_counts_and_their_means_read_as_what_they_are() -> None:
    assert FIGURES["rejected"].say(12_345) == "12,345"
    assert FIGURES["rejected"].say(0.5) == "0.500"
    assert FIGURES["hit_rate"].say(None) == "n/a"
