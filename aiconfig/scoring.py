"""Each legal deployment at its load point by the closed form, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from aiconfig.candidate import Candidate
from aiconfig.closed_form import ClosedForm
from aiconfig.estimate import Estimate
from aiconfig.judge import judge, screened
from aiconfig.load_point import closed_form_load
from aiconfig.memory import Fit, deployment_fit
from aiconfig.objectives import OBJECTIVES, Terms
from aiconfig.outcome import Scored
from aiconfig.pareto import default_axes, front
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.space import Legal

BOUND_REASONS: Final = {"ttft": "ttft_bound", "e2e": "e2e_bound"}
"""Of limits that even an idle deployment misses; all others are about decode steps: tpot_bound."""


class Scoring:
    """Scores for one request. `idle_misses` are deployments that miss a limit even with one user, at that load."""

    def __init__(self, request: SearchRequest) -> None:
        self.request = request
        self.closed = ClosedForm(request.workload, request.physics)
        self.idle_misses: list[Scored] = []
        self._objective = OBJECTIVES[request.objective]
        self._terms = Terms(gpus_bought=request.gpus, usd_per_gpu_hour=request.usd_per_gpu_hour)

    def of(self, legal: Legal) -> Scored | Rejection:
        """The deployment at the load that was asked for, or at the largest that keeps the limits."""
        request, candidate = self.request, legal.candidate
        fit = deployment_fit(candidate, legal.pools, request.workload, request.load)
        if isinstance(fit, Rejection):
            return fit
        idle = self.scored(candidate, fit, self.closed.idle(candidate, fit))
        bound = self._bound(idle)
        if bound is not None:
            self.idle_misses.append(idle)
            return bound
        if request.load is None:
            found = closed_form_load(self.closed, candidate, fit, request.sla)
            return self._calibrated(idle if found is None else self.scored(candidate, fit, found[1]))
        estimate = self.closed.estimate(candidate, request.load, fit)
        if estimate is None:
            has = self.closed.most(candidate, fit).rps
            needs = request.load.rps
            return Rejection(name=candidate.name, reason="unstable", needs=needs, has=has, unit="requests/s")
        return self._calibrated(self.scored(candidate, fit, estimate))

    def _calibrated(self, one: Scored) -> Scored | Rejection:
        """A strict request wants no estimate beyond the calibrated range."""
        beyond = one.estimate.beyond
        if not self.request.strict or not beyond:
            return one
        return Rejection(name=one.candidate.name, reason="uncalibrated", detail="; ".join(beyond))

    def _bound(self, idle: Scored) -> Rejection | None:
        """The limit that even one user alone would miss."""
        limit = idle.screening.binding
        if limit is None or not (limit.excess or 0.0) > 0.0 or limit.value is None:
            return None
        factor, unit = (1e3, "ms") if limit.slo.unit == "s" else (1.0, limit.slo.unit)
        return Rejection(
            name=idle.candidate.name,
            reason=BOUND_REASONS.get(limit.slo.metric, "tpot_bound"),
            needs=limit.slo.limit * factor,
            has=limit.value * factor,
            unit=unit,
            detail=f"{limit.slo.metric} of one user alone",
        )

    def scored(
        self, candidate: Candidate, fit: Fit, estimate: Estimate, runs: int = 0, closed: Estimate | None = None
    ) -> Scored:
        """An estimate with its verdict and score; `closed` is the closed form's if `runs` were simulated."""
        if closed is None:
            estimate = replace(estimate, power_w=self.closed.power_w(candidate, estimate))
        return Scored(
            candidate=candidate,
            fit=fit,
            load=estimate.load,
            estimate=estimate,
            closed=estimate if closed is None else closed,
            judgement=judge(estimate, self.request.sla),
            screening=screened(estimate, self.request.sla),
            score=self._objective.score(estimate, self._terms),
            runs=runs,
        )


def rank(one: Scored) -> tuple[float, float, float, tuple[object, ...]]:
    """Best first: limits kept (or nearest to that), then the objective, then throughput, then simplicity."""
    return (one.distance, -one.score, -one.estimate.output_tokens_per_s, one.candidate.simplicity)


def bought_front(request: SearchRequest, scored: Iterable[Scored]) -> list[Scored]:
    """The front of those that break no limit, for each GPU of the budget and for each user."""
    kept = [one for one in scored if not one.distance]
    return front(kept, lambda one: one.estimate, default_axes(request.gpus))
