"""Canaries and breakers in the simulated world: who is fenced when, and what that spares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy import Run, toy

from twin.engine.ticks import instant

BOTH = pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])


def _run(folder: Path, faults: list[dict[str, Any]], rows: list[tuple[float, int]], *sets: str, **options: Any) -> Run:
    trace, scenario = folder / "rows.jsonl", folder / "faults.json"
    lines = [{"timestamp": at_ms, "input_length": 10, "output_length": osl} for at_ms, osl in rows]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    told = {"workers": ["W0", "W1"], "faults": faults, "expect": [{"invariants": "all"}]}
    scenario.write_text(json.dumps(told), encoding="utf-8")
    options = {"serial": False, "workers": 2, "journal": True} | options
    return toy(trace, folder / "run", f"faults.path={scenario}", *sets, **options)


def _events(run: Run, *kinds: str) -> list[tuple[str, float, int]]:
    lines = (run.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    found = [json.loads(line)["event"] for line in lines]
    return [(e["type"], round(e["at_s"], 6), e["worker_id"]) for e in found if e["type"] in kinds]


def _health(run: Run) -> dict[str, int]:
    found: dict[str, int] = json.loads((run.folder / "faults.json").read_text(encoding="utf-8"))["health"]
    return found


HANG = {"at_ms": 5000, "kind": "worker_hang", "worker": "W0", "until_ms": 40_000}


@BOTH
def test_a_worker_that_hangs_is_fenced_until_it_answers(leap: bool, tmp_path: Path) -> None:
    """It hangs at 5 s with a stream that began at 0; asked at 14.99 s (its last token came at 4.99), nothing by 17.99.

    It goes on at 40 s: its step ends then, and when it is asked next, it has been heard. From 17.99 s on W1 gets all.
    """
    rows = [(0, 1000), (0, 1), *[(10_000 + 5000 * n, 1) for n in range(8)]]
    run = _run(tmp_path, [HANG], rows, leap=leap)
    fences = _events(run, "WorkerFenced", "WorkerUnfenced")
    assert fences[0] == ("WorkerFenced", 17.99, 0)
    assert fences[1][0] == "WorkerUnfenced"
    assert 40.0 <= fences[1][1] <= 44.0
    sent = [(row["at_s"], row["worker_id"]) for row in run.rows("decisions")]
    assert {worker for at_s, worker in sent if 17.99 < at_s < 40.0} == {1}
    assert {worker for at_s, worker in sent if at_s < 18.0} == {0, 1}
    assert run.requests("status") == ["completed"] * 10, "what runs there goes on when it does"
    assert _health(run)["canary_fenced"] == _health(run)["canary_restored"] == 1


def test_an_idle_worker_is_asked_every_ten_seconds_and_it_costs_nobody_anything(tmp_path: Path) -> None:
    rows = [(0, 1), (35_000, 1)]
    run = _run(tmp_path, [{"at_ms": 34_000, "kind": "worker_slow", "worker": "W1", "factor": 2}], rows)
    assert _health(run)["canary_ok"] >= 6
    assert len(run.requests("row")) == 2, "no canary is a request of the record"
    assert _events(run, "WorkerFenced") == []


def test_a_worker_that_streams_gets_no_canary(tmp_path: Path) -> None:
    slow = {"at_ms": 1, "kind": "worker_slow", "worker": "W1", "factor": 1.5}
    run = _run(tmp_path, [slow], [(0, 6000), (0, 4000)])
    assert "canary_ok" not in _health(run)


@BOTH
def test_a_breaker_spares_requests_a_worker_that_fails_all(leap: bool, tmp_path: Path) -> None:
    """W0 fails whatever it gets from 1 s to 31 s: idle, it would get every second request."""
    faults = [{"at_ms": 1000, "kind": "engine_error", "worker": "W0", "until_ms": 31_000}]
    rows = [(100 * n, 2) for n in range(600)]
    run = _run(tmp_path, faults, rows, "router.mode=round-robin", leap=leap)
    ended = zip(run.requests("arrival_s"), run.requests("status"), strict=True)
    failed = [at_s for at_s, status in ended if status == "failed"]
    assert len(failed) == 5 + 2, "five in a row, and one request at each of two trials"
    assert all(reason is None or reason.startswith("engine_error: ") for reason in run.requests("reason"))
    opened = [(at_s, kind) for kind, at_s, _ in _events(run, "WorkerFenced", "WorkerUnfenced")]
    assert failed[4] == pytest.approx(opened[0][0])
    health = _health(run)
    assert (health["breaker_opened"], health["breaker_closed"], health["breaker_probes"]) == (3, 1, 3)
    without = _run(tmp_path, faults, rows, "resilience.breaker_failures=0", "router.mode=round-robin")
    assert without.requests("status").count("failed") == 150


def test_a_share_of_errors_is_drawn_by_request(tmp_path: Path) -> None:
    fault = {"at_ms": 0, "kind": "engine_error", "worker": "W0", "rate": 0.3}
    rows = [(50 * n, 1) for n in range(400)]
    run = _run(tmp_path, [fault], rows, "resilience.breaker_failures=0")
    assert 40 <= run.requests("status").count("failed") <= 80


def test_policies_are_woken_at_instants_and_what_they_see_then_is_not_later(tmp_path: Path) -> None:
    """Canaries are due at sums like 0.038 + 0.0007, which floats leave a little off the instant that is meant."""
    rows = [(10 + 7 * n, 3) for n in range(120)]
    late = {"at_ms": 1, "kind": "worker_slow", "worker": "W1", "factor": 1.7}
    run = _run(tmp_path, [late], rows, "resilience.canary_idle_s=0.0007")
    lines = (run.folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    times = [json.loads(line)["event"]["at_s"] for line in lines]
    assert times == sorted(times)
    assert [at_s for at_s in times if at_s != instant(at_s)] == []
