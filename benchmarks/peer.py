"""Ours and a compiled simulator on the same work, in turn, in one run: ratios of CPU seconds.

Mooncake conversation slice, 16 workers (and 16 prefill + 16 decode), block 64 x 16384, polynomial latency, both
routers, whole process on both sides (start, imports, reading, replay, report), no HTML, no per-request rows in the
peer. Needs the shared data and the peer's interpreter (shared/bench/README.md; DYNATWIN_PEER_PYTHON). The goal is at
most half; a fifth is what we aim at.

    python benchmarks/peer.py [--runs 5] [--workers 16]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from measure import TWIN, Cost, alternate, median, peak, shared, show

ROUTERS = {"round-robin": "round_robin", "kv": "kv_router"}
LEGS = """
compat = "dynamo-1.6.1"
[disaggregation]
kv_bytes_per_token = 0
[router]
mode = "kv"
"""
LEG = """
[[workers]]
name = "{role}"
role = "{role}"
count = {count}
[workers.engine]
block_size = 64
kv_blocks = 16384
[workers.latency]
model = "polynomial"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=16)
    args = parser.parse_args()
    runner = shared() / "bench" / "peer_replay.py"
    trace = shared() / "traces" / "mooncake" / "conversation_trace.0-45min.jsonl"
    table = {}
    for ours, theirs in ROUTERS.items():
        with tempfile.TemporaryDirectory() as folder:
            replay = f"replay {trace} --workers {args.workers} --router {ours} --block-size 64 --kv-blocks 16384"
            options = f"--latency polynomial --no-html --out {folder}/run --json"
            peer = f"--trace {trace} --workers {args.workers} --router {theirs} --block-size 64 --blocks 16384"
            commands = {
                "ours": [*TWIN, *replay.split(), *options.split()],
                "peer": [sys.executable, str(runner), *peer.split()],
            }
            table[ours] = compare(alternate(commands, args.runs))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "legs.toml"
        config.write_text(LEGS + "".join(LEG.format(role=role, count=args.workers) for role in ("prefill", "decode")))
        peer = f"--trace {trace} --prefill-workers {args.workers} --decode-workers {args.workers} --router kv_router"
        commands = {
            "ours": [*TWIN, *f"replay {trace} --config {config} --no-html --out {folder}/run --json".split()],
            "peer": [sys.executable, str(runner), *f"{peer} --block-size 64 --blocks 16384".split()],
        }
        table["prefill and decode, kv"] = compare(alternate(commands, args.runs))
    show("peer", {"workers": args.workers, "trace": Path(trace).name, "routers": table, "goal": {"ratio": 0.5}})


def compare(costs: dict[str, list[Cost]]) -> dict[str, object]:
    """The ratio of medians and its range, and that both did the same work.

    The peer's runner starts a child and accounts for it alone: its own figure is taken.
    """
    peer = [json.loads(cost.output) for cost in costs["peer"]]
    peer_s = sorted(run["cpu_s"] for run in peer)[len(peer) // 2]
    report = json.loads(costs["ours"][-1].output)
    theirs = peer[-1]["metrics"]
    pairs = [ours.cpu_s / run["cpu_s"] for ours, run in zip(costs["ours"], peer, strict=True)]
    return {
        "ratio": round(median(costs["ours"]) / peer_s, 3),
        "ratio_range": [round(min(pairs), 3), round(max(pairs), 3)],
        "ours": {
            "cpu_s": round(median(costs["ours"]), 3),
            "peak_mib": round(peak(costs["ours"]), 1),
            "completed": report["counts"]["completed"],
            "mean_ttft_ms": round(report["latency"]["ttft_s"]["mean"] * 1e3, 3),
            "hit_rate": round(report["hit_rate"], 4),
        },
        "peer": {
            "cpu_s": round(peer_s, 3),
            "peak_mib": round(max(run["rss_mib"] for run in peer), 1),
            "completed": theirs["completed_requests"],
            "mean_ttft_ms": round(theirs["mean_ttft_ms"], 3),
            "hit_rate": round(theirs["first_admission_prefix_cache_reused_ratio"], 4),
        },
    }


if __name__ == "__main__":
    main()
