"""`twin replay --faults`: scenarios from the command line, what they must come to, and how a miss is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Twin

from policies.cluster.journal import replay
from policies.resilience.migration import Migration, MigrationSettings
from twin.config_read import load
from twin.replay import build_policy

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "azure.parquet"
SCENARIOS = sorted((ROOT / "docs" / "scenarios").glob("*.toml"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_the_scenarios_that_are_shown_come_to_what_they_expect(scenario: Path, twin: Twin, tmp_path: Path) -> None:
    trace = keyed(tmp_path) if scenario.stem == "lost-events" else TRACE
    line = ["replay", trace, "--limit", "1200", "--faults", scenario, "--no-html", "--quiet"]
    run = tmp_path / "run"
    ended = twin(*line, "--out", run)
    assert (ended.code, ended.err) == (0, "")
    told = json.loads((run / "faults.json").read_text(encoding="utf-8"))
    assert told["never_applied"] == []
    assert all(expectation["met"] for expectation in told["expect"])
    assert any(entry["why_not"] is None for entry in told["timeline"])
    if scenario.stem != "churn":
        return  # one of them step by step is enough here: it has every kind
    assert twin(*line, "--out", tmp_path / "again", "--no-leap").code == 0
    assert (tmp_path / "again" / "faults.json").read_bytes() == (run / "faults.json").read_bytes()


def keyed(folder: Path) -> Path:
    """Sixty seconds of prompts that share prefixes."""
    path = folder / "keys.jsonl"
    rows = (
        {"timestamp": 100 * n, "input_length": 512, "output_length": 40, "hash_ids": [n % 7, 100 + n % 35, 1000 + n]}
        for n in range(700)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_missed_expectation_is_a_result(twin: Twin, tmp_path: Path) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text(
        'faults = [{at_ms = 1000, kind = "worker_down", worker = "pool-0"}]\n'
        'expect = [{metric = "requests_failed", le = 0}, {metric = "latency.ttft_s.p50", le = 1e-6}]\n',
        encoding="utf-8",
    )
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,isl,osl\n0,1000,500\n0.2,1000,10\n", encoding="utf-8")
    ended = twin("replay", trace, "--faults", scenario, "--no-html", "--out", tmp_path / "run")
    assert ended.code == 3
    first, second = ended.err.splitlines()
    assert first == "twin: expected requests_failed le 0, it is 1"
    assert second.startswith("twin: expected latency.ttft_s.p50 le 1e-06, it is 0.0")


def test_a_fault_that_never_applied_is_no_silence(twin: Twin, tmp_path: Path) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text('faults = [{at_ms = 9e6, kind = "drain", worker = "any"}]\n', encoding="utf-8")
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,isl,osl\n0,1000,5\n", encoding="utf-8")
    ended = twin("replay", trace, "--faults", scenario, "--no-html", "--out", tmp_path / "run")
    assert ended.code == 3
    assert "faults[0]: drain at 9000 s was never applied: the run ended at 0." in ended.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('faults = [{at_ms = 1, kind = "drain", worker = "W9"}]', "no such worker; there are pool-0, pool-1, pool-2"),
        ('workers = ["W0", "W1"]\n', "names 2 workers, the run has 4"),
        ('faults = [{at_ms = 1, kind = "worker_donw", worker = "any"}]', "did you mean worker_down"),
    ],
)
def test_a_bad_scenario_is_one_line(text: str, says: str, twin: Twin, tmp_path: Path) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text(text, encoding="utf-8")
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,isl,osl\n0,1000,5\n", encoding="utf-8")
    more = ["--workers", "4"] if "names" in says else []
    ended = twin("replay", trace, "--faults", scenario, *more, "--out", tmp_path / "run")
    assert ended.code == 2
    assert says in ended.complaint


def test_options_without_faults_are_refused(twin: Twin, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,isl,osl\n0,1000,5\n", encoding="utf-8")
    ended = twin("replay", trace, "--set", "resilience.migration_limit=3")
    assert ended.code == 2
    assert "resilience.migration_limit has no effect: nothing in this run loses workers" in ended.complaint


def test_the_journal_of_a_faulty_run_replays(twin: Twin, tmp_path: Path) -> None:
    """Migrations are in the journal, and fresh policies order the same from it."""
    scenario = ROOT / "docs" / "scenarios" / "kill-one.toml"
    run = tmp_path / "run"
    line = ["replay", TRACE, "--limit", "800", "--faults", scenario, "--journal", "--no-html", "--out", run]
    assert twin(*line).code == 0
    router = build_policy(load(None, {"TRACE": str(TRACE)}), 16)
    lines = (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum('"type":"RequestMigrated"' in line.replace(" ", "") for line in lines) >= 1
    assert replay(lines, [router, Migration(MigrationSettings(limit=3, max_seq_len=None))]) is None


def test_the_printed_table_says_which_scenario_and_how_many_migrations(twin: Twin, tmp_path: Path) -> None:
    scenario = ROOT / "docs" / "scenarios" / "kill-one.toml"
    run = tmp_path / "run"
    out = twin("replay", TRACE, "--limit", "1200", "--faults", scenario, "--no-html", "--out", run).out
    (line,) = [line for line in out.splitlines() if line.startswith("faults")]
    migrations = json.loads((run / "report.json").read_text(encoding="utf-8"))["migrations"]
    assert migrations > 0
    assert f"{migrations} migration" in line
    assert "kill-one.toml" in out.replace("\n", "").replace(" ", "")
