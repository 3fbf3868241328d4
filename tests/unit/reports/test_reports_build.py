"""The report of a run: every figure against the toy engine's own books, and JSON that is the same for equal runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders_reports import BLOCK_TOKENS, SERIAL, Ask, Toy, ToyRun, draw_asks, meta_of, request_row, run_toy, step_row

from policies.errors import ConfigError
from reports.build import build_report
from reports.record import RunRecord, RunWriter
from reports.report import Report
from reports.sla import parse_sla

BUSY = Toy(workers=3, decode_s=0.008, decode_s_per_ctx=1e-6, prefill_s_per_token=2e-4, max_seqs=16, total_blocks=150)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    """300 requests on three small workers: queues, preemptions, rejections and cancellations all occur."""
    asks = draw_asks(300, 11.0, seed=11)
    asks = [replace(ask, cancel_at_s=ask.arrival_s + 1.0) if row % 25 == 7 else ask for row, ask in enumerate(asks)]
    return run_toy(tmp_path_factory.mktemp("busy"), [*asks, Ask(asks[-1].arrival_s, 5_000, 10)], BUSY, hash_known=True)


@pytest.fixture(scope="module")
def report(busy: ToyRun) -> Report:
    return build_report(busy.folder, busy.meta, parse_sla("ttft=300ms,itl=20ms@p95"))


def test_the_toy_does_what_this_file_relies_on(report: Report) -> None:
    counts = report.counts
    assert counts.rejected >= 1
    assert counts.cancelled >= 3
    assert report.preemptions >= 3
    assert report.readmissions == report.preemptions


def test_every_row_is_counted_once(report: Report) -> None:
    counts = report.counts
    assert counts.completed + counts.rejected + counts.cancelled + counts.failed + counts.open == 301
    assert report.demand.requests == 301
    assert sum(counts.reasons.values()) == counts.rejected + counts.cancelled
    assert set(counts.reasons) == {"the client left", "needs 159 blocks, the pool has 150 (and like it)"}


def test_pooled_gaps_are_those_of_every_token(busy: ToyRun, report: Report) -> None:
    gaps, itl = np.array(busy.gaps), report.latency.itl_s
    assert itl.count == len(gaps)
    assert [itl.p50, itl.p90, itl.p95, itl.p99] == pytest.approx(np.quantile(gaps, [0.5, 0.9, 0.95, 0.99]).tolist())
    assert [itl.mean, itl.std, itl.min, itl.max] == pytest.approx([gaps.mean(), gaps.std(), gaps.min(), gaps.max()])


def test_latencies_are_of_completed_requests_only(busy: ToyRun, report: Report) -> None:
    requests = RunRecord(busy.folder).requests
    done = np.array(requests.texts("status")) == "completed"
    assert report.latency.ttft_s.count == report.latency.e2e_s.count == done.sum()
    assert report.latency.ttft_s.max == requests.floats("ttft_s")[done].max()
    tokens = [len(busy.token_times[row]) for row in np.flatnonzero(done)]
    assert report.throughput.output_tokens_per_s == pytest.approx(sum(tokens) / report.makespan_s)
    assert report.throughput.output_tokens_per_s_per_gpu == pytest.approx(sum(tokens) / report.makespan_s / 3)


def test_workers_add_up_to_the_run(report: Report) -> None:
    workers = report.workers
    assert [worker.name for worker in workers] == ["pool-0", "pool-1", "pool-2"]
    assert sum(worker.completed for worker in workers) == report.counts.completed
    assert sum(worker.preemptions for worker in workers) == report.preemptions
    assert report.busy_share == pytest.approx(np.mean([worker.busy_s for worker in workers]) / report.makespan_s)
    assert max(worker.kv_peak_blocks for worker in workers) <= BUSY.total_blocks
    assert report.kv_peak_share == max(worker.kv_peak_share for worker in workers)
    assert max(worker.peak_waiting for worker in workers) > 0


def test_hit_rate_is_cached_over_asked_of_what_was_admitted(busy: ToyRun, report: Report) -> None:
    requests = RunRecord(busy.folder).requests
    admitted = ~np.isnan(requests.floats("admit_s"))
    share = requests.floats("cached_tokens")[admitted].sum() / requests.floats("isl")[admitted].sum()
    assert report.hit_rate == pytest.approx(share)
    assert 0.05 < report.hit_rate < 0.2
    cached = sum(worker.hit_rate * worker.input_tokens for worker in report.workers)
    assert cached / sum(worker.input_tokens for worker in report.workers) == pytest.approx(share)


def test_without_hash_ids_there_is_no_hit_rate(busy: ToyRun, tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 3, cached=16)])
    report = build_report(run.folder, run.meta)
    assert report.hit_rate is None
    assert report.workers[0].hit_rate is None


def test_leaping_changes_no_figure(tmp_path: Path) -> None:
    reports = []
    for leap in (True, False):
        run = run_toy(tmp_path / str(leap), draw_asks(80, 6.0, seed=2), replace(BUSY, leap=leap))
        reports.append(build_report(run.folder, run.meta))
    assert RunRecord(tmp_path / "True").steps.rows < RunRecord(tmp_path / "False").steps.rows / 2
    first, second = (report.latency for report in reports)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        for statistic in ("count", "mean", "p50", "p95", "p99", "max"):
            left, right = (getattr(latency, name).statistic(statistic) for latency in (first, second))
            assert left == pytest.approx(right, rel=1e-9), (name, statistic)


def test_disaggregated_requests_count_on_both_sides(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.requests = {0: request_row(0, worker_id=1, prefill_worker_id=0, cached_tokens=50)}
    writer.close()
    report = build_report(tmp_path, meta_of(replace(SERIAL, workers=2), hash_known=True))
    prefill, decode = report.workers
    assert (prefill.requests, prefill.completed, prefill.input_tokens, prefill.output_tokens) == (1, 1, 100, 0)
    assert (decode.requests, decode.completed, decode.input_tokens, decode.output_tokens) == (1, 1, 0, 5)
    assert (prefill.hit_rate, decode.hit_rate) == (0.5, None)


def test_workers_that_the_meta_does_not_name_are_listed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.steps.append(step_row(5, 0.0, 1.0))
    writer.close()
    report = build_report(tmp_path, meta_of(SERIAL))
    assert [(worker.worker_id, worker.name, worker.steps) for worker in report.workers] == [
        (0, "pool-0", 0),
        (5, "worker 5", 1),
    ]


def test_a_run_that_ends_in_failures_lasts_until_the_last_of_them(tmp_path: Path) -> None:
    """One answer, last token at 6 s; a prompt step to 10 s whose request fails; a last arrival at 20 s that fails."""
    writer = RunWriter(tmp_path)
    nothing = dict.fromkeys(("admit_s", "first_token_s", "last_token_s"))
    late = {row: request_row(row, "failed", output_tokens=0, **nothing) for row in (1, 20)}
    writer.requests = {0: request_row(0), **late}
    for start_s in range(10):
        writer.steps.append(step_row(0, float(start_s), start_s + 1.0))
    writer.close()
    report = build_report(tmp_path, meta_of(SERIAL), parse_sla("ttft=10s"))
    assert (report.makespan_s, report.gpu_s) == (20.0, 20.0)
    assert report.busy_share == pytest.approx(0.5)
    assert report.throughput.requests_per_s == pytest.approx(1 / 20)
    assert report.sla is not None
    assert report.sla.goodput_rps == pytest.approx(1 / 20)


def test_nothing_at_all_is_reported_as_nothing(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    report = build_report(tmp_path, meta_of(SERIAL), parse_sla("ttft=1s"))
    assert (report.makespan_s, report.throughput.requests_per_s, report.busy_share) == (None, None, None)
    assert report.latency.itl_s.count == 0
    assert Report.load(tmp_path).counts.completed == 0


def test_an_unknown_status_is_refused(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.requests = {0: request_row(0, "lost")}
    writer.close()
    with pytest.raises(ConfigError, match="status 'lost'; known: completed, rejected"):
        build_report(tmp_path, meta_of(SERIAL))


# --- report.json ------------------------------------------------------------------------------------------------------


def test_the_file_is_the_report(busy: ToyRun, report: Report) -> None:
    text = (busy.folder / "report.json").read_text(encoding="utf-8")
    assert text == report.to_json()
    again = Report.load(busy.folder)
    assert again.to_json() == text
    assert again.latency == report.latency
    assert again.workers == report.workers
    assert again.sla == report.sla


def test_undefined_is_null_in_json(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 1)])
    build_report(run.folder, run.meta)
    plain = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert plain["latency"]["tpot_s"] == {"count": 0} | dict.fromkeys(
        ("mean", "std", "min", "p50", "p90", "p95", "p99", "max", "mean_ci95")
    )
    assert plain["tokens_per_s_per_user"]["mean"] is None
    assert plain["hit_rate"] is None


def test_no_word_of_host_time_or_place(busy: ToyRun) -> None:
    text = (busy.folder / "report.json").read_text(encoding="utf-8")
    assert str(busy.folder) not in text
    assert not {"started", "cpu_s", "wall_s", "host", "versions"} & json.loads(text).keys()


def test_the_same_run_gives_the_same_bytes_in_any_process(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from builders_reports import Toy, draw_asks, run_toy\n"
        "from reports.build import build_report\n"
        "from reports.html import write_html\n"
        "from reports.sla import parse_sla\n"
        "run = run_toy(Path(sys.argv[1]), draw_asks(60, 5.0, seed=4), Toy(workers=2), hash_known=True)\n"
        "write_html(run.folder, build_report(run.folder, run.meta, parse_sla('ttft=1s')))\n"
    )
    for place, seed in (("one", "1"), ("two", "4242")):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / place)], cwd=root, env=env, check=True)
    for name in ("report.json", "report.html", "requests.parquet", "steps.parquet", "samples.parquet"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"schema": "dynatwin.report/1"}', '{"schema": "other/9"}'])
def test_a_foreign_report_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"report\.json") as refused:
        Report.from_json(text)
    assert "\n" not in str(refused.value)


def test_block_use_of_a_lone_request(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 11)], replace(SERIAL, total_blocks=14))
    report = build_report(run.folder, run.meta)
    assert report.workers[0].kv_peak_blocks == -(-(100 + 10 + 1) // BLOCK_TOKENS)
    assert report.kv_peak_share == 0.5
