"""GPU-seconds, duration and busy share of runs in which workers leave for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Twin


def _run(twin: Twin, folder: Path, faults: str, *line: str | Path) -> dict[str, Any]:
    """The report of requests that arrive every 100 ms, the last at 4.4 s."""
    trace, scenario, out = folder / "t.csv", folder / "s.toml", folder / "run"
    rows = "".join(f"{n / 10},1000,200\n" for n in range(45))
    trace.write_text("arrival_s,isl,osl\n" + rows, encoding="utf-8")
    scenario.write_text(f"faults = [{faults}]\n", encoding="utf-8")
    ended = twin("replay", trace, "--faults", scenario, "--no-html", "--quiet", "--out", out, *line)
    assert (ended.code, ended.err) == (0, "")
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return report


def test_a_run_that_ends_in_failures_lasts_as_long_as_requests_arrive(twin: Twin, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    roles = (f'[[workers]]\nname = "{role}"\nrole = "{role}"\ncount = 2\n' for role in ("prefill", "decode"))
    config.write_text("".join(roles), encoding="utf-8")
    faults = ", ".join(f'{{at_ms = 1000, kind = "worker_down", worker = "decode-{n}"}}' for n in (0, 1))
    report = _run(twin, tmp_path, faults, "--config", config)
    assert report["counts"]["failed"] + report["counts"]["rejected"] > 30
    assert report["makespan_s"] >= 4.4
    assert all(0.0 <= worker["busy_share"] <= 1.0 for worker in report["workers"])
    prefill, decode = report["groups"]
    assert prefill["gpu_s"] == pytest.approx(prefill["gpus"] * report["makespan_s"])
    assert decode["gpu_s"] == pytest.approx(decode["gpus"] * 1.0), "lost for good at 1 s"


@pytest.mark.parametrize("back", [False, True])
def test_a_worker_that_was_drained_for_good_is_paid_until_its_drain_ended(
    back: bool, twin: Twin, tmp_path: Path
) -> None:
    more = ", for_ms = 500" if back else ""
    fault = f'{{at_ms = 1000, kind = "drain", worker = "pool-0", grace_ms = 0, timeout_ms = 250{more}}}'
    report = _run(twin, tmp_path, fault, "--workers", "2")
    first, second = report["meta"]["workers"]
    assert second["held_until_s"] is None
    span_s = report["makespan_s"]
    if back:
        assert first["held_until_s"] is None
        assert report["gpu_s"] == pytest.approx(span_s * (first["gpus"] + second["gpus"]))
    else:
        assert 1.0 <= first["held_until_s"] <= 1.25
        assert report["gpu_s"] == pytest.approx(first["held_until_s"] * first["gpus"] + span_s * second["gpus"])
