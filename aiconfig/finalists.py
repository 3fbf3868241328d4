"""Who is simulated, and at which loads: the best by the objective, of the front, and of each mode and engine.

Who is left out, or refused by the twin, gets a reason.
"""

from __future__ import annotations

from aiconfig.candidate import MODES, Candidate
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluation import Evaluate
from aiconfig.judge import judge
from aiconfig.load_point import simulated_load
from aiconfig.outcome import Scored
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.scoring import Scoring, bought_front, rank
from aiconfig.workload import Workload
from policies.errors import TwinError

Simulate = Evaluate
"""What a candidate does under a demand at a load, simulated; raises TwinError for what the twin refuses."""


def finals(
    scoring: Scoring, ranked: list[Scored], simulate: Simulate
) -> tuple[list[Scored], list[Scored], list[Rejection]]:
    """(who was simulated, best first; who was not, in the order of `ranked`; why not)"""
    chosen = {one.candidate.name for one in shortlist(scoring.request, ranked)}
    fronted = {one.candidate.name for one in bought_front(scoring.request, ranked)}
    played, others, reasons = [], [], []
    for one in ranked:
        if one.candidate.name not in chosen:
            others.append(one)
            reason = "not_simulated" if one.candidate.name in fronted else "dominated"
            reasons.append(Rejection(name=one.candidate.name, reason=reason))
            continue
        found = _played(scoring, one, simulate)
        if isinstance(found, Rejection):
            reasons.append(found)
        else:
            played.append(found)
    return sorted(played, key=rank), others, reasons


def shortlist(request: SearchRequest, ranked: list[Scored]) -> list[Scored]:
    """Who is worth a simulation; where nobody keeps the limits, the nearest."""
    kept = [one for one in ranked if not one.distance]
    if not kept:
        return ranked[: request.top]
    chosen = kept[: request.top] + bought_front(request, kept)[: request.top]
    for mode in MODES:
        for engine in request.engines:
            alike = (one for one in kept if (one.candidate.mode, one.candidate.engine) == (mode, engine))
            first = next(alike, None)
            chosen += [first] if first is not None else []
    return list({one.candidate.name: one for one in chosen}.values())


def _played(scoring: Scoring, one: Scored, simulate: Simulate) -> Scored | Rejection:
    """The candidate simulated at its load point; a reason if the twin refuses it or none of its runs ends."""
    name = one.candidate.name
    try:
        runs = _runs(scoring, one, simulate)
    except TwinError as error:
        return Rejection(name=name, reason="failed", detail=str(error))
    if not runs:
        return Rejection(name=name, reason="unstable", detail=f"no simulated run at {one.load} or less came to its end")
    return min(runs, key=lambda run: (run.distance, -_size(run.load)))


def _runs(scoring: Scoring, one: Scored, simulate: Simulate) -> list[Scored]:
    """At the load that was asked for, or in search of the largest that keeps the limits."""
    request, sla = scoring.request, scoring.request.sla

    def at(load: Load) -> Estimate | None:
        return simulate(one.candidate, request.workload, load)

    if request.load is not None or sla is None:
        estimate = at(one.load)
        runs: tuple[Estimate, ...] = () if estimate is None else (estimate,)
    else:
        runs = simulated_load(at, one.load, lambda estimate: judge(estimate, sla).kept).runs
    return [scoring.scored(one.candidate, one.fit, run, len(runs), one.closed) for run in runs]


def _size(load: Load) -> float:
    return float(load.users or load.rps or 0.0)


def refusals_are_none(simulate: Simulate) -> Evaluate:
    """The same, for questions where what the twin refuses is no answer rather than an error."""

    def evaluate(candidate: Candidate, workload: Workload, load: Load) -> Estimate | None:
        try:
            return simulate(candidate, workload, load)
        except TwinError:
            return None

    return evaluate
