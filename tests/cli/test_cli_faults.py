"""`twin replay --faults`: scenarios from the command line, what they must come to, and how a miss is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Twin

from policies.cluster.journal import replay
from twin.config_read import load
from twin.deciding import build_policy
from twin.drill import Drill

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "azure.parquet"
KEYED = ("lost-events", "corrupt-tier")
"""Scenarios of prompts that share beginnings."""
SCENARIOS = sorted((ROOT / "docs" / "scenarios").glob("*.toml"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_the_scenarios_that_are_shown_come_to_what_they_expect(scenario: Path, twin: Twin, tmp_path: Path) -> None:
    trace = keyed(tmp_path) if scenario.stem in KEYED else TRACE
    limit = "2200" if scenario.stem == "overload" else "1200"
    line = ["replay", trace, "--limit", limit, "--faults", scenario, "--no-html", "--quiet"]
    config = scenario.parent / "configs" / scenario.name
    if config.exists():
        line += ["--config", config]
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


def test_failures_are_not_modelled_where_no_scenario_has_them(twin: Twin, tmp_path: Path) -> None:
    told = []
    for name, more in (("plain", []), ("faults", ["--faults", SCENARIOS[0]])):
        twin("replay", TRACE, "--limit", "50", "--no-html", "--quiet", "--out", tmp_path / name, *more)
        meta = json.loads((tmp_path / name / "report.json").read_text(encoding="utf-8"))["meta"]
        told.append(any("control plane" in one for one in meta["not_modelled"]))
    assert told == [True, False]


def keyed(folder: Path) -> Path:
    """Seventy seconds of prompts that share prefixes of 1,024 tokens."""
    path = folder / "keys.jsonl"
    rows = (
        {"timestamp": 100 * n, "input_length": 1536, "output_length": 40, "hash_ids": [n % 7, 100 + n % 35, 1000 + n]}
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
    config = load(None, {"TRACE": str(TRACE), "--faults": str(scenario)})
    lines = (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum('"type":"RequestMigrated"' in line.replace(" ", "") for line in lines) >= 1
    assert replay(lines, [build_policy(config, 16), *Drill(config).policies]) is None


def test_the_printed_table_says_which_scenario_and_how_many_migrations(twin: Twin, tmp_path: Path) -> None:
    scenario = ROOT / "docs" / "scenarios" / "kill-one.toml"
    run = tmp_path / "run"
    out = twin("replay", TRACE, "--limit", "1200", "--faults", scenario, "--no-html", "--out", run).out
    (line,) = [line for line in out.splitlines() if line.startswith("faults")]
    migrations = json.loads((run / "report.json").read_text(encoding="utf-8"))["migrations"]
    assert migrations > 0
    assert f"{migrations} migration" in line
    assert "kill-one.toml" in out.replace("\n", "").replace(" ", "")


def test_a_partition_between_workers_that_send_nothing_is_refused(twin: Twin, tmp_path: Path) -> None:
    scenario, trace = tmp_path / "s.toml", tmp_path / "t.csv"
    scenario.write_text('faults = [{at_ms = 1, kind = "partition", between = ["pool-0", "pool-1"]}]', encoding="utf-8")
    trace.write_text("arrival_s,isl,osl\n0,1000,5\n", encoding="utf-8")
    ended = twin("replay", trace, "--faults", scenario, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "between has no effect: no worker of this run sends anything to another one" in ended.complaint


@pytest.mark.parametrize(
    ("between", "says"),
    [('["p-0", "x-0"]', "no worker has the name or role 'x-0'"), ('["p-0", "prefill"]', "p-0 is on both sides")],
)
def test_the_sets_of_a_partition_are_there(between: str, says: str, twin: Twin, tmp_path: Path) -> None:
    faults = f'faults = [{{at_ms = 500, kind = "partition", between = {between}}}]'
    ended = twin(*legs(tmp_path, faults))
    assert ended.code == 2
    assert says in ended.complaint


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ('kind = "link_down", link = "nic:p-7"', "faults[0]: link nic:p-7: no such lane; there are "),
        (
            'kind = "worker_down", role = "mixed"',
            "faults[0]: role = 'mixed': no worker has it; there are decode, prefill",
        ),
    ],
)
def test_a_link_or_role_that_is_not_there_is_refused_before_anything_runs(
    fault: str, says: str, twin: Twin, tmp_path: Path
) -> None:
    ended = twin(*legs(tmp_path, f"faults = [{{at_ms = 500, {fault}}}]"))
    assert ended.code == 2
    assert says in ended.complaint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_partitions_beside_workers_that_come_and_go(mode: str, twin: Twin, tmp_path: Path) -> None:
    faults = """migration_limit = 5
    faults = [
      {at_ms = 300, kind = "partition", between = ["p-0", "decode"], for_ms = 700},
      {every_ms = 500, kind = "partition", role = "prefill", for_ms = 250, detection_delay_ms = 100, count = 3},
      {at_ms = 900, kind = "partition", worker = "d-0", for_ms = 300},
      {every_ms = 400, kind = "worker_down", role = "prefill", for_ms = 150, count = 3},
    ]
    client_disconnects = [{rate = 0.1, within_ms = 2000}]
    expect = [{metric = "requests_failed", le = 0}, {invariants = "all"}]"""
    assert twin(*legs(tmp_path, faults, rows=80, mode=mode)).code == 0
    counts = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["counts"]
    assert counts["completed"] + counts["cancelled"] == 80
    assert twin(*legs(tmp_path, faults, rows=80, mode=mode)[:-1], tmp_path / "again", "--no-leap").code == 0
    assert (tmp_path / "again" / "faults.json").read_bytes() == (tmp_path / "run" / "faults.json").read_bytes()


@pytest.mark.parametrize("kind", ["worker_down", "drain", "partition"])
def test_who_finds_no_worker_is_told_when_one_is_due(kind: str, twin: Twin, tmp_path: Path) -> None:
    """An arrival is rejected, as a live cluster answers 503; a request that has been promised an answer fails."""
    scenario, trace, run = tmp_path / "s.toml", tmp_path / "t.csv", tmp_path / "run"
    more = {"drain": ", grace_ms = 0, timeout_ms = 0", "partition": ", detection_delay_ms = 0"}.get(kind, "")
    scenario.write_text(
        f'migration_limit = 1\nfaults = [{{at_ms = 100, kind = "{kind}", worker = "pool-0", until_ms = 900{more}}}]\n',
        encoding="utf-8",
    )
    trace.write_text("arrival_s,isl,osl\n0,1000,500\n0.5,1000,5\n2,1000,5\n", encoding="utf-8")
    startup = ["--set", "workers.startup_s=0.6"] if kind != "partition" else []
    line = ["replay", trace, "--workers", "1", "--faults", scenario, "--no-html", "--out", run]
    assert twin(*line, *startup).code == 0
    counts = json.loads((run / "report.json").read_text(encoding="utf-8"))["counts"]
    assert (counts["failed"], counts["rejected"], counts["completed"]) == (1, 1, 1)
    due_s = "0.9" if kind == "partition" else "1.5"
    assert counts["reasons"] == {f"no_endpoints: no worker takes new work; pool-0 is due at {due_s} s": 2}


ROWS = "arrival_s,isl,osl\n" + "".join(f"{n / 10},1000,5\n" for n in range(5))


@pytest.mark.parametrize("row", [4, 5, 999])
def test_a_client_of_a_row_that_is_not_there_is_refused(row: int, twin: Twin, tmp_path: Path) -> None:
    """Before the run where the trace says how many rows it has, else when it is over."""
    scenario, csv, trace = tmp_path / "s.toml", tmp_path / "t.csv", tmp_path / "t.parquet"
    scenario.write_text(f"client_disconnects = [{{at_ms = 401, row = {row}}}]", encoding="utf-8")
    csv.write_text(ROWS, encoding="utf-8")
    assert twin("import", csv, "--out", trace).code == 0
    streamed = twin("replay", csv, "--faults", scenario, "--no-html", "--out", tmp_path / "a")
    counted = twin("replay", trace, "--faults", scenario, "--no-html", "--out", tmp_path / "b")
    cut = twin("replay", trace, "--faults", scenario, "--no-html", "--limit", "4", "--out", tmp_path / "c")
    assert cut.code == 2
    assert f"row = {row}: the run has 4 requests, rows 0 to 3" in cut.complaint
    if row == 4:
        assert (streamed.code, counted.code) == (0, 0)
        return
    assert counted.code == 2
    assert f"client_disconnects[0]: row = {row}: the run has 5 requests, rows 0 to 4" in counted.complaint
    assert not (tmp_path / "b").exists()
    assert streamed.code in (2, 3)
    assert "5 requests" in streamed.err


@pytest.mark.parametrize(
    ("fault", "mode", "told"),
    [
        (
            'kind = "event_loss", rate = 0.5, worker = "any"',
            "round-robin",
            "nobody listens to KV events of the workers",
        ),
        ('kind = "event_delay", ms = 5, worker = "pool-1"', "least-loaded", "nobody listens to KV events of pool-1"),
        ('kind = "report_stale", role = "mixed"', "kv", "nobody listens to load reports of mixed workers"),
        ('kind = "event_loss", rate = 0.5, worker = "any"', "kv", None),
    ],
)
def test_a_fault_that_can_change_nothing_is_listed(
    fault: str, mode: str, told: str | None, twin: Twin, tmp_path: Path
) -> None:
    scenario, trace, run = tmp_path / "s.toml", tmp_path / "t.csv", tmp_path / "run"
    scenario.write_text(f"faults = [{{at_ms = 100, {fault}}}]", encoding="utf-8")
    trace.write_text(ROWS, encoding="utf-8")
    ended = twin("replay", trace, "--router", mode, "--faults", scenario, "--no-html", "--out", run)
    assert ended.code == 0
    listed = json.loads((run / "report.json").read_text(encoding="utf-8"))["meta"]["no_effect"]
    kind = fault.split('"')[1]
    assert listed == ([] if told is None else [f"faults[0]: {kind} has no effect: {told}"])


LEGS = """
[router]
mode = "{mode}"
[[workers]]
name = "p"
role = "prefill"
count = 2
model = "llama-3.1-8b"
[[workers]]
name = "d"
role = "decode"
count = 1
model = "llama-3.1-8b"
{more}
"""


def legs(folder: Path, faults: str, *, mode: str = "round-robin", more: str = "", rows: int = 40) -> list[object]:
    """A command line: rows every 50 ms on two prefill workers and a decode worker, and these faults."""
    scenario, config, trace = folder / "s.toml", folder / "c.toml", folder / "t.csv"
    scenario.write_text(faults, encoding="utf-8")
    config.write_text(LEGS.format(mode=mode, more=more), encoding="utf-8")
    trace.write_text("arrival_s,isl,osl\n" + "".join(f"{n / 20},1000,20\n" for n in range(rows)), encoding="utf-8")
    line = ["replay", trace, "--config", config, "--faults", scenario, "--no-html", "--quiet"]
    return [*line, "--out", folder / "run"]


@pytest.mark.parametrize("mode", ["round-robin", "kv", "least-loaded"])
@pytest.mark.parametrize("more", [(), ("--concurrency", "8"), ("--no-leap",)], ids=lambda more: "".join(more))
def test_a_link_that_stays_down_fails_what_waits_for_it(
    mode: str, more: tuple[str, ...], twin: Twin, tmp_path: Path
) -> None:
    """The other prefill worker's requests are answered, those of p-0 fail by name, each ends once."""
    faults = 'faults = [{at_ms = 300, kind = "link_down", link = "nic:p-0"}]\nexpect = [{invariants = "all"}]'
    ended = twin(*legs(tmp_path, faults, mode=mode), *more)
    assert (ended.code, ended.err) == (0, "")
    counts = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["counts"]
    assert counts["completed"] + counts["failed"] == 40
    assert counts["completed"] >= 10
    assert counts["reasons"] == {"stuck: link nic:p-0 is down to the end of the run": counts["failed"]}
    assert counts["failed"] >= 4


def test_all_links_down_fail_all_that_is_to_be_handed_over(twin: Twin, tmp_path: Path) -> None:
    faults = (
        'faults = [{at_ms = 0, kind = "link_down", link = "nic"}]\nexpect = [{metric = "requests_failed", eq = 300}]'
    )
    assert twin(*legs(tmp_path, faults, rows=300)).code == 0


def test_a_link_that_stays_down_beside_workers_that_come_and_go(twin: Twin, tmp_path: Path) -> None:
    faults = """migration_limit = 2
    faults = [
      {at_ms = 300, kind = "link_down", link = "nic:p-0"},
      {at_ms = 600, kind = "link_down", link = "nic:d-0", for_ms = 300},
      {every_ms = 400, kind = "worker_down", role = "prefill", for_ms = 150, count = 3},
      {at_ms = 1000, kind = "worker_hang", worker = "d-0", detection_delay_ms = 200, for_ms = 400},
    ]
    client_disconnects = [{rate = 0.1, within_ms = 2000}]
    expect = [{invariants = "all"}]"""
    assert twin(*legs(tmp_path, faults, rows=80)).code == 0
    counts = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["counts"]
    assert counts["completed"] + counts["failed"] + counts["cancelled"] == 80
    assert counts["reasons"]["stuck: link nic:p-0 is down to the end of the run"] >= 4
    assert twin(*legs(tmp_path, faults, rows=80)[:-1], tmp_path / "again", "--no-leap").code == 0
    assert (tmp_path / "again" / "faults.json").read_bytes() == (tmp_path / "run" / "faults.json").read_bytes()


def test_a_worker_that_nobody_misses_fails_what_it_had(twin: Twin, tmp_path: Path) -> None:
    faults = 'faults = [{at_ms = 500, kind = "worker_down", worker = "p-0", detect = "silent"}]'
    assert twin(*legs(tmp_path, faults)).code == 0
    counts = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["counts"]
    assert counts["completed"] + counts["failed"] == 40
    assert counts["reasons"] == {"stuck: worker p-0 is down to the end of the run": counts["failed"]}


@pytest.mark.parametrize(
    ("metric", "good"),
    [
        ("latency.foo.bar", False),
        ("latency.ttft_s.p9", False),
        ("counts.completed.x", False),
        ("latency.ttft_s.p99", True),
        ("counts.completed", True),
        ("hit_rate.x", False),
    ],
)
def test_a_metric_that_no_report_has_is_refused_before_the_run(
    metric: str, good: bool, twin: Twin, tmp_path: Path
) -> None:
    ended = twin(*legs(tmp_path, f'expect = [{{metric = "{metric}", ge = 0}}]'))
    assert ended.code == (0 if good else 2)
    assert (tmp_path / "run" / "report.json").exists() is good
    assert good or f"there is no metric {metric}" in ended.complaint


def test_a_link_fault_without_links_says_what_took_them_away(twin: Twin, tmp_path: Path) -> None:
    faults = 'faults = [{at_ms = 500, kind = "link_down", link = "nic"}]'
    ended = twin(*legs(tmp_path, faults, more="[disaggregation]\nbandwidth_gb_per_s = 25"))
    assert ended.code == 2
    assert "no links, as disaggregation.bandwidth_gb_per_s gives every transfer one of its own" in ended.complaint
