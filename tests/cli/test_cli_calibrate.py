"""`twin calibrate` as a person meets it: a table or a run in, a file and its errors out, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from closed_loop import KNOWN, measured_by, row, write_table


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of eight runs, measured on a cluster of known coefficients."""
    path = tmp_path_factory.mktemp("runs") / "runs.csv"
    rows = [measured_by(row(model=model, tp=tp, users=users, isl=400, osl=24), KNOWN)
            for model, tp in (("llama-3.1-8b", 1), ("llama-3.1-70b", 4)) for users in (1, 2, 8, 24)]  # fmt: skip
    write_table(path, rows)
    return path


def test_a_table_becomes_a_file_that_a_replay_takes(twin, runs: Path, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    ended = twin("calibrate", "--from", "table", runs, "--out", file, "--jobs", "1")
    assert ended.code == 0, ended.err
    assert "8 runs in 2 groups; TPOT 8, TTFT 8; mean over the requests of a run" in ended.out
    assert "configurations not in the fit" in ended.out
    assert f"wrote {file}" in ended.out
    trace = root / "traces" / "azure.parquet"
    line = ["replay", trace, "--limit", "300", "--json", "--no-html", "--set", f"workers.latency.coefficients={file}"]
    report = json.loads(twin(*line).out)
    (latency,) = report["meta"]["latency"]
    assert "vllm-hopper for llama-3.1-70b" in latency["source"]
    assert any("outside the calibrated range" in warning for warning in report["meta"]["warnings"])
    refused = twin(*line, "--strict")
    assert refused.code == 2
    assert "workers pool: strict, and outside the calibrated range" in refused.complaint


def test_check_holds_against_itself_and_misses_where_a_slice_got_worse(twin, runs: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.toml"
    first = twin("calibrate", "--from", "table", runs, "--out", old, "-q")
    assert (first.code, first.err) == (0, "")
    held = twin("calibrate", "--from", "table", runs, "--check", old, "-q")
    assert held.code == 0
    assert "check held: 0 of" in held.out
    text = runs.read_text().splitlines()
    wrong = tmp_path / "wrong.csv"  # two runs disagree: no fit can explain both as well as before
    wrong.write_text("\n".join([*text, *[",".join([*line.split(",")[:-1], "1"]) for line in text[5:]]]) + "\n")
    again = twin("calibrate", "--from", "table", wrong, "--check", old, "-q")
    assert again.code in (0, 3)
    assert ("worse: " in again.out) == (again.code == 3)


def test_steps_of_a_run_give_its_own_step_times_back(twin, root: Path, tmp_path: Path) -> None:
    trace = root / "traces" / "azure.parquet"
    assert twin("replay", trace, "--limit", "400", "--no-html", "--out", tmp_path / "run", "-q").code == 0
    ended = twin("calibrate", "--from", "run", tmp_path / "run", "--out", tmp_path / "own.toml", "-q")
    assert ended.code == 0, ended.err
    overall = next(line.split() for line in ended.out.splitlines() if line.startswith("overall"))
    assert overall[1] == "step"
    assert float(overall[3]) < 1.0  # mean error in percent
    assert "client_s" not in (tmp_path / "own.toml").read_text().split("[vllm-hopper]")[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nothing to fit: give --from table FILE, --from run RUNDIR, or --from live RUNDIR"),
        (["--from", "table", "none.csv", "--out", "o.toml"], "none.csv: cannot be read as a table"),
        (["--from", "guess", "x", "--out", "o.toml"], "--from guess: not a source"),
        (["--from", "run", "none", "--out", "o.toml"], "none: not a whole run folder, without steps.parquet"),
        (["--from", "table", "RUNS"], "nowhere to write: give --out FILE, or --check OLD"),
        (["--from", "table", "RUNS", "--check", "none.toml"], "--check none.toml: there is no such file"),
        (["--from", "table", "RUNS", "--out", "o.toml", "--columns", "ttft=tpot_ms:ms:p99"], "is a p99"),
    ],
)
def test_bad_input_costs_one_line(twin, runs: Path, args: list[str], words: str) -> None:
    ended = twin("calibrate", *[str(runs) if arg == "RUNS" else arg for arg in args], "-q")
    assert ended.code == 2
    assert words in ended.complaint
