"""Mode thunder in the simulated world: programs keep their KV where others lose it, leaping or not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from toy import Run

from twin.config_read import load
from twin.replay import replay

TOML = """
[[workers]]
count = 2
[workers.engine]
kv_blocks = 400
[workers.latency]
model = "fixed"
prefill_s_per_token = 0.0004
decode_s = 0.01
[router]
mode = "{mode}"
"""
PROGRAMS, TURNS = 24, 6


def agents(path: Path, sessions: bool = True) -> Path:
    """Programs of six turns; each turn goes on with the prompt before it by 10 blocks, after 1 to 3 s of tools."""
    lines = []
    for program in range(PROGRAMS):
        for turn in range(TURNS):
            blocks = 10 * (turn + 1)
            row: dict[str, object] = {"input_length": 16 * blocks, "output_length": 10 + (program + turn) % 7}
            row["hash_ids"] = [1000 * program + k for k in range(blocks)]
            row |= {"delay_ms": 1000 + 500 * ((program * turn) % 5)} if turn else {"timestamp": 300 * program}
            lines.append(
                json.dumps(row | ({"session_id": f"p{program}"} if sessions else {"timestamp": 300 * program}))
            )
    file = path / "agents.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def run(tmp_path: Path, mode: str, name: str, *, leap: bool = True, sessions: bool = True) -> Run:
    file = tmp_path / "c.toml"
    file.write_text(TOML.format(mode=mode))
    flags: dict[str, object] = {"TRACE": str(agents(tmp_path, sessions)), "--hash-block-tokens": 16}
    done = replay(load(file, flags), out=tmp_path / name, html=False, leap=leap)
    return Run(done.folder, done.report)


def test_leaping_changes_nothing_for_programs(tmp_path: Path) -> None:
    leapt, stepped = (run(tmp_path, "thunder", f"r{leap}", leap=leap) for leap in (True, False))
    for name in ("status", "worker_id", "dispatch_s", "admit_s", "first_token_s", "last_token_s"):
        assert leapt.requests(name) == stepped.requests(name), name
    rules = Counter(row["rule"] for row in leapt.rows("decisions"))
    assert rules["queue"] >= 5
    assert rules["program"] > 60
    assert Counter(leapt.requests("status")) == {"completed": PROGRAMS * TURNS}


def test_programs_find_their_kv_where_others_lose_it(tmp_path: Path) -> None:
    """A program brings 10 + ... + 60 blocks, of which it has computed 10 + ... + 50 before: the bound is 150 of 210."""
    runs = {mode: run(tmp_path, mode, mode).report for mode in ("round-robin", "kv", "thunder")}
    reached = {mode: report.hit_rate or 0.0 for mode, report in runs.items()}
    assert runs["thunder"].hit_bound is not None
    assert runs["thunder"].hit_bound.upper_bound == pytest.approx(150 / 210)
    assert reached["round-robin"] < 0.3 < reached["kv"] < 0.45 < 0.6 < reached["thunder"]


def test_without_sessions_it_says_that_it_only_balances(tmp_path: Path) -> None:
    done = run(tmp_path, "thunder", "plain", sessions=False)
    assert [text for text in done.report.meta.warnings if "thunder" in text] == [
        "mode thunder: no row of the trace belongs to a session, so it only balances the pools"
    ]
