"""A large fleet in one process: many workers, many requests. CPU seconds, peak memory, cost of a request.

Synthetic Azure rows, sped up so that each worker has the load that it has in the bundled trace. The goal is 1,000
workers and a million requests in under 15 minutes of CPU and 4 GiB.

    python benchmarks/replay_fleet.py [--workers 1000] [--rows 1000000] [--router round-robin] [--seed 1]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measure import TWIN, measure, show

WORKERS_OF_THE_BUNDLED_TRACE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--router", default="round-robin")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "azure.parquet"
        measure([*TWIN, "synth", "azure", "--rows", str(args.rows), "--seed", str(args.seed), "-o", str(trace)])
        speedup = args.workers / WORKERS_OF_THE_BUNDLED_TRACE
        options = f"--workers {args.workers} --router {args.router} --speedup {speedup} --no-html --out {folder}/run"
        cost = measure([*TWIN, "replay", str(trace), *options.split()])
    show(
        "replay_fleet",
        {
            "workers": args.workers,
            "rows": args.rows,
            "router": args.router,
            "seed": args.seed,
            "cpu_s": round(cost.cpu_s, 1),
            "us_per_request": round(cost.cpu_s / args.rows * 1e6, 1),
            "peak_mib": round(cost.rss_mib),
            "goal": {"cpu_s": 900, "peak_mib": 4096},
        },
    )


if __name__ == "__main__":
    main()
