"""The scenarios that ship: each line of the specification's table has one, and what no expectation can say of some."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from twin.config_read import load
from twin.replay import Replayed, replay

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "docs" / "scenarios"

TABLE = {
    "kill one of four at 50 % load, migration on": "kill-one",
    "same, migration off": "kill-one-no-migration",
    "rolling restart": "rolling-restart",
    "etcd outage 60 s": "store-outage",
    "frontend and worker partition 10 s": "partition",
    "10 % event loss": "lost-events",
    "hang in prefill": "hang-in-prefill",
    "overload x3 for 60 s": "overload",
    "decode worker lost mid-transfer; prefill lost while held": "lost-legs",
    "disk tier corrupt 1 %": "corrupt-tier",
    "tcp_fallback": "tcp-fallback",
    "cancel storm 30 %": "cancel-storm",
    "churn": "churn",
}
"""What the specification asks for, and the file that plays it; tests/cli/test_cli_faults.py runs them all."""


@pytest.mark.parametrize("line", TABLE)
def test_each_line_of_the_table_has_a_scenario_that_expects_something(line: str) -> None:
    text = (SCENARIOS / f"{TABLE[line]}.toml").read_text(encoding="utf-8")
    assert "expect = [" in text
    assert 'invariants = "all"' in text


def play(folder: Path, name: str, trace: Path, *, faults: bool = True, tiers: bool = True) -> Replayed:
    given: dict[str, object] = {"TRACE": str(trace), "--limit": 1200}
    if faults:
        given["--faults"] = str(SCENARIOS / f"{name}.toml")
    else:
        given["--router"] = "kv"
    config = SCENARIOS / "configs" / f"{name}.toml"
    if not tiers:
        text = config.read_text(encoding="utf-8")
        config = folder / "plain.toml"
        config.write_text(text[: text.index("[workers.kvbm]")], encoding="utf-8")
    done = replay(load(config, given), out=folder / f"{name}-{faults}", html=False)
    assert done.missed == ()
    return done


def told(done: Replayed) -> list[dict]:
    timeline: list[dict] = json.loads((done.folder / "faults.json").read_text(encoding="utf-8"))["timeline"]
    return timeline


def test_the_report_names_the_slow_link_of_a_tcp_fallback(tmp_path: Path) -> None:
    done = play(tmp_path, "tcp-fallback", ROOT / "traces" / "azure.parquet")
    (entry,) = told(done)
    assert entry["fullest_link"] in {
        f"nic:{worker}:0/{way}" for worker in ("p-0", "p-1", "d-0", "d-1") for way in ("tx", "rx")
    }
    assert entry["fullest_share"] > 0.8
    (warning,) = [line for line in done.report.meta.warnings if "tcp_fallback" in line]
    assert f"the fullest link while it lasted was {entry['fullest_link']}, at 9" in warning


def test_legs_are_lost_in_the_middle_of_a_transfer_and_while_kv_is_held(tmp_path: Path) -> None:
    """Some requests had KV on its way to the decode worker, or held for it, when it died; some of the prefill worker's
    had theirs held there; nobody else was touched, and all are answered."""
    done = play(tmp_path, "lost-legs", ROOT / "traces" / "azure.parquet")
    _, decode, prefill = told(done)
    assert decode["outcomes"] == {"completed": decode["interrupted"]}
    assert prefill["outcomes"] == {"completed": prefill["interrupted"]}
    table = pq.read_table(done.folder / "requests.parquet").to_pydict()
    rows = zip(table["held_s"], table["moved_s"], table["migrations"], table["status"], strict=True)
    again = [(held_s, moved_s) for held_s, moved_s, migrations, _ in rows if migrations]
    assert len(again) >= 20
    assert all(moved_s is not None and moved_s - held_s > 0.1 for held_s, moved_s in again), "the network was slow"
    assert set(table["status"]) == {"completed"}


def test_answers_are_those_of_a_run_without_the_damaged_tier(tmp_path: Path) -> None:
    trace = tmp_path / "keys.jsonl"
    rows = (
        {"timestamp": 100 * n, "input_length": 1536, "output_length": 40, "hash_ids": [n % 7, 100 + n % 35, 1000 + n]}
        for n in range(700)
    )
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    damaged = play(tmp_path, "corrupt-tier", trace)
    plain = play(tmp_path, "corrupt-tier", trace, faults=False, tiers=False)
    columns = ["row", "status", "output_tokens"]
    answers = [
        pq.read_table(done.folder / "requests.parquet", columns=columns).to_pydict() for done in (damaged, plain)
    ]
    assert answers[0] == answers[1]
    hits = damaged.report.meta.kvbm["hits"]
    assert hits["g3"] > 1000
    assert hits["miss_failed"] > 100
