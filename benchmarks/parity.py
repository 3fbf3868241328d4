"""The largest difference of any time stamp in every reference run, as docs/parity.md shows them.

Arrival, admission, first and last token, and the stages of hand-offs, relative to the peer's (at least 1 ms). The tests
hold each at 1e-6; this prints what they are. Needs the shared reference data.

    python benchmarks/parity.py
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import shared

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "golden")]

import test_parity  # noqa: E402
import test_parity_legs  # noqa: E402
import test_parity_sglang  # noqa: E402
import test_parity_trtllm  # noqa: E402

STAMPS: dict[str, Callable[[Any], float | None]] = {
    "arrival_ms": lambda r: r.arrival_s,
    "admit_ms": lambda r: r.admitted.admit_s if r.admitted is not None else None,
    "first_token_ms": lambda r: r.first_s,
    "last_token_ms": lambda r: r.last_s,
    "source_held_ms": lambda r: r.handoff.held_s,
    "dest_reserved_ms": lambda r: r.handoff.reserved_s,
    "dest_activated_ms": lambda r: r.handoff.activated_s,
    "decode_admit_ms": lambda r: r.sequence.admit_s,
    "source_released_ms": lambda r: r.handoff.released_s,
}


def outcome(name: str, folder: Path, data: Path) -> dict[int, Any]:
    """The run, simulated as its test does it."""
    run, trace = test_parity.load_run(data, name)
    if name.startswith("disagg"):
        return test_parity_legs.simulate(test_parity_legs.legs_config(run, trace, folder))
    if "sglang" in name:
        return test_parity.simulate(test_parity_sglang.config_of(run, trace))
    if "trtllm" in name:
        return test_parity.simulate(test_parity_trtllm.config_of(run, trace))
    return test_parity.simulate(test_parity.peer_config(run, trace))


def largest(name: str, folder: Path, data: Path) -> tuple[int, float]:
    """Rows compared, and the largest relative difference among their stamps."""
    ended = outcome(name, folder, data)
    worst, rows = 0.0, 0
    with (data / "parity" / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            rows += 1
            request, _ = ended[int(row["line"])]
            for column, of in STAMPS.items():
                if row.get(column):
                    theirs, ours = float(row[column]), of(request)
                    worst = max(worst, abs(ours * 1e3 - theirs) / max(1.0, theirs)) if ours is not None else 1.0
    return rows, worst


def main() -> None:
    data = shared()
    names = sorted(p.stem for p in (data / "parity").glob("*.csv"))
    with tempfile.TemporaryDirectory() as folder:
        table = {name: largest(name, Path(folder), data) for name in names}
    print(
        json.dumps({name: {"rows": rows, "largest": f"{worst:.1e}"} for name, (rows, worst) in table.items()}, indent=1)
    )


if __name__ == "__main__":
    main()
