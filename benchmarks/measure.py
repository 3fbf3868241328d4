"""CPU seconds and peak memory of a whole command, as the operating system counts them.

CPU time, not wall time: machines are shared. Nothing here judges; the benchmarks print figures and ratios.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

TWIN = [sys.executable, "-m", "twin.cli"]


@dataclass(frozen=True, slots=True)
class Cost:
    """One command, run to its end: CPU seconds (user + system) and peak resident memory in MiB."""

    cpu_s: float
    rss_mib: float
    output: str


def measure(command: list[str], folder: Path | None = None) -> Cost:
    """Run a command (in `folder`) and account for it alone; its failure ends the benchmark."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as installed
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode not in (0, 3):  # 3: an SLA was missed
            sys.exit(f"exit {process.returncode}: {shlex.join(command)}\n{err.read().decode()[-2000:]}")
        return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, out.read().decode())


def alternate(
    commands: dict[str, list[str]], runs: int, folders: Mapping[str, Path] = MappingProxyType({})
) -> dict[str, list[Cost]]:
    """Run the commands in turn, `runs` times each, so that a machine that slows down slows all of them.

    `folders`: where a command runs, if not here.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for i in range(runs):
        names = list(commands) if i % 2 == 0 else list(reversed(commands))
        for name in names:
            costs[name].append(measure(commands[name], folders.get(name)))
    return costs


def median(costs: list[Cost]) -> float:
    return statistics.median(cost.cpu_s for cost in costs)


def peak(costs: list[Cost]) -> float:
    return max(cost.rss_mib for cost in costs)


def circumstances() -> dict[str, object]:
    """What a figure must carry: when, where, with what."""
    return {
        "date": date.today().isoformat(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": {name: version(name) for name in ("dynatwin", "simpy", "numpy", "pyarrow")},
    }


def show(title: str, figures: dict[str, object]) -> None:
    """Print one JSON object, figures first."""
    print(json.dumps({"benchmark": title, **figures, "circumstances": circumstances()}, indent=1))


def shared() -> Path:
    """The folder of reference data; the benchmarks that need it say so and stop."""
    folder = Path(os.environ.get("DYNATWIN_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not folder.is_dir():
        sys.exit(f"needs the shared reference data, and {folder} is not there (set DYNATWIN_SHARED to its folder)")
    return folder


def plain(cost: Cost) -> dict[str, object]:
    """A cost without the output."""
    return {k: round(v, 3) for k, v in asdict(cost).items() if k != "output"}
