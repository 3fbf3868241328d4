"""`twin sweep` from the outside: the same points come to the same bytes, what is done is kept, what fails is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reports.report import Report
from twin.commands.replay_line import OPTIONS
from twin.commands.sweep import OF_ONE_RUN, SWEEP_OPTIONS

pytestmark = pytest.mark.long

ROWS = "arrival_s,isl,osl\n" + "".join(f"{at / 20},{100 + 37 * at % 900},{5 + at % 30}\n" for at in range(60))
GRID = ("--vary", "workers.count=1,2", "--vary", "router.mode=round-robin,random")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(ROWS, encoding="utf-8")
    return path


def stamps(folder: Path) -> dict[str, int]:
    """When the record of each run was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("points/*/requests.parquet")}


def test_a_sweep_is_the_same_to_the_byte_however_many_processes_make_it(twin, trace: Path, tmp_path: Path) -> None:
    for jobs in ("1", "3"):
        ended = twin("sweep", trace, *GRID, "--seeds", "2", "--jobs", jobs, "--out", tmp_path / jobs)
        assert (ended.code, ended.err) == (0, "")
    for name in ("report.json", "sweep.csv", "sweep.parquet", "sweep.html"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes(), name
    report = json.loads((tmp_path / "1" / "report.json").read_text())
    assert [point["values"] for point in report["points"]] == [
        [1, "round-robin"], [1, "random"], [2, "round-robin"], [2, "random"]
    ]  # fmt: skip
    assert [run["seed"] for run in report["points"][0]["runs"]] == [0, 1]


def test_a_point_is_an_ordinary_run(twin, trace: Path, tmp_path: Path) -> None:
    assert twin("sweep", trace, *GRID, "--out", tmp_path / "s", "--no-html").code == 0
    flags = ("--workers", "2", "--router", "random", "--out", tmp_path / "one", "--no-html")
    assert twin("replay", trace, *flags).code == 0
    sweep = json.loads((tmp_path / "s" / "report.json").read_text())
    point = next(point for point in sweep["points"] if point["values"] == [2, "random"])
    (run,) = point["runs"]
    alone, swept = Report.load(tmp_path / "one"), Report.load(tmp_path / "s" / run["folder"])
    assert alone.latency == swept.latency
    assert run["figures"]["ttft_p95"] == alone.latency.ttft_s.p95
    assert not (tmp_path / "s" / "sweep.html").exists()


def test_what_is_done_is_kept_and_what_is_new_is_added(twin, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    assert "4 runs in" in twin("sweep", trace, *GRID, "--out", out).out
    first, report = stamps(out), (out / "report.json").read_bytes()
    assert "0 runs in" in twin("sweep", trace, *GRID, "--out", out).out
    assert stamps(out) == first
    assert (out / "report.json").read_bytes() == report
    broken = next(iter(sorted(first)))
    (out / "points" / broken / "report.json").unlink()  # as if that run had been stopped
    assert "1 runs in" in twin("sweep", trace, *GRID, "--out", out).out
    assert (out / "report.json").read_bytes() == report
    grown = twin("sweep", trace, "--vary", "workers.count=1,2,3", *GRID[2:], "--out", out)
    assert "2 runs in" in grown.out
    assert stamps(out).items() >= {name: at for name, at in first.items() if name != broken}.items()
    assert "6 runs in" in twin("sweep", trace, "--vary", "workers.count=1,2,3", *GRID[2:], "--out", out, "--fresh").out


def test_a_run_that_fails_is_named_and_the_others_are_there(twin, tmp_path: Path) -> None:
    trace = tmp_path / "bad.csv"
    trace.write_text(ROWS + "1,10,10\n", encoding="utf-8")  # the last arrival goes back: found when it is read
    flags = ("--vary", "trace.sort=true,false", "--metric", "ttft_mean", "--out", tmp_path / "s")
    ended = twin("sweep", trace, *flags)
    assert ended.code == 3
    assert ended.err == "twin: 1 of 2 runs failed; the report says why\n"
    assert "failed  sort=false:" in ended.out
    report = json.loads((tmp_path / "s" / "report.json").read_text())
    assert [run["status"] for point in report["points"] for run in point["runs"]] == ["done", "failed"]
    assert "arrival" in report["points"][1]["runs"][0]["error"]
    again = twin("sweep", trace, *flags)
    assert "1 runs in" in again.out  # the one that failed is tried again
    assert again.code == 3


def test_an_unknown_key_is_one_line_and_nothing_is_written(twin, trace: Path, tmp_path: Path) -> None:
    ended = twin("sweep", trace, "--vary", "router.router_temprature=0,0.5", "--out", tmp_path / "s")
    assert ended.code == 2
    assert "did you mean router_temperature" in ended.complaint
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--vary", "workers.count=1,2", "--seeds", "0"), "--seeds 0: must be a whole number, 1 or more"),
        (("--vary", "workers.count=1,2", "--jobs", "two"), "--jobs two: must be a whole number"),
        (("--vary", "workers.count=1,2", "--metric", "speed"), "--metric speed: there is no such figure"),
        (("--list", "none.csv"), "none.csv: cannot be read"),
        ((), "nothing to vary"),
    ],
)
def test_a_bad_line_costs_one_line(twin, trace: Path, flags: tuple[str, ...], words: str) -> None:
    ended = twin("sweep", trace, *flags)
    assert ended.code == 2
    assert words in ended.complaint


def test_a_folder_with_other_files_is_left_alone(twin, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    ended = twin("sweep", trace, *GRID, "--out", out)
    assert ended.code == 2
    assert "has files and no sweep" in ended.complaint
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_key_without_effect_is_told(twin, trace: Path, tmp_path: Path) -> None:
    flags = ("--vary", "workers.engine.max_num_seqs=200,256", "--vary", "workers.count=1,2", "--out", tmp_path / "s")
    out = twin("sweep", trace, *flags, "--metric", "ttft_p95").out
    assert "no effect: workers.engine.max_num_seqs changed no figure of any run" in out
    assert "no effect: workers.count" not in out


def test_json_is_the_report_and_nothing_else(twin, trace: Path, tmp_path: Path) -> None:
    ended = twin("sweep", trace, *GRID, "--out", tmp_path / "s", "--json")
    assert ended.out == (tmp_path / "s" / "report.json").read_text()


STOPPED_AFTER_THE_FIRST = """
import os, signal, sys
def hook(event, args):
    if event == "open" and isinstance(args[0], str) and os.path.basename(args[0]) == "sweep.csv.part":
        global pressed
        if not pressed:
            pressed = True
            os.kill(os.getpid(), signal.SIGINT)
pressed = False
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.addaudithook(hook)
    import twin.sweep
    twin.sweep.CSV_EVERY_S = 0.0  # the table is written after every run
    from twin.cli import main
    sys.argv[0] = "twin"
    main()
"""


def test_ctrl_c_keeps_what_is_over_and_the_same_line_goes_on(twin, trace: Path, tmp_path: Path, root: Path) -> None:
    script, out = tmp_path / "stopped.py", tmp_path / "s"
    script.write_text(STOPPED_AFTER_THE_FIRST, encoding="utf-8")
    line = ["sweep", str(trace), *GRID, "--jobs", "1", "--out", str(out)]
    command = [sys.executable, str(script), *line]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr == f"twin: stopped with 3 runs to go; the same line goes on with what is in {out}\n"
    report = json.loads((out / "report.json").read_text())
    assert [point["runs"][0]["status"] for point in report["points"]] == ["done", "open", "open", "open"]
    assert "PARTIAL" in (out / "sweep.html").read_text()
    assert "3 runs in" in twin(*line).out
    assert twin("sweep", trace, *GRID, "--jobs", "1", "--out", tmp_path / "whole").code == 0
    assert (out / "report.json").read_bytes() == (tmp_path / "whole" / "report.json").read_bytes()


def test_a_sweep_takes_every_option_of_a_replay_but_those_of_one_run() -> None:
    names = {option.flag for option in SWEEP_OPTIONS}
    assert {option.flag for option in OPTIONS} - names == {"--name", "--journal", "--perfetto", "--show-config"}
    assert set(OF_ONE_RUN) <= {option.flag for option in OPTIONS}
