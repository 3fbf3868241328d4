"""The benchmark behind docs/accuracy.md, on a small table: its goals, its ranking, its picture."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from closed_loop import KNOWN, measured_by, row, write_table

from twin.calibrate.bands import Metrics
from twin.calibrate.errors import Errors
from twin.calibrate.fitted import Design
from twin.calibrate.pricing import Means
from twin.calibrate.schedules import schedule


@pytest.fixture(scope="module")
def design() -> Design:
    """Two configurations under two loads each."""
    rows = [measured_by(row(tp=tp, users=users, isl=300, osl=16), KNOWN) for tp in (1, 2) for users in (2, 6)]
    return Design(rows, [schedule(one) for one in rows])


@pytest.fixture
def goals(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    return importlib.import_module("accuracy_goals")


def test_a_goal_is_missed_by_what_is_printed(goals: ModuleType) -> None:
    def errors(mean: float, median: float) -> Errors:
        return Errors(rows=9, mape=mean, median=median, bias=0.0, p90=0.3, within=(0.5, 0.8, 1.0), coverage=1.0)

    table = goals.goal_table({"vllm": Metrics(tpot=errors(0.09, 0.0704), ttft=errors(0.21, 0.131)), "h100_sxm": None})
    assert table.splitlines()[2:] == [
        "| vllm | TPOT | 9 / 7 | 9.0 / 7.0 |  |",
        "| vllm | TTFT | 22 / 13 | 21.0 / 13.1 | – / 0.1 |",
    ]


def test_true_times_rank_as_measured_and_turned_ones_do_not(goals: ModuleType, design: Design) -> None:
    right = goals.ranking(design, design.measured)
    assert (len(right.kept), right.pairs, right.tau) == (2, 2, 1.0)
    assert right.kept.tolist() == [1.0, 1.0]
    turned = [2, 3, 0, 1]  # each configuration has the times of the other, four times over for its GPUs
    scale = np.array([0.25, 0.25, 4.0, 4.0])
    wrong = goals.ranking(design, Means(design.measured.ttft[turned] / scale, design.measured.tpot[turned] / scale))
    assert wrong.tau == -1.0
    assert (wrong.kept < 1.0).all()


def test_one_configuration_alone_has_no_rank(goals: ModuleType, design: Design) -> None:
    assert goals.ranking(design.part([True, True, False, False]), design.measured) is None


def test_the_whole_command_prints_goals_and_draws(root: Path, design: Design, tmp_path: Path) -> None:
    write_table(tmp_path / "runs.csv", list(design.rows))
    command = [sys.executable, str(root / "benchmarks" / "accuracy.py"), "--table", str(tmp_path / "runs.csv")]
    command += ["--jobs", "1", "--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| overall, five folds | TPOT | 13 / 9.5 |" in done.stdout
    assert "| ranking under the same load, 2 sets, 2 pairs | goal | reached |" in done.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
