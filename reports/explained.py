"""Decisions term by term: what they cost above the cheapest, who was next, and what a sample comes to in hindsight.

Terms are read from decisions.parquet in batches: a number is kept of each decision, and the terms of a few.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Final, NamedTuple

import numpy as np

from reports import metrics
from reports.metrics import distribution
from reports.record import RunRecord
from reports.slowest import longest
from reports.told import CandidateFigures, DecisionFigures, ExplainedFigures, OracleFigures, OracleMeta

MOST_TOLD: Final = 10
"""Decisions of each kind that a report tells term by term."""
BATCH_ROWS: Final = 4096
"""Terms of all workers make long rows."""

DECISION_NAMES: Final = ("at_s", "row", "request_id", "worker_id", "mode", "rule", "candidates")
_TERMS: Final = tuple(item.name for item in fields(CandidateFigures))


class _Told(NamedTuple):
    """One decision with its eligible workers."""

    row: int
    request_id: str | None
    at_s: float
    mode: str
    rule: str
    chosen: Mapping[str, float]
    others: list[Mapping[str, float]]
    regret_blocks: float

    def figures(self, ttft_s: float | None) -> DecisionFigures:
        next_best = min(self.others, key=lambda one: (one["cost"], one["worker_id"]), default=None)
        overlap = int(self.chosen["overlap_blocks"])
        return DecisionFigures(
            row=self.row,
            request_id=self.request_id,
            at_s=self.at_s,
            mode=self.mode,
            rule=self.rule,
            chosen=_candidate(self.chosen),
            runner_up=None if next_best is None else _candidate(next_best),
            regret_blocks=self.regret_blocks,
            overlap_lost_blocks=metrics.overlap_lost(overlap, [int(one["overlap_blocks"]) for one in self.others]),
            ttft_s=ttft_s,
        )


def _candidate(terms: Mapping[str, float]) -> CandidateFigures:
    return CandidateFigures(**{name: terms[name] for name in _TERMS})  # type: ignore[arg-type]  # as they were recorded


def explained_figures(record: RunRecord) -> ExplainedFigures | None:
    """None where no decision has costs (the mode weighs none)."""
    ttft, rows = record.requests.floats("ttft_s"), record.requests.ints("row")
    slow = {int(rows[place]) for place in longest(ttft, MOST_TOLD)}
    waited = {int(rows[place]): float(ttft[place]) for place in longest(ttft, MOST_TOLD)}
    regrets = array("d")
    worst: list[tuple[float, int, _Told]] = []
    slowest: list[_Told] = []
    for told in _decisions(record):
        regrets.append(told.regret_blocks)
        if told.row in slow:
            slowest.append(told)
        if told.regret_blocks > 0.0:
            entry = (told.regret_blocks, -len(regrets), told)
            if len(worst) < MOST_TOLD:
                heapq.heappush(worst, entry)
            elif entry > worst[0]:
                heapq.heapreplace(worst, entry)
    if not regrets:
        return None
    values = np.frombuffer(regrets, dtype=np.float64)
    times = _times(record, [told.row for _, _, told in worst]) | waited
    slowest.sort(key=lambda told: (-waited[told.row], told.at_s))
    return ExplainedFigures(
        decisions=len(values),
        not_cheapest=int((values > 0).sum()),
        regret_blocks=distribution(values),
        most_regretted=tuple(told.figures(times.get(told.row)) for _, _, told in sorted(worst, reverse=True)),
        slowest=tuple(told.figures(waited[told.row]) for told in slowest[: 2 * MOST_TOLD]),
    )


def _times(record: RunRecord, rows: Sequence[int]) -> dict[int, float]:
    """TTFT of these rows, where they have one."""
    wanted, column = np.array(rows, dtype=np.int64), record.requests.ints("row")
    ttft = record.requests.floats("ttft_s")
    places = np.flatnonzero(np.isin(column, wanted))
    return {int(column[place]): float(ttft[place]) for place in places if not np.isnan(ttft[place])}


def _decisions(record: RunRecord) -> Iterator[_Told]:
    """The decisions that weighed costs, in their order."""
    for batch in record.decisions.batches(DECISION_NAMES, BATCH_ROWS):
        names = [batch.texts(name) for name in ("request_id", "mode", "rule", "candidates")]
        numbers = [batch.floats(name).tolist() for name in ("at_s", "row", "worker_id")]  # who waits has no worker yet
        for request_id, mode, rule, shown, at_s, row, worker_id in zip(*names, *numbers, strict=True):
            if shown is None:
                continue
            able = [one for one in json.loads(shown) if one["why_not"] is None and one["cost"] is not None]
            chosen = next((one for one in able if one["worker_id"] == worker_id), None)
            if chosen is None:
                continue
            regret = metrics.cost_regret(chosen["cost"], [one["cost"] for one in able])
            others = [one for one in able if one is not chosen]
            yield _Told(int(row), request_id, at_s, mode or "", rule or "", chosen, others, regret)


# --- in hindsight -----------------------------------------------------------------------------------------------------


def oracle_figures(meta: OracleMeta) -> OracleFigures:
    regrets = [metrics.oracle_regret_s(one.ttft_s, [one.ttft_s, one.best_ttft_s]) for one in meta.samples]
    ranked = sorted(zip(regrets, meta.samples, strict=True), key=lambda pair: (-pair[0], pair[1].at_s, pair[1].row))
    return OracleFigures(
        every=meta.every,
        decisions=len(meta.samples),
        left_out=meta.left_out,
        best_chosen=sum(regret == 0.0 for regret in regrets),
        regret_s=distribution(np.array(regrets, dtype=np.float64)),
        worst=tuple(one for regret, one in ranked[:MOST_TOLD] if regret > 0.0),
    )
