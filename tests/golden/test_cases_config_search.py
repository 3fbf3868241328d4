"""Acceptance case C24: "nothing meets it" is an answer, names the nearest, and is told by the exit code."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from aiconfig_builders import agg, estimated

from aiconfig.candidate import Candidate
from aiconfig.estimate import MEASURED, Estimate
from aiconfig.outcome import FOUND, NOT_FOUND
from aiconfig.verdicts import Ranked, rank_measured
from reports.sla import parse_sla

pytestmark = pytest.mark.shared


def measured(shared: Path) -> dict[str, Estimate]:
    """The candidates of the case by name; each figure stands for the statistic that a limit asks for."""
    with (shared / "cases/inputs/c24_candidates.csv").open(encoding="utf-8") as file:
        return {row["name"]: _estimate(row) for row in csv.DictReader(file)}


def _estimate(row: dict[str, str]) -> Estimate:
    candidate: Candidate = agg(tp=int(row["tp"]), replicas=int(row["replicas"]))
    assert candidate.gpus == int(row["gpus"])
    return estimated(
        candidate,
        level=MEASURED,
        ttft={"p95": float(row["ttft_ms"]) / 1e3},
        itl={"p95": float(row["itl_ms"]) / 1e3},
        output_tokens_per_s=float(row["output_tok_s"]),
    )


@pytest.mark.parametrize(
    ("sla", "exit_code", "first", "distances"),
    [
        ("ttft=200ms,itl=50ms", NOT_FOUND, "C", {"A": 0.25, "B": 0.5, "C": 0.1}),
        ("ttft=230ms,itl=30ms", NOT_FOUND, "A", {"A": 20 / 230, "B": 70 / 230, "C": 1 / 3}),
        ("ttft=250ms,itl=20ms", FOUND, "A", {"A": 0.0, "B": 0.2, "C": 1.0}),
    ],
)
def test_c24(sla: str, exit_code: int, first: str, distances: dict[str, float], shared: Path) -> None:
    candidates = measured(shared)
    answer: Ranked = rank_measured(candidates, parse_sla(sla))
    assert answer.exit_code == exit_code
    assert answer.order[0] == first
    assert {name: answer.judgements[name].distance for name in candidates} == pytest.approx(distances)
    assert (answer.best is None) == (exit_code == NOT_FOUND)
    if answer.best is not None:
        assert answer.judgements[answer.best].distance == 0.0  # nothing printed as best breaks a limit


def test_c24_says_plainly_that_nothing_meets_it(shared: Path) -> None:
    answer = rank_measured(measured(shared), parse_sla("ttft=200ms,itl=50ms"))
    assert answer.line == "no configuration meets p95 ttft <= 200ms, p95 itl <= 50ms; nearest: C, 10.0 % over on ttft"
    assert rank_measured(measured(shared), parse_sla("ttft=250ms,itl=20ms")).line == "best: A"


@pytest.mark.parametrize("missing", [None, math.nan])
def test_c24_a_missing_figure_never_counts_as_meeting(missing: float | None, shared: Path) -> None:
    candidates = measured(shared)
    gone = estimated(candidates["A"].candidate, level=MEASURED, ttft={"p95": missing}, itl={"p95": 0.001})
    answer = rank_measured({"A": gone}, parse_sla("ttft=250ms,itl=20ms"))
    assert (answer.best, answer.exit_code) == (None, NOT_FOUND)
    assert answer.line == "no configuration meets p95 ttft <= 250ms, p95 itl <= 20ms; nearest: A, which has no ttft"
