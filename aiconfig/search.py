"""The search: every deployment by the closed form, the most promising by simulation, and what to say if none will do.

Who simulates is handed in, and so may be who proposes deployments; without either the whole space is searched by the
closed form alone. The same request gives the same answer, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiconfig.candidate import MODES
from aiconfig.changes import Case, single_changes
from aiconfig.estimate import CLOSED_FORM
from aiconfig.evaluation import ClosedFormEvaluation
from aiconfig.finalists import Simulate, Spread, finals, one_after_another, refusals_are_none
from aiconfig.outcome import Miss, Scored, SearchResult
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.scoring import Scoring, bought_front, rank
from aiconfig.serving import USUAL_SERVING
from aiconfig.space import Legal, Space
from aiconfig.variants import idle_servings

NOT_MODELLED: Final = (
    "the quality of answers, which smaller formats change",
    "the opening burst of a closed loop: closed-form figures are of the steady state",
    "tokenisers, HTTP and clients",
)


def search(
    request: SearchRequest,
    simulate: Simulate | None = None,
    proposed: Iterable[Legal | Rejection] | None = None,
    spread: Spread | None = None,
) -> SearchResult:
    """Search the whole space, or what is `proposed` of it. `spread` runs the finalists' turns elsewhere than here."""
    scoring = Scoring(request)
    rejections: list[Rejection] = []
    scored: list[Scored] = []
    legal = 0
    for one in Space(request) if proposed is None else proposed:
        found = scoring.of(one) if isinstance(one, Legal) else one
        legal += isinstance(one, Legal)
        if isinstance(found, Rejection):
            rejections.append(found)
        else:
            scored.append(found)
    judged = sorted(scored, key=rank)
    others: list[Scored] = []
    if simulate is not None:
        judged, others, left_out = finals(scoring, judged, spread or one_after_another(simulate))
        rejections += left_out
    return _result(scoring, judged, others, tuple(rejections), (legal, len(scored)), simulate)


def _result(
    scoring: Scoring,
    judged: list[Scored],
    others: list[Scored],
    rejections: tuple[Rejection, ...],
    counts: tuple[int, int],
    simulate: Simulate | None,
) -> SearchResult:
    request = scoring.request
    kept = [one for one in judged if one.judgement.kept]
    first = {mode: next((one for one in kept if one.candidate.mode == mode), None) for mode in MODES}
    shown = [*kept, *judged, *others][:1]
    return SearchResult(
        request=request,
        best=kept[0] if kept else None,
        best_agg=first["agg"],
        best_disagg=first["disagg"],
        front=tuple(bought_front(request, judged)),
        ranked=(*judged, *others),
        rejections=rejections,
        nearest=None if kept else _nearest(scoring, judged, simulate),
        legal=counts[0],
        scored=counts[1],
        provenance=scoring.closed.provenance(shown[0].candidate) if shown else (),
        notes=(*_notes(scoring, judged, rejections), *_serving_notes(request, simulated=simulate is not None)),
    )


def _nearest(scoring: Scoring, judged: list[Scored], simulate: Simulate | None) -> Miss | None:
    """The smallest distance of all; None without limits, or if somebody may keep them and nobody can tell."""
    request = scoring.request
    missed = [one for one in (*judged, *scoring.idle_misses) if one.distance > 0.0]
    if request.sla is None or not missed or any(not one.distance for one in judged):
        return None
    one = min(missed, key=lambda miss: (miss.distance, miss.candidate.simplicity))
    case = Case(
        candidate=one.candidate,
        workload=request.workload,
        load=one.load,
        sla=request.sla,
        estimate=one.estimate,
    )
    if simulate is None or one.estimate.level == CLOSED_FORM:
        evaluate = ClosedFormEvaluation(request.physics)
        return Miss(scored=one, changes=single_changes(case, evaluate))
    return Miss(scored=one, changes=single_changes(case, refusals_are_none(simulate)))


def _notes(scoring: Scoring, judged: list[Scored], rejections: tuple[Rejection, ...]) -> list[str]:
    notes = [f"not modelled: {one}" for one in NOT_MODELLED]
    if any(one.judgement.verdict == "not judged" for one in judged):
        notes.append("limits on percentiles and goodput are not judged by the closed form: simulate, or ask for means")
    if scoring.idle_misses and not judged:
        idle = min(scoring.idle_misses, key=lambda one: (one.distance, one.candidate.simplicity))
        notes.append(
            f"even one user alone misses the limits on every legal deployment; the nearest is {idle.candidate.name}"
        )
    failed = [one for one in rejections if one.reason == "failed"]
    if failed and not judged:
        notes.append(f"every simulation was refused; the first: {failed[0].detail}")
    unstable = [(one.has or 0.0, one.name) for one in rejections if one.reason == "unstable"]
    if unstable and not judged:
        most, name = max(unstable)
        notes.append(f"no deployment serves this rate; the most is {most:.4g} requests/s, by {name}")
    return notes


def _serving_notes(request: SearchRequest, *, simulated: bool) -> list[str]:
    if request.servings == (USUAL_SERVING,):
        return []
    if not simulated:
        return ["the closed form cannot tell ways to serve apart: routers and KV tiers were not looked at"]
    notes = [f"no effect: {line}" for line in idle_servings(request)]
    if any(request.host_kv) and all(request.gpu_of(role).host_bytes is None for role in ("mixed", "prefill")):
        notes.append("host KV was not held against the memory of hosts: it is not known (host_gb in --hardware FILE)")
    return notes
