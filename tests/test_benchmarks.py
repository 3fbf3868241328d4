"""The benchmarks of the router run, small: they call the code as it is, and print what documents show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def _printed(root: Path, name: str, *options: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(root)}
    env.pop("DYNATWIN_PEER_PYTHON", None)
    command = [sys.executable, str(root / "benchmarks" / name), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_selection_is_measured_by_stage(root: Path) -> None:
    asked = ("--workers", "4", "--requests", "4", "--warm", "8", "--one")
    found = json.loads(_printed(root, "router_selection.py", *asked))["2k"]["block 16"]
    assert found.keys() >= {"hash_ms", "match_ms", "score_ms", "book_ms", "cpu_p50_ms"}
    assert found["mean_cached_tokens"] > 0, "some prompts go on from others"
    assert found["index_blocks"] > 0


def test_the_prefix_index_is_measured(root: Path) -> None:
    found = json.loads(_printed(root, "router_index.py", "--workers", "8", "--blocks", "20000", "--one"))
    assert found["stored_blocks"] == 20_000
    assert found["mean_best_overlap"] > 0


def test_a_decision_of_each_mode_is_measured(root: Path) -> None:
    told = _printed(root, "router_kv.py", "--requests", "50", "--workers", "4", "--blocks", "2000", "--runs", "1")
    first_words = {line.split()[0] for line in told.splitlines()}
    assert first_words >= {"round-robin", "random", "least-loaded", "power-of-two", "kv"}


def test_moves_of_kv_are_measured(root: Path) -> None:
    told = _printed(root, "kv_moves.py", "--blocks", "2", "--mib", "0.01", "--repeats", "1")
    assert told.split()[0] == "plain"


def test_the_frontend_is_measured(root: Path) -> None:
    found = json.loads(_printed(root, "frontend.py", "--requests", "10", "--clients", "2"))
    assert found["streamed tokens"]["events"] > 500
    assert found["requests"]["per_cpu_s"] > 0
    assert (
        found["first token of a stream, 128 words"]["p50_ms"] <= found["first token of a stream, 128 words"]["p99_ms"]
    )


def test_a_shadow_is_measured(root: Path) -> None:
    found = json.loads(_printed(root, "shadow.py", "--requests", "50", "--tokens", "100"))
    assert found["simulated_requests_per_cpu_s"] > 0
    assert found["note_us_per_request"] > 0


def test_the_answers_to_a_planner_are_measured(root: Path) -> None:
    found = json.loads(_printed(root, "lookahead.py", "--rates", "2", "--workers", "2", "--seconds", "30"))
    (one,) = found["runs"]
    assert abs(one["attainment"]["replay"] - one["attainment"]["asked"]) < 0.1
    assert found["question_of_72_runs_64_workers_5_min_cpu_s"] > 0
