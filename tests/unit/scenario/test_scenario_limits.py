"""Limits on load that a scenario sets and clears while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import toy


@pytest.mark.parametrize("leap", [True, False])
@pytest.mark.parametrize("more", [(), ("router.busy.prefill_tokens=50",)], ids=["none before", "one before"])
def test_a_limit_holds_from_its_instant_until_it_is_cleared(more: tuple[str, ...], leap: bool, tmp_path: Path) -> None:
    """One worker, a prompt of 100 ms every 50 ms: none is refused without a limit; from 1 s on a worker with more than
    50 tokens to compute gets nothing, from 2 s on it does again. The limit that was there before stays until then."""
    rows = [{"timestamp": 50 * n, "input_length": 100, "output_length": 2} for n in range(60)]
    trace, scenario = tmp_path / "rows.jsonl", tmp_path / "s.json"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    faults = [
        {"at_ms": 1000, "kind": "busy_thresholds", "set": {"prefill_tokens": 50}},
        {"at_ms": 2000, "kind": "busy_thresholds", "set": {"prefill_tokens": None}},
    ]
    scenario.write_text(json.dumps({"faults": faults, "expect": [{"invariants": "all"}]}), encoding="utf-8")
    run = toy(trace, tmp_path / "run", f"faults.path={scenario}", "router.mode=least-loaded", *more, leap=leap)
    status = run.requests("status")
    assert ("rejected" in status[:20]) is bool(more)
    assert status[20:40].count("rejected") >= 10
    assert status[40:] == ["completed"] * 20
    told = json.loads((run.folder / "faults.json").read_text(encoding="utf-8"))
    assert [entry["target"] for entry in told["timeline"]] == ["prefill_tokens = 50", "prefill_tokens = none"]
    assert told["never_applied"] == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"kind": "busy_thresholds", "set": {"engine_running": 4}}, "without engine_queue nobody counts what runs"),
        ({"kind": "busy_thresholds", "clear": ["prefill_share"]}, "what it clears is never set"),
        ({"kind": "engine_error", "worker": "any", "rate": 0}, "its rate is 0"),
        ({"kind": "busy_thresholds", "set": {"prefill_tokens": 5}}, None),
        ({"kind": "busy_thresholds", "clear": ["decode_blocks_share"]}, None),
    ],
)
def test_a_fault_that_leaves_everything_as_it_was_is_told(fault: dict, told: str | None, tmp_path: Path) -> None:
    trace, scenario = tmp_path / "rows.jsonl", tmp_path / "s.json"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 2}\n', encoding="utf-8")
    scenario.write_text(json.dumps({"faults": [{"at_ms": 5} | fault]}), encoding="utf-8")
    run = toy(trace, tmp_path / "run", f"faults.path={scenario}", "router.busy.decode_blocks_share=0.9")
    expected = [] if told is None else [f"faults[0]: {fault['kind']} has no effect: {told}"]
    assert [line for line in run.report.meta.no_effect if line.startswith("faults")] == expected
