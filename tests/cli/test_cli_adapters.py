"""Groups of workers with different adapters, models and GPUs in one run: who gets what, and what the report says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import Twin

from policies.cluster.events import WorkerUp
from policies.cluster.invariants import Invariants
from policies.cluster.journal import decode

CONFIG = """
[router]
mode = "{mode}"
[[workers]]
name = "chat"
count = 2
loras = ["a"]
[[workers]]
name = "code"
gpu = "h200_sxm"
tp = 2
count = 1
loras = ["a", "b"]
[[workers]]
name = "plain"
count = 1
loras = []
"""

LEGS = """
[router]
mode = "{mode}"
[disaggregation]
order = "{order}"
[[workers]]
name = "p"
role = "prefill"
count = 2
loras = ["a"]
[[workers]]
name = "q"
role = "prefill"
count = 1
loras = ["b"]
[[workers]]
name = "d"
role = "decode"
count = 1
loras = ["a", "c"]
[[workers]]
name = "e"
role = "decode"
count = 1
loras = ["b"]
"""

FAULTS = """
version = 1
migration_limit = 2
faults = [
  {at_ms = 1500, kind = "worker_down", worker = "chat-0"},
  {at_ms = 3000, kind = "worker_down", worker = "code-0", for_ms = 500},
]
expect = [{metric = "migrations", ge = 2}, {invariants = "all"}]
"""

ASKED: list[str | None] = [None, "a", "b", "x", ""]


def written(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def adapters_trace(folder: Path, asked: Sequence[str | None] = ASKED, *, output_length: int = 5) -> Path:
    rows = [
        {
            "timestamp": 50 * n,
            "input_length": 500,
            "output_length": output_length,
            "hash_ids": [n % 3],
            "lora": asked[n % len(asked)],
        }
        for n in range(100)
    ]
    return written(folder, "".join(json.dumps(row) + "\n" for row in rows), "adapters.jsonl")


def replayed(twin: Twin, folder: Path, config: str) -> tuple[str, list[dict[str, Any]]]:
    file = written(folder, config, "c.toml")
    line = ["replay", adapters_trace(folder), "--config", file, "--set", "trace.hash_block_tokens=512", "--no-html"]
    ended = twin(*line, "--out", folder / "run", "--journal")
    assert ended.code == 0, ended.err
    rows = pq.read_table(folder / "run" / "requests.parquet").to_pylist()
    return ended.out, rows


def watched(folder: Path) -> list[WorkerUp]:
    """The journal of the run through the invariants; the workers that came up."""
    rules, ups = Invariants(), []
    with (folder / "run" / "journal.jsonl").open(encoding="utf-8") as lines:
        for entry in decode(lines):
            rules.observe(entry.event, entry.actions)
            if isinstance(entry.event, WorkerUp):
                ups.append(entry.event)
    rules.finish()
    return ups


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded", "power-of-two", "kv"])
def test_requests_go_where_their_adapter_is_served(twin: Twin, mode: str, tmp_path: Path) -> None:
    out, rows = replayed(twin, tmp_path, CONFIG.format(mode=mode))
    where: dict[str | None, set[object]] = {}
    for row in rows:
        where.setdefault(ASKED[row["row"] % 5], set()).add(row["worker_id"])
    assert where["a"] <= {0, 1, 2}
    assert where["b"] == {2}
    assert where["x"] == {None}
    if mode in ("round-robin", "random"):
        assert where[None] | where[""] == {0, 1, 2, 3}
    reasons = {row["reason"] for row in rows if row["status"] == "rejected"}
    assert reasons == {"unknown_lora: no worker serves adapter 'x'; there are a, b"}
    assert "requests whose adapter no worker served then: 20, rejected (unknown_lora)" in out
    assert [up.loras for up in watched(tmp_path)] == [("a",), ("a",), ("a", "b"), ()]


@pytest.mark.parametrize("order", ["prefill-first", "decode-first"])
@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_both_legs_go_where_the_adapter_is_served(twin: Twin, mode: str, order: str, tmp_path: Path) -> None:
    asked: list[str | None] = ["a", "b", "c", None]
    file = written(tmp_path, LEGS.format(mode=mode, order=order), "c.toml")
    line = ["replay", adapters_trace(tmp_path, asked), "--config", file, "--set", "trace.hash_block_tokens=512"]
    ended = twin(*line, "--no-html", "--journal", "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    rows = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    assert {row["status"] for row in rows} == {"completed"}
    legs = {(asked[row["row"] % 4], row["prefill_worker_id"], row["worker_id"]) for row in rows}
    assert {(lora, *where) for lora, *where in legs if lora is not None} == {
        ("a", 0, 3), ("a", 1, 3), ("b", 2, 4), ("c", None, 3),
    }  # fmt: skip
    watched(tmp_path)
    assert twin(*line, "--no-html", "--no-leap", "--out", tmp_path / "stepped").code == 0
    assert pq.read_table(tmp_path / "stepped" / "requests.parquet").to_pylist() == rows


def test_requests_that_are_sent_again_stay_where_their_adapter_is_served(twin: Twin, tmp_path: Path) -> None:
    trace = adapters_trace(tmp_path, ["a", "b"], output_length=200)
    file, faults = written(tmp_path, CONFIG.format(mode="least-loaded"), "c.toml"), written(tmp_path, FAULTS, "f.toml")
    line = ["replay", trace, "--config", file, "--faults", faults, "--no-html"]
    ended = twin(*line, "--out", tmp_path / "run", "--journal")
    assert ended.code == 0, ended.err
    rows = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    moved = [row for row in rows if row["migrations"]]
    assert {row["worker_id"] for row in moved if row["row"] % 2 == 0 and row["status"] == "completed"} <= {1, 2}
    only = [row for row in moved if row["row"] % 2]  # adapter b: nobody else has it, and code-0 is gone
    assert {(row["status"], row["reason"]) for row in only} == {
        ("failed", "unknown_lora: no worker serves adapter 'b'; there are a")
    }
    after = [row for row in rows if row["row"] % 2 and row["arrival_s"] > 3.5]
    assert {(row["status"], row["worker_id"]) for row in after} == {("completed", 2)}
    watched(tmp_path)


def test_adapters_without_a_request_for_them_only_take_memory(twin: Twin, tmp_path: Path) -> None:
    trace = written(tmp_path, "arrival_s,isl,osl\n0,100,10\n")
    told = "no row of the trace asks for an adapter; they only take memory"
    assert told in twin("replay", trace, "--set", "workers.loras=a").out
    assert told not in twin("replay", trace, "--set", "workers.loras=").out


def test_groups_with_different_models_are_pointed_out(twin: Twin, tmp_path: Path) -> None:
    trace = written(tmp_path, "arrival_s,isl,osl\n0,100,10\n1,100,10\n")
    models = '[[workers]]\nname = "l"\n[[workers]]\nname = "s"\nmodel = "llama-3.1-8b"\ntp = 1\n'
    assert twin("replay", trace, "--config", written(tmp_path, models, "c.toml"), "--out", tmp_path / "run").code == 0
    (warning,) = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["meta"]["warnings"]
    assert warning == (
        "groups serve different models (llama-3.1-70b, llama-3.1-8b), and no trace names a model: every request may go "
        "to every group"
    )
    assert "different models" not in twin("replay", trace).out
