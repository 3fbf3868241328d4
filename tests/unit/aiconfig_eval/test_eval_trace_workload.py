"""A user's trace as the demand of a search: means for the formula, rows for the simulation, both of the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiconfig_eval_builders import candidate

from aiconfig.deployment import Setting, write_deployment
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluate import simulate
from aiconfig.trace_workload import read_workload
from policies.errors import ConfigError
from reports.report import Report
from traces.errors import TraceError
from twin.replay import replay


def _trace(folder: Path, *, every_s: float = 0.25, rows: int = 80) -> Path:
    path = folder / "mine.csv"
    lines = "".join(f"{i * every_s},{100 + 50 * (i % 3)},{10 + i % 5}\n" for i in range(rows))
    path.write_text("arrival_s,isl,osl\n" + lines, encoding="utf-8")
    return path


def test_means_and_longest_are_of_the_rows_that_are_played(tmp_path: Path) -> None:
    path = _trace(tmp_path)
    path.write_text(path.read_text(encoding="utf-8") + "1000,90000,9\n", encoding="utf-8")
    found = read_workload(path, requests=60)
    demand = found.workload
    assert (demand.isl, demand.osl, demand.requests) == (150, 12, 60)
    assert (demand.mean_isl, demand.longest_prompt, demand.longest) == (150.0, 200, 214)
    assert found.recorded is not None
    assert found.recorded.rps == pytest.approx(4.0)
    assert read_workload(path).workload.longest == 90_009


def test_recorded_rows_are_simulated_as_they_came(tmp_path: Path) -> None:
    found = read_workload(_trace(tmp_path))
    assert found.recorded is not None
    got = simulate(candidate(), found.workload, found.recorded)
    assert isinstance(got, Estimate), got
    assert got.requests_per_s == pytest.approx(4.0, rel=0.05)
    made = write_deployment(tmp_path / "made", candidate(), found.workload, found.recorded, Setting(sla="ttft=1s"))
    done = replay(made.config, out=tmp_path / "run", html=False)
    assert done.report.latency.ttft_s.p95 == got.value("ttft", "p95")
    assert done.report.meta.trace.name == "mine.csv"


def _lengths(report: Report) -> tuple[int, int]:
    return report.demand.input_tokens, report.demand.output_tokens


def test_the_same_rows_faster_or_in_a_closed_loop(tmp_path: Path) -> None:
    path = _trace(tmp_path)
    faster = simulate(candidate(), read_workload(path).workload, Load(rps=8.0))
    closed = simulate(candidate(), read_workload(path, arrivals="closed").workload, Load(users=2))
    poisson = simulate(candidate(), read_workload(path, arrivals="poisson").workload, Load(rps=4.0))
    assert isinstance(faster, Estimate)
    assert isinstance(closed, Estimate)
    assert isinstance(poisson, Estimate)
    assert faster.requests_per_s == pytest.approx(8.0, rel=0.05)
    assert faster.output_tokens == closed.output_tokens == poisson.output_tokens
    assert closed.requests_per_s > faster.requests_per_s


def test_shared_prefixes_are_what_an_endless_cache_would_hold(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    rows = [
        f'{{"timestamp": {i * 100}, "input_length": 1024, "output_length": 5, "hash_ids": [7, {100 + i}]}}'
        for i in range(10)
    ]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    demand = read_workload(path).workload
    assert demand.prefix_tokens == pytest.approx(512 * 9 / 10, abs=1)


def test_rows_that_come_at_one_moment_have_no_rate(tmp_path: Path) -> None:
    path = _trace(tmp_path, every_s=0.0)
    with pytest.raises(ConfigError, match="say --arrivals closed and --users N"):
        read_workload(path)
    found = read_workload(path, arrivals="closed")
    assert found.recorded is None
    assert isinstance(simulate(candidate(), found.workload, Load(users=3)), Estimate)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_workload(tmp_path / "absent.csv")
