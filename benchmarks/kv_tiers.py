"""What KV routing and KV tiers bring on one recorded trace: latency, hit rate by tier, bytes moved, CPU seconds.

The first 45 minutes of Mooncake's conversation trace on the default cluster, one `twin replay` in a process of its own
for each row and seed; printed as the table of docs/results/kv-tiers.md. Every latency is simulated, nothing is measured
but the CPU seconds.

    python benchmarks/kv_tiers.py [--workers 8] [--seeds 3] [--out runs/kv-tiers]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure import TWIN, circumstances, measure, shared

PRIORS = "--set workers.latency.coefficients=priors"  # as in the published table
HOST = "--set workers.kvbm.cpu_cache_gb=800"
DISK = (
    "--set workers.kvbm.disk_cache_gb=40000 --set workers.kvbm.disk_shared=true "
    "--set workers.kvbm.disk_offload=presence"
)
ROWS = {
    "round robin": "--router round-robin",
    "kv": "--router kv",
    "kv, host": f"--router kv {HOST}",
    "kv, host, shared disk": f"--router kv {HOST} {DISK}",
    "round robin, host, shared disk": f"--router round-robin {HOST} {DISK}",
}
FOUND = "found, %"

Figure = Callable[["Run"], float | None]


class Run(NamedTuple):
    """One replay: its report.json, and what it cost."""

    report: Mapping[str, Any]
    cpu_s: float

    @property
    def reached(self) -> float:
        """The percentage of full prompt blocks found anywhere."""
        return 100 * self.report["hit_bound"]["reached"]

    def found(self, tier: str) -> float | None:
        """The percentage of full prompt blocks found in a tier; without tiers, all that was found is on the device."""
        kvbm = self.report["meta"]["kvbm"]
        if not kvbm:
            return self.reached if tier == "g1" else None
        hits = kvbm["hits"]
        return 100 * hits[tier] / hits["lookups"] if tier == "g1" or tier in kvbm["edges"] else None

    def moved(self, way: str) -> float | None:
        """Terabytes stored in, or loaded from, each tier below the devices, summed."""
        edges = self.report["meta"]["kvbm"].get("edges", {})
        return sum(edge[f"{way}_bytes"] for edge in edges.values()) / 1e12 if edges else None


COLUMNS: dict[str, tuple[Figure, str]] = {
    "TTFT mean, s": (lambda run: run.report["latency"]["ttft_s"]["mean"], "{:.2f}"),
    "p95, s": (lambda run: run.report["latency"]["ttft_s"]["p95"], "{:.2f}"),
    FOUND: (lambda run: run.reached, "{:.1f}"),
    "on device": (lambda run: run.found("g1"), "{:.1f}"),
    "host": (lambda run: run.found("g2"), "{:.1f}"),
    "disk": (lambda run: run.found("g3"), "{:.1f}"),
    "down, TB": (lambda run: run.moved("stored"), "{:.1f}"),
    "up, TB": (lambda run: run.moved("loaded"), "{:.1f}"),
    "CPU, s": (lambda run: run.cpu_s, "{:.0f}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the run folders here, for `twin report` and `twin compare`")
    args = parser.parse_args()
    trace = shared() / "traces" / "mooncake" / "conversation_trace.0-45min.jsonl"
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        table = {
            name: [
                replay(
                    trace, f"--workers {args.workers} --seed {seed} {PRIORS} {options}", folder / f"{slug(name)}-{seed}"
                )
                for seed in range(args.seeds)
            ]
            for name, options in ROWS.items()
        }
    print("\n".join(markdown(table)))
    print(f"\nseeds 0 to {args.seeds - 1}; {json.dumps(circumstances())}")


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def replay(trace: Path, options: str, folder: Path) -> Run:
    cost = measure([*TWIN, "replay", str(trace), *options.split(), "--no-html", "--out", str(folder)])
    return Run(json.loads((folder / "report.json").read_text()), cost.cpu_s)


def markdown(table: Mapping[str, Sequence[Run]]) -> list[str]:
    """A row for each configuration, and one for what no cache of any size could exceed."""
    bounds = {run.report["hit_bound"]["upper_bound"] for runs in table.values() for run in runs}
    (bound,) = bounds  # of the trace alone: neither router nor seed may move it
    rows = [[name, *(cell([figure(run) for run in runs], form) for figure, form in COLUMNS.values())]
            for name, runs in table.items()]  # fmt: skip
    ideal = ["ideal (bound)", *(f"{100 * bound:.2f}" if name == FOUND else "-" for name in COLUMNS)]
    head = ["", *COLUMNS]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows, ideal)]


def cell(values: Sequence[float | None], form: str) -> str:
    """The mean over the seeds and, where they differ as printed, the lowest and the highest."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, mean, high = (form.format(value) for value in (min(known), sum(known) / len(known), max(known)))
    return mean if low == high else f"{mean} ({low}..{high})"


if __name__ == "__main__":
    main()
