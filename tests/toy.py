"""The TOY engine of the acceptance cases: 1 ms per prompt token, 10 ms per decode step, a step is one or the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from reports.report import Report
from twin.config_read import load
from twin.replay import replay

CASES = Path(__file__).parent / "data" / "cases"


@dataclass(frozen=True)
class Run:
    """A finished run: its report, and the columns of its record."""

    folder: Path
    report: Report

    def requests(self, name: str) -> list[Any]:
        return pq.read_table(self.folder / "requests.parquet", columns=[name]).column(name).to_pylist()

    def ms(self, name: str) -> list[float | None]:
        """A column of seconds in ms, to 0.001 ms."""
        return [None if value is None else round(value * 1e3, 3) for value in self.requests(name)]

    def rows(self, table: str) -> list[dict[str, Any]]:
        return pq.read_table(self.folder / f"{table}.parquet").to_pylist()


def run(
    trace: Path,
    out: Path,
    *sets: str,
    flags: dict[str, object] | None = None,
    config_file: Path | None = None,
    **options: Any,
) -> Run:
    """Replay a trace with the given settings, without HTML."""
    config = load(config_file, {"TRACE": str(trace)} | (flags or {}), sets)
    done = replay(config, out=out, html=False, **options)
    assert done.complete
    return Run(done.folder, done.report)


def toy(
    name: str | Path, out: Path, *sets: str, serial: bool = True, workers: int = 1, key_tokens: int = 16, **options: Any
) -> Run:
    """A case input on the TOY engine; `serial`: one request in the engine at a time."""
    trace = name if isinstance(name, Path) else CASES / name
    settings = [
        f"workers.count={workers}",
        "workers.latency.prefill_s_per_token=0.001",
        "workers.latency.decode_s=0.01",
        "workers.engine.chunked_prefill=false",
        "workers.engine.exclusive_prefill=true",
        *(["workers.engine.max_num_seqs=1"] if serial else []),
        *([f"trace.hash_block_tokens={key_tokens}"] if trace.suffix == ".jsonl" else []),
        *sets,
    ]
    return run(trace, out, *settings, flags={"--latency": "fixed"}, **options)
