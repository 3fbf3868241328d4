"""Samples at whole seconds: which step they show, and how they are thinned."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from builders_reports import step_row

from reports.record import RunRecord, RunWriter
from reports.samples import MAX_SAMPLES


def samples(folder: Path, *steps: tuple[object, ...]) -> list[tuple[float, int, int]]:
    """(second, worker, running) of each sample."""
    writer = RunWriter(folder)
    writer.steps.extend(steps)  # type: ignore[arg-type]
    writer.close()
    columns = RunRecord(folder).samples
    named = (columns.floats("at_s"), columns.ints("worker_id"), columns.ints("running"))
    return [(float(at), int(worker), int(running)) for at, worker, running in zip(*named, strict=True)]


def test_a_sample_is_the_step_that_covers_the_second(tmp_path: Path) -> None:
    steps = [step_row(0, 0.0, 0.4, running=1), step_row(0, 0.4, 1.0, running=2), step_row(0, 1.0, 2.5, running=3)]
    assert samples(tmp_path, *steps) == [(0.0, 0, 1), (1.0, 0, 3), (2.0, 0, 3)]


def test_an_idle_worker_has_no_sample_and_a_gap_row_is_no_step(tmp_path: Path) -> None:
    steps = [step_row(0, 0.0, 1.5), step_row(1, 3.5, 4.5), step_row(0, 1.5, 3.5, kind="gap")]
    assert samples(tmp_path, *steps) == [(0.0, 0, 1), (1.0, 0, 1), (4.0, 1, 1)]


def test_samples_are_ordered_by_second_and_worker(tmp_path: Path) -> None:
    steps = [step_row(1, 0.0, 2.5), step_row(0, 0.0, 2.5)]
    assert [sample[:2] for sample in samples(tmp_path, *steps)] == [(float(s), w) for s in range(3) for w in (0, 1)]


@pytest.mark.parametrize("length_s", [9_999.5, 10_000.5, 50_000.0, 5e8])
def test_long_runs_are_thinned_by_a_whole_stride(tmp_path: Path, length_s: float) -> None:
    at_s = np.array([sample[0] for sample in samples(tmp_path, step_row(0, 0.0, length_s))])
    strides = set(np.diff(at_s).tolist())
    assert len(strides) == 1
    assert strides.pop() == int(at_s[1])
    assert MAX_SAMPLES / 2 - 1 <= len(at_s) <= MAX_SAMPLES


def test_thinning_does_not_depend_on_how_steps_are_cut(tmp_path: Path) -> None:
    edges = np.linspace(0.0, 45_000.0, 3_001)
    pieces = [step_row(0, float(a), float(b)) for a, b in pairwise(edges)]
    assert samples(tmp_path / "cut", *pieces) == samples(tmp_path / "whole", step_row(0, 0.0, 45_000.0))
