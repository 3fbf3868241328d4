"""A run that was warmed up: latencies, rates and verdicts leave the first rows out, everything else is of all rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders_reports import Ask, Toy, draw_asks, run_toy

from policies.errors import ConfigError
from reports.build import build_report
from reports.columns import F64
from reports.record import RunRecord
from reports.report import Report, RunMeta
from reports.sla import parse_sla
from traces.convert import write_table
from traces.synth import SynthOptions, synthesise
from twin.config_read import load
from twin.replay import replay

WARMUP = 30
TOY = Toy(workers=2, decode_s=0.01, decode_s_per_ctx=1e-6, prefill_s_per_token=2e-4, max_seqs=8, total_blocks=400)


def _replayed(folder: Path, warmup: int | None, name: str) -> tuple[Report, Path]:
    rows = "".join(f"{i * 0.05},{400 + 10 * (i % 7)},{20 + i % 11}\n" for i in range(120))
    trace = folder / "trace.csv"
    trace.write_text("arrival_s,isl,osl\n" + rows, encoding="utf-8")
    flags = {"TRACE": str(trace), "--sla": "ttft=80ms,tpot=12ms"}
    sets = [] if warmup is None else [f"trace.warmup={warmup}"]
    done = replay(load(None, flags, sets), out=folder / name, html=False)
    return done.report, done.folder


def test_latencies_and_rates_are_of_the_rows_behind_the_warm_up(tmp_path: Path) -> None:
    report, folder = _replayed(tmp_path, WARMUP, "warm")
    requests = RunRecord(folder).requests
    behind = {name: requests.floats(name)[WARMUP:] for name in ("arrival_s", "last_token_s", "ttft_s", "output_tokens")}
    elapsed_s = behind["last_token_s"].max() - behind["arrival_s"].min()
    assert report.latency.ttft_s.count == 120 - WARMUP
    assert report.latency.ttft_s.mean == pytest.approx(behind["ttft_s"].mean())
    assert report.throughput.requests_per_s == pytest.approx((120 - WARMUP) / elapsed_s)
    assert report.throughput.output_tokens_per_s == pytest.approx(behind["output_tokens"].sum() / elapsed_s)
    assert report.sla is not None
    assert report.sla.counted == 120 - WARMUP


def test_the_run_itself_and_what_is_counted_do_not_change(tmp_path: Path) -> None:
    warm, warm_folder = _replayed(tmp_path, WARMUP, "warm")
    cold, cold_folder = _replayed(tmp_path, None, "cold")
    assert (warm.counts, warm.demand, warm.workers, warm.groups) == (
        cold.counts,
        cold.demand,
        cold.workers,
        cold.groups,
    )
    assert warm.makespan_s == cold.makespan_s
    for name in ("requests.parquet", "steps.parquet"):
        assert (warm_folder / name).read_bytes() == (cold_folder / name).read_bytes()
    assert any("first 30 requests (trace.warmup)" in text for text in warm.meta.warnings)
    assert not any("trace.warmup" in text for text in cold.meta.warnings)


def test_gaps_of_steps_before_the_first_measured_arrival_are_left_out(tmp_path: Path) -> None:
    asks = [*draw_asks(60, 12.0, seed=3), Ask(1000.0, 100, 40)]
    run = run_toy(tmp_path / "toy", asks, TOY)
    meta = run.meta
    whole = build_report(run.folder, meta)
    warm = build_report(run.folder, _with_warmup(meta, 60), parse_sla("ttft=1s"))
    assert whole.latency.itl_s.count == len(run.gaps)
    assert warm.latency.itl_s.count == 39, "the last request alone"
    assert warm.latency.ttft_s.count == 1
    last: F64 = np.diff(np.array(run.token_times[60]))
    assert warm.latency.itl_s.max == pytest.approx(last.max())


def _with_warmup(meta: RunMeta, rows: int) -> RunMeta:
    return replace(meta, config={"trace": {"warmup": rows}})


def test_a_warm_up_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.parquet"
    write_table(synthesise("poisson", SynthOptions(rows=10, rate_rps=1.0, isl=10, osl=2)), trace)
    with pytest.raises(ConfigError, match=r"trace\.warmup = 10: the run has 10 requests"):
        replay(load(None, {"TRACE": str(trace)}, ["trace.warmup=10"]), out=tmp_path / "run", html=False)
    assert not (tmp_path / "run").exists()
