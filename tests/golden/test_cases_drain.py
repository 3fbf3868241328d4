"""The table of drains (resilience.md §6, D1 to D7): three phases, a stale router, a recall, a second signal.

The engine is the TOY, several requests at once. Three streams on W0 end at about 2, 8 and 1,000 s; it drains from
0.001 s on, with a grace of 5 s and 900 s to finish. Rows in between go to W1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy import Run, toy

BOTH = pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
ROOM = ("workers.engine.kv_blocks=20000", "workers.engine.max_num_batched_tokens=200000")
STREAMS = [(0, 200), (0, 1), (0, 800), (0, 1), (0, 100_000)]
"""Rows in turn over W0 and W1: (arrival in ms, output tokens); a decode step takes 10 ms."""


def _run(
    folder: Path,
    faults: list[dict[str, Any]],
    *sets: str,
    rows: list[tuple[float, int]] = STREAMS,
    limit: int = 1,
    **options: Any,
) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    trace, scenario = folder / "rows.jsonl", folder / "faults.json"
    lines = [{"timestamp": at_ms, "input_length": 10, "output_length": osl} for at_ms, osl in rows]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    told = {"workers": ["W0", "W1"], "migration_limit": limit, "faults": faults, "expect": [{"invariants": "all"}]}
    scenario.write_text(json.dumps(told), encoding="utf-8")
    options = {"serial": False, "workers": 2} | options
    return toy(trace, folder / "run", f"faults.path={scenario}", *ROOM, *sets, **options)


def _drain(at_ms: float = 1, **more: Any) -> dict[str, Any]:
    return {"at_ms": at_ms, "kind": "drain", "worker": "W0", **more}


def _told(run: Run) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((run.folder / "faults.json").read_text(encoding="utf-8"))
    return told


def test_d1_what_is_left_is_migrated_at_the_end_of_the_drain(tmp_path: Path) -> None:
    run = _run(tmp_path, [_drain()])
    assert run.requests("status") == ["completed"] * 5
    assert run.requests("migrations") == [0, 0, 0, 0, 1]
    last_s = run.requests("last_token_s")
    assert 1.9 < last_s[0] < 2.1
    assert 7.9 < last_s[2] < 8.1
    (entry,) = _told(run)["timeline"]
    assert entry["detected_s"] == pytest.approx(905.001)
    assert entry["outcomes"] == {"completed": 1}
    assert run.report.meta.workers[0].held_until_s == pytest.approx(905.001), "within the 30 s of the engine's stop"


def test_d2_without_migration_it_fails_and_says_why(tmp_path: Path) -> None:
    run = _run(tmp_path, [_drain()], limit=0)
    assert run.requests("status") == ["completed"] * 4 + ["failed"]
    assert run.requests("reason")[4].startswith("engine_shutdown: worker 0: engine shutdown at the end of the drain")
    assert run.ms("last_token_s")[4] == pytest.approx(905_000, abs=11)
    assert _told(run)["migration"] == {"migration_refused_engine_shutdown": 1}


LATE = [(0, 1000), (0, 1), (3000, 5), (3000, 1), (6000, 5)]


@BOTH
def test_d3_a_stale_router_is_served_in_the_grace_and_refused_after_it(leap: bool, tmp_path: Path) -> None:
    """The routers hear of it after 60 s: at 3 s W0 serves, at 6 s it refuses and W1 does it, no token lost."""
    run = _run(tmp_path, [_drain(known_after_ms=60_000)], rows=LATE, leap=leap)
    assert run.requests("status") == ["completed"] * 5
    assert [row["worker_id"] for row in run.rows("decisions")] == [0, 1, 0, 1, 0, 1]
    assert run.requests("migrations") == [0, 0, 0, 0, 1]
    assert run.ms("ttft_s")[4] == 10, "refused at once, computed at once"
    (entry,) = _told(run)["timeline"]
    assert (entry["interrupted"], entry["tokens_carried"]) == (1, 0)
    assert 9.9 < entry["detected_s"] < 10.1, "it leaves when its last stream has ended"


def test_d3_without_migration_a_refused_request_fails(tmp_path: Path) -> None:
    run = _run(tmp_path, [_drain(known_after_ms=60_000)], rows=LATE, limit=0)
    assert run.requests("status")[4] == "failed"
    assert "shutting down and takes nothing new" in run.requests("reason")[4]


def test_an_idle_worker_serves_its_grace_too(tmp_path: Path) -> None:
    run = _run(tmp_path, [_drain()], rows=[(0, 1), (0, 1), (9000, 1)])
    (entry,) = _told(run)["timeline"]
    assert entry["detected_s"] == pytest.approx(5.001)


@BOTH
@pytest.mark.parametrize("at_ms", [4000, 7000], ids=["in its grace", "while it drains"])
def test_d4_a_worker_that_is_recalled_is_what_it_was(at_ms: float, leap: bool, tmp_path: Path) -> None:
    recall = {"at_ms": at_ms, "kind": "undrain", "worker": "W0"}
    rows = [(0, 1000), (0, 1), (3000, 5), (9000, 5), (9001, 5)]
    run = _run(tmp_path, [_drain(), recall], rows=rows, leap=leap, journal=True)
    assert [row["worker_id"] for row in run.rows("decisions")] == [0, 1, 1, 1, 0], "at 3 s W1 alone, then both in turn"
    assert run.requests("migrations") == [0] * 5
    lines = [json.loads(line) for line in (run.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    kinds = [line["event"]["type"] for line in lines]
    assert kinds.count("WorkerUp") == 2, "registered again under the same epoch"
    assert kinds.count("WorkerRecalled") == 1
    assert "WorkerLost" not in kinds


def test_a_recall_before_anybody_heard_is_silent(tmp_path: Path) -> None:
    faults = [_drain(known_after_ms=3000), {"at_ms": 2000, "kind": "undrain", "worker": "W0"}]
    run = _run(tmp_path, faults, rows=[(0, 1000), (0, 1), (4000, 5), (8000, 5)], journal=True)
    assert [row["worker_id"] for row in run.rows("decisions")] == [0, 1, 0, 1]
    assert '"WorkerDraining"' not in (run.folder / "journal.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(("limit", "status"), [(1, "completed"), (0, "failed")])
def test_d5_a_second_signal_stops_it_at_once(limit: int, status: str, tmp_path: Path) -> None:
    run = _run(tmp_path, [_drain(), _drain(10_000)], limit=limit)
    assert run.requests("status")[4] == status
    first, second = _told(run)["timeline"]
    assert first["detected_s"] == 10.0
    assert second["why_not"] is None


def test_d7_with_every_worker_draining_an_arrival_is_rejected(tmp_path: Path) -> None:
    faults = [{"at_ms": 1, "kind": "drain", "worker": name} for name in ("W0", "W1")]
    run = _run(tmp_path, faults, rows=[(0, 1000), (0, 1000), (500, 5)])
    assert run.requests("status") == ["completed", "completed", "rejected"]
    assert run.requests("reason")[2].startswith("all_fenced: no worker that could takes new work")


@pytest.mark.parametrize("limit", [0, 1])
def test_m10_a_drain_that_relies_on_migration_is_pointed_out_where_it_is_off(limit: int, tmp_path: Path) -> None:
    run = _run(tmp_path, [_drain()], rows=[(0, 5), (0, 5)], limit=limit)
    found = [text for text in run.report.meta.warnings if text.startswith("drains: ")]
    assert len(found) == (limit == 0)
