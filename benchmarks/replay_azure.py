"""Requests per CPU-second of a whole `twin replay`, on the first rows of a recorded Azure trace.

Counts everything: interpreter, imports, reading, simulating, writing the record, report.json; no HTML. Default cluster
(4 workers, roofline, chunked prefill and prefix cache on). The goal is 5,000 per CPU-second and under 300 MiB.

    python benchmarks/replay_azure.py [--rows 10000] [--runs 5] [--trace FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measure import TWIN, alternate, median, peak, plain, shared, show


def azure() -> Path:
    """The recorded trace."""
    return shared() / "traces" / "azure.parquet"


def command(trace: Path, rows: int, folder: Path) -> list[str]:
    """The replay that is measured; its run goes into `folder`."""
    return [*TWIN, "replay", str(trace), "--limit", str(rows), "--no-html", "--out", str(folder / "run")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    trace = args.trace or azure()
    with tempfile.TemporaryDirectory() as folder:
        costs = alternate({"replay": command(trace, args.rows, Path(folder))}, args.runs)["replay"]
    cpu_s = median(costs)
    show(
        "replay_azure",
        {
            "trace": trace.name,
            "rows": args.rows,
            "cpu_s": round(cpu_s, 3),
            "requests_per_cpu_s": round(args.rows / cpu_s),
            "peak_mib": round(peak(costs), 1),
            "goal": {"requests_per_cpu_s": 5000, "peak_mib": 300},
            "runs": [plain(cost) for cost in costs],
        },
    )


if __name__ == "__main__":
    main()
