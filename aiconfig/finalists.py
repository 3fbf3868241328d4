"""Who is simulated, and at which loads: the best by the objective, of the front, and of each mode and engine; each
under every way to serve that is asked for.

Who is left out, or refused by the twin, gets a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from aiconfig.candidate import MODES, Candidate
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluation import Evaluate
from aiconfig.judge import Judgement, judge
from aiconfig.load_point import Searched, simulated_load
from aiconfig.outcome import Scored
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.scoring import Scoring, bought_front, rank
from aiconfig.serving import USUAL_SERVING
from aiconfig.variants import variants
from aiconfig.workload import Workload
from policies.errors import TwinError
from policies.frozen import frozen

Simulate = Evaluate
"""What a candidate does under a demand at a load, simulated; raises TwinError for what the twin refuses."""


@frozen
class Turn:
    """One finalist's turn: the candidate, and the load at which its runs begin (or the only one)."""

    request: SearchRequest
    candidate: Candidate
    load: Load


Outcome = Searched | Rejection
Spread = Callable[[Sequence[Turn]], Sequence[Outcome]]
"""Takes the turns of all finalists, wherever they run; outcomes in the order of the turns."""


def finals(
    scoring: Scoring, ranked: list[Scored], spread: Spread
) -> tuple[list[Scored], list[Scored], list[Rejection]]:
    """(who was simulated, best first; who was not, in the order of `ranked`; why not)

    Finalists that were not begun before the search was stopped are among those who were not. Where every finalist was
    refused there is nobody: who was not good enough to be simulated is no answer then.
    """
    chosen = {one.candidate.name for one in shortlist(scoring.request, ranked)}
    fronted = {one.candidate.name for one in bought_front(scoring.request, ranked)}
    finalists = [one for one in ranked if one.candidate.name in chosen]
    others = [one for one in ranked if one.candidate.name not in chosen]
    reasons = [
        Rejection(name=one.candidate.name, reason="not_simulated" if one.candidate.name in fronted else "dominated")
        for one in others
    ]
    asked: list[Scored] = []
    for one in finalists:
        found = variants(scoring.request, one.candidate, one.load)
        asked += [replace(one, candidate=candidate) for candidate in found.played]
        reasons += found.left_out
    played: list[Scored] = []
    waiting: set[Candidate] = set()
    turns = [Turn(request=scoring.request, candidate=one.candidate, load=one.load) for one in asked]
    for one, outcome in zip(asked, spread(turns), strict=True):
        if isinstance(outcome, Rejection):
            reasons.append(outcome)
            if outcome.reason == "not_simulated":
                waiting.add(_plain(one.candidate))
        else:
            played.append(_played(scoring, one, outcome))
    if waiting := waiting - {_plain(one.candidate) for one in played}:
        others = [one for one in ranked if one.candidate.name not in chosen or one.candidate in waiting]
    elif not played:
        others = []
    return sorted(played, key=rank), others, reasons


def _plain(candidate: Candidate) -> Candidate:
    """However it is served."""
    return replace(candidate, serving=USUAL_SERVING)


def one_after_another(simulate: Simulate) -> Spread:
    """All turns here and now."""
    return lambda turns: [take_turn(turn, simulate) for turn in turns]


def take_turn(turn: Turn, simulate: Simulate) -> Outcome:
    """Simulate one finalist at its load point; a reason if the twin refuses it or none of its runs ends."""
    name = turn.candidate.name
    try:
        found = _runs(turn, simulate)
    except TwinError as error:
        return Rejection(name=name, reason="failed", detail=str(error))
    if not found.runs:
        why = f"no simulated run at {turn.load} or less came to its end"
        return Rejection(name=name, reason="unstable", detail=why)
    return _calibrated(name, found) if turn.request.strict else found


def _calibrated(name: str, found: Searched) -> Outcome:
    """Without the runs beyond the calibrated range."""
    within = tuple(run for run in found.runs if not run.beyond)
    if not within:
        return Rejection(name=name, reason="uncalibrated", detail="; ".join(found.runs[-1].beyond))
    return replace(found, runs=within)


def _runs(turn: Turn, simulate: Simulate) -> Searched:
    """At the load that was asked for, or in search of the largest that keeps the limits."""
    request, sla = turn.request, turn.request.sla

    def at(load: Load) -> Estimate | None:
        return simulate(turn.candidate, request.workload, load)

    if request.load is None and sla is not None:
        return simulated_load(
            at,
            turn.load,
            lambda run: judge(run, sla).kept and not (request.strict and run.beyond),
            excess=lambda run: _worst_excess(judge(run, sla)),
            hint=lambda run: _asymptote(run, judge(run, sla)),
        )
    estimate = at(turn.load)
    return Searched(best=estimate, runs=() if estimate is None else (estimate,))


def _worst_excess(judgement: Judgement) -> float:
    """Of the limit that binds; not a number where it is not judged."""
    binding = judgement.binding
    return math.nan if binding is None or binding.excess is None else binding.excess


def _asymptote(run: Estimate, judgement: Judgement) -> float:
    """Users at whom the limit on a wait that binds would just be kept: beyond its knee a closed loop gives every
    further user the same throughput to share, so by Little's law a wait grows by 1 / throughput a user. Not a number
    for other limits and in an open loop."""
    binding, users = judgement.binding, run.load.users
    if binding is None or users is None or binding.value is None or binding.slo.metric not in ("ttft", "e2e"):
        return math.nan
    return users - (binding.value - binding.slo.limit) * run.requests_per_s


def shortlist(request: SearchRequest, ranked: list[Scored]) -> list[Scored]:
    """Who is worth a simulation; where nobody keeps the limits, the nearest. Where several routers are to be tried, the
    best that have workers to choose among too."""
    kept = [one for one in ranked if not one.distance]
    if not kept:
        return ranked[: request.top]
    chosen = kept[: request.top] + bought_front(request, kept)[: request.top]
    for mode in MODES:
        for engine in request.engines:
            alike = [one for one in kept if (one.candidate.mode, one.candidate.engine) == (mode, engine)]
            chosen += alike[:1]
            if len(request.routers) > 1:
                chosen += [one for one in alike if one.candidate.has_choice][:1]
    return list({one.candidate.name: one for one in chosen}.values())


def _played(scoring: Scoring, one: Scored, found: Searched) -> Scored:
    """The candidate by its best run: the nearest to its limits, at the largest load."""
    runs = [scoring.scored(one.candidate, one.fit, run, len(found.runs), one.closed) for run in found.runs]
    return min(runs, key=lambda run: (run.distance, -_size(run.load)))


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
