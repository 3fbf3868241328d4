"""Runs with a planner, from the configuration to the report: what is kept agrees, and nothing depends on leaping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import Run, run

from policies.cluster import journal
from policies.cluster.controller import Policy
from policies.errors import ConfigError
from reports.html import write_html
from reports.replicas import read_series
from reports.report import Report
from reports.tables import report_text
from twin.config_read import load
from twin.config_text import to_toml
from twin.deciding import build_policy, migration
from twin.planning import build_planner
from twin.replay import replay
from twin.wiring import build_cluster

SLA = {"--sla": "ttft=500ms,itl=50ms"}
FAST = ("planner.throughput_adjustment_interval_s=10", "workers.startup_s=4", "workers.count=2")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minute and a half: quiet, busy, quiet."""
    rng = np.random.default_rng(5)
    at_s = np.sort(np.concatenate([rng.uniform(0, 90, 90), rng.uniform(25, 55, 700)]))
    isl, osl = rng.integers(100, 3000, len(at_s)), rng.integers(2, 200, len(at_s))
    path = tmp_path_factory.mktemp("planner") / "t.csv"
    rows = "".join(f"{at:.6f},{i},{o}\n" for at, i, o in zip(at_s, isl, osl, strict=True))
    path.write_text("arrival_s,isl,osl\n" + rows, encoding="utf-8")
    return path


def planned(trace: Path, out: Path, name: str, *sets: str, **options: Any) -> Run:
    return run(trace, out, *FAST, *sets, flags={**SLA, "--planner": name}, **options)


NAMES = ["throughput", "load", "hybrid", "lookahead"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_of_a_run_agrees(name: str, trace: Path, tmp_path: Path) -> None:
    done = planned(trace, tmp_path / name, name, "resilience.migration_limit=3")
    report, figures = done.report, done.report.planner
    assert figures is not None
    assert report.counts.completed == report.demand.requests
    plans, series = done.rows("plans"), read_series(done.folder)
    assert {one.role for one in series} == {"mixed"}
    (mixed,) = series
    assert figures.changes == sum(row["decision_id"] is not None for row in plans) > 0
    assert all(row["reason"] and row["text"] for row in plans)
    assert [row["final"] for row in plans] == [max(1, row["final"]) for row in plans]
    # GPUs are billed from order to end: the series of counts and the workers' own times say the same
    arrival = min(done.requests("arrival_s"))
    end_s = arrival + (report.makespan_s or 0.0)
    held = np.diff(np.clip(np.append(mixed.at_s, max(end_s, mixed.at_s[-1])), arrival, end_s))
    assert report.gpu_s == pytest.approx(float((held * mixed.gpus).sum()), abs=1e-6)
    assert figures.gpu_s == report.gpu_s
    assert {worker.worker_id for worker in report.workers} == set(range(2 + figures.starts))
    assert all(worker.busy_share is None or worker.busy_share <= 1 + 1e-9 for worker in report.workers)
    answered = set(done.requests("worker_id"))
    assert answered <= {worker.worker_id for worker in report.workers}


@pytest.mark.parametrize("name", NAMES)
def test_leaping_changes_nothing(name: str, trace: Path, tmp_path: Path) -> None:
    runs = [planned(trace, tmp_path / str(leap), name, leap=leap, journal=True) for leap in (True, False)]
    for table in ("requests", "plans", "replicas"):
        assert runs[0].rows(table) == runs[1].rows(table), table
    journals = [(one.folder / "journal.jsonl").read_bytes() for one in runs]
    assert journals[0] == journals[1]


def test_the_configuration_of_a_run_gives_the_same_run(trace: Path, tmp_path: Path) -> None:
    first = planned(trace, tmp_path / "a", "hybrid", "planner.preset=calm", "planner.max_gpu_budget=20")
    config = load(first.folder / "config.toml")
    again = replay(config, out=tmp_path / "b", html=False)
    assert first.report.planner == again.report.planner
    for name in ("requests.parquet", "plans.parquet", "replicas.parquet", "config.toml"):
        assert (first.folder / name).read_bytes() == (again.folder / name).read_bytes(), name


def test_the_budget_holds_at_every_instant(trace: Path, tmp_path: Path) -> None:
    done = planned(trace, tmp_path, "hybrid", "planner.max_gpu_budget=12")
    for one in read_series(done.folder):
        assert one.gpus.max() <= 12


@pytest.mark.parametrize("name", ["hybrid", "lookahead"])
def test_the_journal_gives_the_same_orders_again(name: str, trace: Path, tmp_path: Path) -> None:
    done = planned(trace, tmp_path, name, "resilience.migration_limit=2", journal=True)
    config = load(done.folder / "config.toml")
    cluster = build_cluster(config)
    planner = build_planner(config, cluster.groups)
    assert planner is not None
    policies: list[Policy] = [build_policy(config, 16), migration(config), planner]
    with (done.folder / "journal.jsonl").open(encoding="utf-8") as lines:
        assert journal.replay(lines, policies) is None


def test_what_comes_later_changes_no_decision_before(trace: Path, tmp_path: Path) -> None:
    """The demand after 50 s is another one; what was decided by then is not."""
    lines = trace.read_text(encoding="utf-8").splitlines(keepends=True)
    other = tmp_path / "other.csv"
    late = [f"{line.split(',')[0]},{7 + 13 * i % 900},{1 + 7 * i % 90}\n" for i, line in enumerate(lines[1:])]
    kept = [line if float(line.split(",")[0]) < 50 else late[i] for i, line in enumerate(lines[1:])]
    other.write_text("".join([lines[0], *kept]), encoding="utf-8")
    told = [
        [row for row in planned(path, tmp_path / path.stem, "lookahead").rows("plans") if row["at_s"] <= 45]
        for path in (trace, other)
    ]
    assert told[0] == told[1]
    assert told[0]


def test_the_report_shows_the_planner_and_reads_back(trace: Path, tmp_path: Path) -> None:
    done = planned(trace, tmp_path, "hybrid", "workers.usd_per_hour=3")
    report = done.report
    assert Report.from_json(report.to_json()) == report
    assert report.planner is not None
    assert report.planner.cost_usd == pytest.approx((report.gpu_s or 0) / 3600 * 3)
    words = report_text(report, path="p")
    assert "GPU-hours billed" in words
    assert "hybrid: forecast every 10 s, load every 5 s" in words
    page = write_html(done.folder, report).read_text(encoding="utf-8")
    for part in ("<h2>Planner</h2>", "mixed workers", "GPUs billed", report.planner.decisions[0].text):
        assert part.replace("&", "&amp;") in page, part


def test_without_a_planner_nothing_is_said_of_one(trace: Path, tmp_path: Path) -> None:
    done = run(trace, tmp_path)
    assert "planner" not in json.loads(done.report.to_json())
    assert not (done.folder / "plans.parquet").exists()


def test_a_run_with_another_planner_leaves_nothing_of_the_last_one(trace: Path, tmp_path: Path) -> None:
    planned(trace, tmp_path, "load")
    assert (tmp_path / "plans.parquet").exists()
    run(trace, tmp_path)
    assert not (tmp_path / "plans.parquet").exists()


def test_prefill_and_decode_workers_come_and_go_with_their_links(trace: Path, tmp_path: Path) -> None:
    """New workers have NICs of their own; weights over links too, from a store that all share."""
    file = tmp_path / "c.toml"
    file.write_text(
        """
[[workers]]
name = "pre"
role = "prefill"
count = 1
startup = { weights_from = "object", boot_s = 1, warmup_s = 1 }
links = { weights = "pcie+storage" }
[[workers]]
name = "dec"
role = "decode"
count = 1
startup = { weights_from = "peer", boot_s = 1, warmup_s = 1 }
links = { weights = "nic" }
[planner]
name = "hybrid"
throughput_adjustment_interval_s = 10
startup_s = 20
[resilience]
migration_limit = 3
[sla]
limits = "ttft=500ms,itl=50ms"
""",
        encoding="utf-8",
    )
    done = run(trace, tmp_path / "out", config_file=file)
    report = done.report
    assert report.counts.completed == report.demand.requests
    assert report.planner is not None
    assert {role.role for role in report.planner.roles} == {"prefill", "decode"}
    assert report.planner.starts > 0
    late = {worker.worker_id for worker in report.meta.workers if worker.held_from_s is not None}
    assert late & {*done.requests("prefill_worker_id"), *done.requests("worker_id")}
    assert report.meta.moved_bytes["weights"] > 0


def test_workers_that_come_have_tiers_too(trace: Path, tmp_path: Path) -> None:
    sets = ("workers.kvbm.cpu_cache_gb=20", "workers.kvbm.disk_cache_gb=50", "resilience.migration_limit=3")
    done = planned(trace, tmp_path, "load", *sets)
    assert done.report.counts.completed == done.report.demand.requests
    assert done.report.planner is not None
    assert done.report.planner.starts > 0


def test_starts_that_fail_are_tried_again(trace: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text(
        'version = 1\nfaults = [{at_ms = 0, kind = "start_fail", worker = "any", until_ms = 40000}]\n'
        'expect = [{invariants = "all"}]\n',
        encoding="utf-8",
    )
    done = planned(trace, tmp_path / "out", "load", f"faults.path={scenario}")
    figures = done.report.planner
    assert figures is not None
    assert figures.starts_failed > 0
    assert figures.starts > figures.starts_failed
    assert done.report.counts.completed == done.report.demand.requests


def test_the_first_to_come_wakes_a_worker_and_waits_for_it(tmp_path: Path) -> None:
    """Z7: nobody for a while, then down to none; whoever comes then is served once a worker has started."""
    path = tmp_path / "t.csv"
    at_s = [0.0, 0.5, 1.0, *[100 + 0.1 * i for i in range(20)]]
    path.write_text("arrival_s,isl,osl\n" + "".join(f"{at:.3f},500,20\n" for at in at_s), encoding="utf-8")
    sets = ("planner.min_endpoint=0", "planner.hold_s=5", "planner.load_adjustment_interval_s=1", "workers.count=1")
    done = run(path, tmp_path / "out", *FAST, *sets, flags={**SLA, "--planner": "hybrid"}, journal=True)
    assert done.report.counts.completed == len(at_s)
    (mixed,) = read_series(done.folder)
    assert mixed.ready.min() == 0
    ttft = done.requests("ttft_s")
    assert ttft[0] < 1.0
    assert 4.0 < ttft[3] < 4.6  # its worker starts for 4 s, and takes the prompts of all who wait at once
    assert [row["status"] for row in done.rows("requests")] == ["completed"] * len(at_s)


def test_a_run_in_which_nobody_ever_comes_ends(tmp_path: Path) -> None:
    path, scenario = tmp_path / "t.csv", tmp_path / "s.toml"
    path.write_text("arrival_s,isl,osl\n0,500,20\n200,500,20\n", encoding="utf-8")
    scenario.write_text('version = 1\nfaults = [{at_ms = 0, kind = "start_fail", worker = "any"}]\n', encoding="utf-8")
    sets = ("planner.min_endpoint=0", "planner.hold_s=5", f"faults.path={scenario}", "workers.count=1")
    done = run(path, tmp_path / "out", *FAST, *sets, flags={**SLA, "--planner": "hybrid"})
    assert (done.report.counts.completed, done.report.counts.failed) == (1, 1)


# ---------------------------------------------------------------- configuration


def test_a_planner_s_table_is_written_and_read_back(tmp_path: Path) -> None:
    sets = ["planner.name=lookahead", "planner.load_predictor=prophet", "planner.period=24", "planner.ttft_s=0.3"]
    config = load(sets=[*sets, "planner.lookahead.seeds=4", "planner.min_endpoint=2"])
    file = tmp_path / "c.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load(file) == config


BAD = {
    "a name": (["planner.name=hybrit"], 'planner.name = "hybrit"', "hybrid"),
    "nobody plans": (["planner.min_endpoint=2"], "planner.min_endpoint has no effect", "--planner"),
    "no look-ahead": (["planner.name=load", "planner.lookahead.seeds=3"], "planner.lookahead.seeds", "asks the twin"),
    "no season": (["planner.name=hybrid", "planner.period=9"], "planner.period", "knows no seasons"),
    "no schedule": (["planner.name=load", "planner.schedule=0 mixed=1"], "planner.schedule", "schedule follows it"),
    "a share": (["planner.name=load", "planner.load_scaling_down_sensitivity=2"], "must be 1 or less", "fewer workers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_in_one_line(case: str) -> None:
    sets, what, why = BAD[case]
    with pytest.raises(ConfigError) as refused:
        load(sets=sets)
    assert what in str(refused.value)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


TOGETHER = {
    "target": (["planner.name=hybrid", "planner.target=load"], "planner.name = load"),
    "budget": (["planner.name=load", "planner.max_gpu_budget=3"], "min_endpoint needs 4 GPUs"),
    "intervals": (["planner.name=hybrid", "planner.load_adjustment_interval_s=500"], "must be shorter"),
    "schedule": (["planner.name=schedule"], "needs planner.schedule"),
    "schedule text": (["planner.name=schedule", "planner.schedule=0 decode=4"], "is no step"),
    "schedule count": (["planner.name=schedule", "planner.schedule=0 mixed=-1"], "0 or more"),
    "period": (["planner.name=hybrid", "planner.load_predictor=prophet"], "needs planner.period"),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_settings_that_do_not_go_together_are_refused_before_anything_runs(
    case: str, trace: Path, tmp_path: Path
) -> None:
    sets, why = TOGETHER[case]
    with pytest.raises(ConfigError, match=why):
        run(trace, tmp_path / "out", *sets)
    assert not (tmp_path / "out").exists()


def test_two_groups_of_a_role_are_refused(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[[workers]]\nname = "a"\n[[workers]]\nname = "b"\n[planner]\nname = "load"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="the groups a and b"):
        run(trace, tmp_path / "out", config_file=file)


def test_a_group_says_how_many_gpus_it_held_at_once(trace: Path, tmp_path: Path) -> None:
    sets = ("planner.schedule=0 mixed=2, 20 mixed=4, 40 mixed=1, 60 mixed=3", "resilience.migration_limit=3")
    done = planned(trace, tmp_path, "schedule", *sets)
    (group,) = done.report.groups
    (mixed,) = read_series(done.folder)
    assert (group.workers, group.gpus) == (2 + 2 + 2, 16)
    assert group.gpus == mixed.gpus.max() == done.report.meta.gpus
