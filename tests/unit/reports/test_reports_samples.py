"""Samples at whole seconds: which step they show, and how they are thinned."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from builders_reports import request_row, step_row

from reports.record import GIVEN_COLUMNS, RunRecord, RunWriter
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


def test_waiting_is_counted_from_the_requests_by_the_worker_that_computes_the_prompt(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    rows = []
    for row in range(400):
        dispatch_s, wait_s = float(draw.integers(0, 60)) / 4, float(draw.integers(0, 24)) / 4
        prefill = int(draw.integers(0, 3)) if draw.random() < 0.3 else None
        rows.append(
            request_row(
                row, worker_id=int(draw.integers(0, 3)), prefill_worker_id=prefill, dispatch_s=dispatch_s,
                admit_s=dispatch_s + wait_s if draw.random() < 0.9 else None,
            )
        )  # fmt: skip
    rows.append(request_row(400, "rejected", worker_id=None, dispatch_s=None, admit_s=None))
    writer = RunWriter(tmp_path)
    writer.requests.update({row[0]: row for row in rows})
    writer.steps.extend(step_row(worker, 0.0, 20.0) for worker in range(3))
    writer.close()
    columns = RunRecord(tmp_path).samples
    place = {name: GIVEN_COLUMNS.index(name) for name in GIVEN_COLUMNS}

    def waits(row: tuple[object, ...], worker: int, at_s: float) -> bool:
        prefill, decode = row[place["prefill_worker_id"]], row[place["worker_id"]]
        dispatch_s, admit_s = row[place["dispatch_s"]], row[place["admit_s"]]
        mine = (decode if prefill is None else prefill) == worker
        return mine and admit_s is not None and dispatch_s <= at_s < admit_s  # type: ignore[operator,return-value]

    told = zip(columns.ints("worker_id"), columns.floats("at_s"), columns.ints("waiting"), strict=True)
    found = [(int(worker), float(at_s), int(count)) for worker, at_s, count in told]
    assert len(found) == 60
    assert found == [(w, t, sum(waits(row, w, t) for row in rows)) for w, t, _ in found]
    assert max(count for _, _, count in found) > 5
