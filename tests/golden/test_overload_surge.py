"""Three times the demand for a minute, with limits on: what is shed and why; soon after, all is as it was before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from twin.config_read import load
from twin.replay import replay

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "docs" / "scenarios"
SURGE_S = (20.0, 80.0)
RECOVERED_S = 20.0


@pytest.fixture(scope="module")
def surged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("overload"), {"--faults": str(SCENARIOS / "overload.toml")})


def run(folder: Path, more: dict[str, object]) -> Path:
    given: dict[str, object] = {"TRACE": str(ROOT / "traces" / "azure.parquet"), "--limit": 2200}
    config = load(SCENARIOS / "configs" / "overload.toml", given | more)
    done = replay(config, out=folder / "run", html=False, journal=True)
    assert done.missed == ()
    return done.folder


def columns(run: Path, *names: str) -> list[np.ndarray]:
    table = pq.read_table(run / "requests.parquet", columns=list(names))
    return [np.array(table.column(name).to_pylist(), dtype=object) for name in names]


def test_what_is_shed_says_why_and_when_to_come_again(surged: Path) -> None:
    arrival, status, reason, again, output = columns(
        surged, "arrival_s", "status", "reason", "retry_after_s", "output_tokens"
    )
    shed = status == "rejected"
    assert {text.split(":")[0] for text in reason[shed]} == {"all_busy", "engine_limit", "queue_limit"}
    assert all(SURGE_S[0] < at_s < SURGE_S[1] + RECOVERED_S for at_s in arrival[shed])
    assert all(1 <= seconds <= 60 and seconds == int(seconds) for seconds in again[shed])
    assert all(seconds is None for seconds in again[~shed])
    assert not any(output[shed])


def test_who_is_let_in_is_answered_in_time(surged: Path) -> None:
    status, ttft = columns(surged, "status", "ttft_s")
    assert set(status) == {"completed", "rejected"}
    assert max(ttft[status == "completed"]) < 2


def test_twenty_seconds_after_the_surge_all_is_as_without_it(surged: Path, tmp_path: Path) -> None:
    """The same rows, in a run without the surge: they come later there, and wait as long."""
    arrival, ttft = columns(surged, "arrival_s", "ttft_s")
    _, calm = columns(run(tmp_path, {}), "arrival_s", "ttft_s")
    after = arrival.astype(float) > SURGE_S[1] + RECOVERED_S
    ttft, calm = ttft[after].astype(float), calm[after].astype(float)
    both = ~np.isnan(ttft) & ~np.isnan(calm)  # a burst of the trace itself is shed in either run
    ttft, calm = ttft[both], calm[both]
    assert len(ttft) > 300
    assert np.percentile(ttft, 95) == pytest.approx(np.percentile(calm, 95), rel=0.05)
    assert np.median(np.abs(ttft - calm)) < 0.02


def test_the_report_counts_each_reason_and_when_clients_were_told_to_come(surged: Path) -> None:
    ends = json.loads((surged / "report.json").read_text(encoding="utf-8"))["ends"]
    assert {end["code"] for end in ends} == {"all_busy", "engine_limit", "queue_limit"}
    assert all(1 <= end["retry_after_mean_s"] <= 60 for end in ends)
    lines = (surged / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    rejects = [action for line in lines[1:] for action in json.loads(line)["actions"] if action["type"] == "Reject"]
    assert len(rejects) == sum(end["requests"] for end in ends)
    assert all(action["retry_after_s"] >= 1 for action in rejects)
