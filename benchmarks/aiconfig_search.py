"""CPU seconds of a configuration search: by the closed form alone, and with the finalists simulated.

    python benchmarks/aiconfig_search.py [--case NAME] [--runs N]

Each run is a process of its own, so interpreter and imports are in it. Prints one line per case; judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "defaults": {"gpus": 8},
    "dense-70b": {"model": "llama-3.1-70b", "engines": ("vllm", "sglang", "trtllm"), "isl": 4000, "osl": 1000},
    "moe": {"model": "qwen3-235b-a22b", "engines": ("vllm", "sglang", "trtllm"), "isl": 4000, "osl": 1000, "gpus": 16},
}
"""Searches: llama-3.1-8b on 8 H100, a dense 70B on 8 with three engines and both modes, a large mixture on 16."""
SLA = "p95:ttft<2s, p95:tpot<50ms"


def measured(case: str, *, simulated: bool) -> dict[str, float]:
    """Run one search in this process."""
    from aiconfig.evaluate import Simulation, setting_of
    from aiconfig.request import SearchRequest
    from aiconfig.search import search
    from aiconfig.workload import Workload
    from reports.sla import parse_sla

    values = {"gpus": 8, "isl": 1024, "osl": 256} | CASES[case]
    workload = Workload(isl=values.pop("isl"), osl=values.pop("osl"))
    request = SearchRequest(workload=workload, sla=parse_sla(SLA), **values)
    ask = Simulation(setting_of(request)) if simulated else None
    before_s = time.process_time()
    found = search(request, ask)
    return {
        "search_cpu_s": time.process_time() - before_s,
        "cpu_s": time.process_time(),
        "legal": found.legal,
        "rejected": len(found.rejections),
        "simulated_runs": ask.runs if ask is not None else 0,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _apart(case: str, *, simulated: bool) -> dict[str, float]:
    line = [sys.executable, __file__, "--case", case, "--inside", "simulated" if simulated else "closed"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print a line for each case and level."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", choices=[*CASES], action="append")
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--inside", choices=("closed", "simulated"), help=argparse.SUPPRESS)
    asked = options.parse_args()
    cases = asked.case or [*CASES]
    if asked.inside is not None:
        print(json.dumps(measured(cases[0], simulated=asked.inside == "simulated")))
        return
    print(f"python {sys.version.split()[0]}, load average {os.getloadavg()[0]:.1f}, {asked.runs} runs, limits {SLA}")
    for case in cases:
        for simulated in (False, True):
            runs = [_apart(case, simulated=simulated) for _ in range(asked.runs)]
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            spread = [run["cpu_s"] for run in runs]
            print(
                f"{case:<10} {'simulated' if simulated else 'closed form':<12} {middle['cpu_s']:.2f} CPU s "
                f"({min(spread):.2f} to {max(spread):.2f}), search alone {middle['search_cpu_s']:.2f}, "
                f"{middle['legal']:,.0f} legal, {middle['legal'] / middle['search_cpu_s']:,.0f} candidates a CPU s, "
                f"{middle['simulated_runs']:.0f} simulated runs, {middle['peak_mib']:.0f} MiB"
            )


if __name__ == "__main__":
    main()
