"""How numbers read, and the report for a terminal: what every line must say, within the width, without colour codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders_reports import Ask, Toy, draw_asks, run_toy

from reports import text
from reports.build import build_report
from reports.record import RunState
from reports.report import LatencyMeta, Report
from reports.sla import parse_sla
from reports.tables import report_text

DONE = RunState(state="complete", started="", cpu_s=0.5, wall_s=0.6)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "n/a"), (0.0, "0"), (0.0332226, "0.0332"), (0.572, "0.572"), (7.98, "7.98"), (9.9, "9.90"), (79.66, "79.7"),
     (1148.4, "1,148"), (-8.214, "-8.21"), (3.306877e-6, "3.31e-06")],
)  # fmt: skip
def test_figures(value: float | None, shown: str) -> None:
    assert text.figures(value) == shown


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [(None, "n/a"), (0.0, "0 s"), (0.00037, "370 µs"), (0.0123, "12.3 ms"), (1.234, "1.23 s"), (599.0, "599 s"),
     (2_430.0, "40.5 min"), (90_000.0, "25.0 h"), (604_800.2, "7.0 d"), (-0.0021, "-2.10 ms")],
)  # fmt: skip
def test_times(value_s: float | None, shown: str) -> None:
    assert text.time(value_s) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "n/a"), (0.0, "0.0 %"), (0.2313, "23.1 %"), (6.6e-7, "6.6e-05 %"), (1.0, "100.0 %")]
)
def test_shares(value: float | None, shown: str) -> None:
    assert text.share(value) == shown


def test_large_and_counted() -> None:
    assert [text.large(value) for value in (12, 1_170_000, 3.2e10)] == ["12", "1.17 M", "32 G"]
    assert [text.counted(n, "GPU") for n in (1, 16)] == ["1 GPU", "16 GPUs"]


# --- the terminal -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    toy = Toy(workers=2, decode_s=0.008, prefill_s_per_token=2e-4, max_seqs=8, total_blocks=120)
    asks = [*draw_asks(250, 7.0, seed=1), Ask(37.0, 9_000, 5)]
    run = run_toy(tmp_path_factory.mktemp("run"), asks, toy, hash_known=True)
    meta = replace(
        run.meta,
        latency=(
            LatencyMeta(
                group="pool", model="roofline", source="vLLM on Hopper", engine_version="0.12", error_band="± 14 %"
            ),
        ),
        warnings=("kv routing asked for [on a trace without hash ids]",),
        no_effect=("router.temperature",),
    )
    return build_report(run.folder, meta, parse_sla("ttft=200ms,itl=50ms@p95,goodput>=99%"))


def test_every_promised_line_is_there(report: Report) -> None:
    shown = report_text(report, path="runs/toy/report.html", run=DONE)
    lines = shown.splitlines()
    for words in (
        "toy.csv (csv): 251 requests over", "SYNTHETIC", "2 toy workers", "round-robin",
        "roofline: vLLM on Hopper, 0.12; error band ± 14 %", "rejected",
        "blocks, the pool has 120",
        "per GPU (2 GPUs)", "per user (mean)", "hit rate", "preemption", "peak ", "missed (ttft=200ms,itl=50ms@p95",
        "keep every limit", "0.500 CPU seconds, 502 requests per CPU-second", "none was measured",
        "kv routing asked for [on a trace without hash ids]", "router.temperature", "network and tokenising time",
    ):  # fmt: skip
        assert words in shown, words
    head = next(line for line in lines if "p50" in line and "mean" in line)
    assert head.split() == ["latency", "mean", "±", "95", "%", "p50", "p90", "p95", "p99", "max"]
    rows = [line.split()[0] for line in lines[lines.index(head) + 1 : lines.index(head) + 6]]
    assert rows == ["TTFT", "TPOT", "ITL", "E2E", "queue"]
    assert lines[-1] == "report  runs/toy/report.html"


def test_plain_text_has_no_codes_and_keeps_its_width(report: Report) -> None:
    long_path = "/a/very/long/" * 20 + "report.html"
    *lines, last = report_text(report, path=long_path, run=DONE).splitlines()
    assert last == f"report  {long_path}"
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)


def test_colour_only_when_asked(report: Report) -> None:
    assert "\x1b[" in report_text(report, path="x", colour=True)


def test_the_cost_is_left_out_while_it_is_not_known(report: Report) -> None:
    assert "CPU seconds" not in report_text(report, path="x", run=None)
    assert "CPU seconds" not in report_text(report, path="x", run=replace(DONE, cpu_s=None))


def test_hit_rate_without_hash_ids_reads_na(report: Report) -> None:
    assert "hit rate n/a" in report_text(replace(report, hit_rate=None), path="x")


@pytest.mark.parametrize(("asked", "shown"), [(1_000, "251 of 1,000 requests"), (None, "251 requests")])
def test_a_partial_run_says_so_first(report: Report, asked: int | None, shown: str) -> None:
    stopped = replace(DONE, state="partial", asked_requests=asked)
    first = report_text(report, path="x", run=stopped).splitlines()[0]
    assert " ".join(first.split()) == f"PARTIAL: stopped after {shown} of the trace; every figure is of these alone"
    assert "PARTIAL" not in report_text(report, path="x", run=DONE)
