"""What it costs to read a trace: CPU seconds and memory per format, in a fresh process each, start-up taken off.

The files are drawn here (synthetic, in the shapes of the recorded ones), so that anybody can repeat it.

    python benchmarks/trace_reading.py [--rows 1000000] [--runs 5] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from measure import alternate, measure, median, peak, show

if TYPE_CHECKING:
    import pyarrow as pa

START_UP = "import traces.load, pyarrow.parquet, json, csv"
READ = (
    "from pathlib import Path; from traces.load import open_trace; "
    "print(sum(batch.num_rows for batch in open_trace(Path({!r}))))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the long parquet file")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draw-into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.draw_into:
        draw(args.draw_into, args.rows, args.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        # Drawn by a process of its own: a reader would inherit the peak memory of a large parent.
        asked = ["--rows", str(args.rows), "--seed", str(args.seed), "--draw-into", folder]
        measure([sys.executable, __file__, *asked])
        files = sorted(Path(folder).iterdir())
        commands = {"start-up": [sys.executable, "-c", START_UP]}
        commands |= {path.name: [sys.executable, "-c", READ.format(str(path))] for path in files}
        costs = alternate(commands, args.runs)
    start_s = median(costs["start-up"])
    table = [
        {
            "file": name,
            "rows": int(found[0].output),
            "cpu_s": round(median(found) - start_s, 3),
            "us_per_row": round((median(found) - start_s) / int(found[0].output) * 1e6, 2),
            "peak_mib": round(peak(found), 1),
        }
        for name, found in costs.items()
        if name != "start-up"
    ]
    show("trace_reading", {"seed": args.seed, "runs": args.runs, "start_up_cpu_s": round(start_s, 3), "table": table})


def draw(folder: Path, rows: int, seed: int) -> None:
    """The same kinds of files as people have, drawn with one seed."""
    from traces.convert import write_table
    from traces.synth import SynthOptions, synthesise

    mooncake = synthesise("mooncake", SynthOptions(seed=seed))
    azure = synthesise("azure", SynthOptions(seed=seed))
    write_table(azure, folder / "azure.parquet")
    write_table(mooncake, folder / "mooncake.parquet")
    write_table(synthesise("azure", SynthOptions(seed=seed, rows=rows)), folder / "azure_long.parquet")
    write_mooncake(mooncake, folder / "mooncake.jsonl")
    write_azure(azure, folder / "azure.csv")


def write_mooncake(table: pa.Table, path: Path) -> None:
    with path.open("w") as file:
        for row in table.to_pylist():
            named = {
                "timestamp": round(row["arrival_s"] * 1000),
                "input_length": row["isl"],
                "output_length": row["osl"],
            }
            file.write(json.dumps({**named, "hash_ids": row["hash_ids"]}) + "\n")


def write_azure(table: pa.Table, path: Path) -> None:
    start = datetime(2024, 1, 1, tzinfo=UTC).replace(tzinfo=None)
    with path.open("w", newline="") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        for row in table.to_pylist():
            moment = (start + timedelta(seconds=row["arrival_s"])).isoformat(" ", "microseconds")
            file.write(f"{moment}0,{row['isl']},{row['osl']}\r\n")


if __name__ == "__main__":
    main()
