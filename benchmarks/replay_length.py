"""How the cost of a replay grows with the length of the trace: 1k, 10k, 100k, 1M synthetic Azure rows.

CPU seconds per request behind the start-up (measured with a one-row trace and taken off) should stay within 20 %, and
memory should be bounded by requests in flight plus columns.

    python benchmarks/replay_length.py [--rows 1000 10000 100000 1000000] [--seed 1]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measure import TWIN, alternate, measure, median, peak, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        longest = Path(folder) / "azure.parquet"
        measure([*TWIN, "synth", "azure", "--rows", str(max(args.rows)), "--seed", str(args.seed), "-o", str(longest)])

        def command(rows: int) -> list[str]:
            return [*TWIN, "replay", str(longest), "--limit", str(rows), "--no-html", "--out", f"{folder}/run"]

        start_s = median(alternate({"start": command(1)}, 5)["start"])
        for rows in args.rows:
            costs = alternate({"run": command(rows)}, 5 if rows <= 10_000 else 1)["run"]
            cpu_s = median(costs)
            table.append(
                {
                    "rows": rows,
                    "cpu_s": round(cpu_s, 3),
                    "us_per_request": round((cpu_s - start_s) / rows * 1e6, 1),
                    "peak_mib": round(peak(costs), 1),
                }
            )
    per_request = [float(row["us_per_request"]) for row in table]
    show(
        "replay_length",
        {
            "seed": args.seed,
            "start_up_cpu_s": round(start_s, 3),
            "table": table,
            "spread": round(max(per_request) / min(per_request) - 1, 3),
            "goal": {"spread": 0.2},
        },
    )


if __name__ == "__main__":
    main()
