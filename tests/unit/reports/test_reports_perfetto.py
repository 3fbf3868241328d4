"""The Chrome trace: valid JSON whose slices add up to the run."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from builders_reports import Ask, Toy, draw_asks, run_toy

from reports.build import build_report
from reports.perfetto import FRONTEND, write_perfetto
from reports.report import Report

Events = list[dict[str, object]]

TOY = Toy(workers=2, decode_s=0.008, prefill_s_per_token=2e-4, max_seqs=8, total_blocks=120)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Events, Report]:
    asks = draw_asks(250, 8.0, seed=1)
    asks = [replace(ask, cancel_at_s=ask.arrival_s + 0.5) if row % 30 == 4 else ask for row, ask in enumerate(asks)]
    run = run_toy(tmp_path_factory.mktemp("run"), [*asks, Ask(40.0, 9_000, 5)], TOY)
    report = build_report(run.folder, run.meta)
    path = write_perfetto(run.folder, {0: "pool-0", 1: "pool-1"})
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"], report


def test_step_slices_are_the_busy_time(traced: tuple[Events, Report]) -> None:
    events, report = traced
    slices = [event for event in events if event["ph"] == "X"]
    for worker in report.workers:
        mine = sorted((e["ts"], e["dur"]) for e in slices if e["pid"] == worker.worker_id)
        assert sum(dur for _, dur in mine) / 1e6 == pytest.approx(worker.busy_s, abs=1e-3)
        assert all(start + dur <= later + 0.01 for (start, dur), (later, _) in pairwise(mine))
    assert {str(event["name"]).split(" x")[0] for event in slices} >= {"prefill", "decode"}


def test_requests_are_asynchronous_slices_that_close(traced: tuple[Events, Report]) -> None:
    events, report = traced
    open_now: dict[object, list[object]] = defaultdict(list)
    whole = Counter()
    for event in events:
        if event["ph"] == "b":
            open_now[event["id"]].append(event["name"])
            whole[str(event["name"])] += 1
        elif event["ph"] == "e":
            assert open_now[event["id"]].pop() == event["name"]
    assert not any(open_now.values())
    assert len(open_now) == report.demand.requests
    assert whole["queue"] == report.demand.requests
    assert whole["decode"] == report.counts.completed + sum(
        1 for event in events if event.get("args", {}).get("status") == "cancelled" and event["args"]["output_tokens"]
    )


def test_who_no_worker_took_is_at_the_frontend(traced: tuple[Events, Report]) -> None:
    events, report = traced
    rejected = [event for event in events if event.get("args", {}).get("status") == "rejected"]
    assert len(rejected) == report.counts.rejected > 0
    assert {event["pid"] for event in rejected} == {FRONTEND}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "pool-0", 1: "pool-1", FRONTEND: "frontend"}


def test_counters_fall_to_zero_when_a_worker_pauses(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [Ask(0.0, 100, 2), Ask(5.0, 100, 2)])
    events = json.loads(write_perfetto(run.folder).read_text(encoding="utf-8"))["traceEvents"]
    running = [(e["ts"], e["args"]["running"]) for e in events if e["ph"] == "C" and e["name"] == "requests"]
    assert [value for ts, value in running if ts in (110_000.0, 5_110_000.0)] == [0, 0]


def test_an_empty_run_is_valid_json(tmp_path: Path) -> None:
    run = run_toy(tmp_path, [])
    assert json.loads(write_perfetto(run.folder).read_text(encoding="utf-8"))["traceEvents"] == []
