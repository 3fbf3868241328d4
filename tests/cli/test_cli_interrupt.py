"""Ctrl-C outside the simulation: at an exact moment, the one at which a named file is opened for the n-th time.

An audit hook of the interpreter presses it: a real SIGINT of the process to itself, no sleeping and no guessing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

PRESSING = """
import os, signal, sys
moments = {moments!r}
seen = dict.fromkeys(moments, 0)
def hook(event, args):
    name = os.path.basename(os.fsdecode(args[0])) if event == "open" and isinstance(args[0], (str, bytes)) else ""
    if name in seen:
        seen[name] += 1
        if seen[name] in moments[name]:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this process was started with
from twin.cli import main
sys.argv[0] = "twin"
main()
"""

AT: dict[str, dict[str, list[int]]] = {
    "the record is closed": {"config.toml": [1]},
    "the record is read for the report": {"run.json": [1]},
    "the report is written": {"report.json.part": [1]},
    "the record is read for perfetto": {"run.json": [2]},
    "perfetto is written": {"perfetto.json.part": [1]},
    "the page is made": {"page.css": [1]},
    "the page is written": {"report.html.part": [1]},
}


@dataclass(frozen=True)
class Stopped:
    """How the command ended, and the folder that it left."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    @property
    def state(self) -> str:
        return str(json.loads((self.folder / "run.json").read_text(encoding="utf-8"))["state"])


Press = Callable[..., Stopped]


@pytest.fixture
def press(tmp_path: Path) -> Press:
    """Replays three requests and presses Ctrl-C when files of these names are opened for the given times."""
    trace, folder = tmp_path / "t.csv", tmp_path / "run"
    trace.write_text("arrival_s,isl,osl\n0,100,10\n0.5,200,20\n3,1000,30\n", encoding="utf-8")

    def run(moments: dict[str, list[int]], *options: str) -> Stopped:
        command = [sys.executable, "-c", PRESSING.format(moments=moments), "replay", trace, "--out", folder, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        return Stopped(done.returncode, done.stdout, done.stderr, folder)

    return run


@pytest.mark.parametrize("moment", AT)
def test_ctrl_c_after_the_simulation_keeps_the_record_and_the_report(press: Press, moment: str) -> None:
    stopped = press(AT[moment], "--perfetto")
    assert stopped.code == 130
    assert stopped.err == f"twin: stopped; what was done so far is in {stopped.folder}, marked partial\n"
    assert stopped.state == "partial"
    assert json.loads((stopped.folder / "report.json").read_text(encoding="utf-8"))["counts"]["completed"] == 3
    assert pq.read_table(stopped.folder / "requests.parquet").num_rows == 3
    assert "TTFT" in stopped.out
    assert not [name for name in stopped.files if name.endswith(".part")]
    last = stopped.out.split()[-1]
    assert Path(last).is_file()


def test_what_was_not_made_is_left_out_and_can_be_made_later(press: Press, twin) -> None:
    stopped = press(AT["the page is written"])
    assert "report.html" not in stopped.files
    again = twin("report", stopped.folder)
    assert again.code == 0
    for told in (stopped.out, again.out):
        assert told.split("\n")[0].split()[:4] == ["PARTIAL:", "stopped", "after", "3"]
    assert "PARTIAL" in (stopped.folder / "report.html").read_text(encoding="utf-8")


def test_once_while_closing_and_once_while_reporting_still_keeps_both(press: Press) -> None:
    stopped = press(AT["the record is closed"] | AT["the report is written"])
    assert (stopped.code, stopped.state) == (130, "partial")
    assert {"requests.parquet", "report.json", "run.json"} <= stopped.files
    assert "what was done so far is in" in stopped.err


def test_a_second_ctrl_c_does_not_wait_and_is_told_as_such(press: Press) -> None:
    stopped = press(AT["the record is read for the report"] | AT["the report is written"])
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err == (
        f"twin: stopped; {stopped.folder} has what was written until then and no report, marked partial\n"
    )
    assert stopped.state == "partial"
    assert pq.read_table(stopped.folder / "requests.parquet").num_rows == 3
    assert stopped.files == {
        "requests.parquet", "steps.parquet", "decisions.parquet", "samples.parquet", "config.toml", "run.json"
    }  # fmt: skip


def test_without_ctrl_c_the_hook_changes_nothing(press: Press) -> None:
    done = press({})
    assert (done.code, done.err, done.state) == (0, "", "complete")
