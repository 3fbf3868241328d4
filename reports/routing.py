"""What the router did: how often there was something to choose, what its choices cost, and in hindsight should have.

Counters come from the router, terms from decisions.parquet where they were recorded (--explain), the sample in
hindsight from whoever simulated. Decisions are read in batches; a number is kept of each, and the terms of a few.
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
from reports.columns import Columns
from reports.metrics import distribution
from reports.record import RunRecord
from reports.report import (
    CandidateFigures,
    DecisionFigures,
    ExplainedFigures,
    HitBound,
    OracleFigures,
    OracleMeta,
    RoutingFigures,
    RunMeta,
    ShareFigures,
    WorkerFigures,
)
from reports.slowest import longest

MOST_TOLD: Final = 10
"""Decisions of each kind that a report tells term by term."""
BATCH_ROWS: Final = 4096
"""Terms of all workers make long rows."""

DECISION_NAMES: Final = ("at_s", "row", "request_id", "worker_id", "mode", "rule", "candidates")
_TERMS: Final = tuple(item.name for item in fields(CandidateFigures))


def share_figures(workers: Sequence[WorkerFigures]) -> tuple[ShareFigures, ...]:
    """One entry per role with several workers, in order of appearance."""
    told = []
    for role in dict.fromkeys(worker.role for worker in workers):
        peers = [worker for worker in workers if worker.role == role]
        if len(peers) > 1:
            requests = np.array([worker.requests for worker in peers], dtype=np.float64)
            tokens = np.array([worker.input_tokens + worker.output_tokens for worker in peers], dtype=np.float64)
            told.append(
                ShareFigures(
                    role=role,
                    workers=len(peers),
                    requests_fairness=metrics.jain_fairness(requests),
                    requests_share=metrics.share_range(requests),
                    tokens_fairness=metrics.jain_fairness(tokens),
                    tokens_share=metrics.share_range(tokens),
                )
            )
    return tuple(told)


def hit_bound(requests: Columns, meta: RunMeta) -> HitBound | None:
    """The hit rate reached and its upper bound; None where the trace has no hash ids, or nobody counted."""
    size = _block_size(meta)
    if not meta.hash_known or "prompt_blocks" not in meta.ideal or size is None:
        return None
    admitted = ~np.isnan(requests.floats("admit_s"))
    cached, isl = requests.floats("cached_tokens")[admitted], requests.floats("isl")[admitted]
    hits, blocks = meta.ideal["hit_blocks"], meta.ideal["prompt_blocks"]
    return HitBound(
        reached=metrics.block_hit_rate(cached, isl, size),
        upper_bound=metrics.upper_bound_hit_rate(hits, blocks),
        prompt_blocks=blocks,
        ideal_blocks=hits,
    )


def _block_size(meta: RunMeta) -> int | None:
    """Blocks as the router counts them: those of the first worker."""
    return meta.workers[0].block_size if meta.workers else None


def routing_figures(record: RunRecord, meta: RunMeta) -> RoutingFigures | None:
    """None where the router told nothing and no decision was explained."""
    counters = _of_prompts(meta.routing)
    explained = _explained(record) if meta.explained else None
    if "decisions" not in counters:
        return None
    decisions, lost = counters["decisions"], counters.get("overlap_lost_blocks")
    differing, size = counters.get("overlap_differs"), _block_size(meta)
    return RoutingFigures(
        decisions=decisions,
        effectiveness=None if differing is None else metrics.routing_effectiveness(differing, decisions),
        non_max_overlap=counters.get("non_max_overlap"),
        overlap_lost_blocks=lost,
        overlap_lost_tokens=None if lost is None or size is None else lost * size,
        explained=explained,
        oracle=None if meta.oracle is None else _oracle(meta.oracle),
    )


def _of_prompts(counters: Mapping[str, int]) -> Mapping[str, int]:
    """The counters of whoever places prompts: with legs, of the prefill leg."""
    of_leg = {name.removeprefix("prefill_"): n for name, n in counters.items() if name.startswith("prefill_")}
    return of_leg if "decisions" in of_leg else counters


# --- decisions term by term -------------------------------------------------------------------------------------------


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


def _explained(record: RunRecord) -> ExplainedFigures | None:
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
        numbers = [batch.floats("at_s").tolist(), batch.ints("row").tolist(), batch.ints("worker_id").tolist()]
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


def _oracle(meta: OracleMeta) -> OracleFigures:
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
