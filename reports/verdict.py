"""What a run did to its limits: per request (attainment, goodput) and per run (met or missed).

Requests that got no answer stay in every denominator: shedding load must never raise a score. A missing figure never
meets a limit, except that a one-token answer has no gaps and so cannot break a limit on them.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from policies.frozen import frozen
from reports.columns import F64, Bools
from reports.metrics import (
    Distribution,
    goodput_rps,
    goodput_rps_per_gpu,
    quantiles,
    slo_attainment,
    tokens_per_s_per_user,
)
from reports.sla import Sla, Slo

Verdict = Literal["met", "missed"]

GAP_METRICS: Final = ("tpot", "itl", "tps_user")
"""Metrics that a one-token answer does not have. Per request, `itl` is the request's mean gap: its TPOT."""


@frozen
class Outcomes:
    """Requests in columns, one entry per request: what attainment is judged by. NaN: undefined."""

    completed: Bools
    cancelled: Bools
    ttft_s: F64
    tpot_s: F64
    e2e_s: F64

    def values(self, metric: str) -> F64:
        """The figure of each request that a limit on `metric` is about."""
        if metric == "tps_user":
            return tokens_per_s_per_user(self.tpot_s)
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.tpot_s, "e2e": self.e2e_s}[metric]


@frozen
class LimitResult:
    """One limit: the run's statistic over completed requests, the verdict, and how many requests kept the limit.

    `unanswered` requests (rejected, failed, open) are judged as infinitely slow, so the verdict can be "missed"
    although `value` alone would do; 0 where they have no part in it: a mean, and the pooled gaps of itl. The three
    counts leave cancelled requests out; `requests_undefined` had no such figure.
    """

    limit_text: str
    metric: str
    statistic: str | None
    limit: float
    unit: str
    value: float | None
    verdict: Verdict
    unanswered: int
    requests_met: int
    requests_missed: int
    requests_undefined: int


@frozen
class SlaResult:
    """All limits: attainment = good / counted, where only cancelled requests are not counted."""

    text: str
    verdict: Verdict
    good: int
    counted: int
    cancelled: int
    attainment: float | None
    goodput_rps: float | None
    goodput_rps_per_gpu: float | None
    limits: tuple[LimitResult, ...]


def judge(sla: Sla, outcomes: Outcomes, itl: Distribution, elapsed_s: float | None, gpu_s: float | None) -> SlaResult:
    """Judge requests and run. `itl` is the run's pooled gaps: what a limit on itl means for the run; `gpu_s` are the
    GPU-seconds that it held.
    """
    good = int(good_requests(sla, outcomes).sum())
    cancelled = int(outcomes.cancelled.sum())
    counted = len(outcomes.completed) - cancelled
    attainment, rate = slo_attainment(good, counted), goodput_rps(good, elapsed_s)
    limits = tuple(
        _goodput_result(slo, attainment, rate) if slo.statistic is None else _limit_result(slo, outcomes, itl)
        for slo in sla.slos
    )
    return SlaResult(
        text=sla.text,
        verdict="met" if all(limit.verdict == "met" for limit in limits) else "missed",
        good=good,
        counted=counted,
        cancelled=cancelled,
        attainment=attainment,
        goodput_rps=rate,
        goodput_rps_per_gpu=goodput_rps_per_gpu(good, gpu_s),
        limits=limits,
    )


def good_requests(sla: Sla, outcomes: Outcomes) -> Bools:
    """Which requests completed and kept every per-request limit."""
    good = outcomes.completed.copy()
    for slo in sla.per_request:
        values = outcomes.values(slo.metric)
        good &= slo.hold(values) | (np.isnan(values) & (slo.metric in GAP_METRICS))
    return good


def _limit_result(slo: Slo, outcomes: Outcomes, itl: Distribution) -> LimitResult:
    values, mine = outcomes.values(slo.metric), ~outcomes.cancelled
    defined = mine & ~np.isnan(values)
    met = int(slo.hold(values[defined]).sum())
    sample = values[defined & outcomes.completed]
    apart = slo.metric == "itl" or slo.statistic == "mean"
    unanswered = 0 if apart else int((mine & ~outcomes.completed).sum())
    value = _statistic(slo, sample, itl)
    judged = _statistic(slo, np.concatenate([sample, np.full(unanswered, np.inf if slo.upper else 0.0)]), itl)
    return LimitResult(
        limit_text=str(slo),
        metric=slo.metric,
        statistic=slo.statistic,
        limit=slo.limit,
        unit=slo.unit,
        value=value,
        verdict="met" if value is not None and judged is not None and slo.holds(judged) else "missed",
        unanswered=unanswered,
        requests_met=met,
        requests_missed=int(defined.sum()) - met,
        requests_undefined=int(mine.sum()) - int(defined.sum()),
    )


def _statistic(slo: Slo, sample: F64, itl: Distribution) -> float | None:
    """The run's figure that the limit is about. Rates count from the slow end: their worst is their smallest."""
    statistic = str(slo.statistic)
    if slo.metric == "itl":
        return itl.statistic(statistic)
    if not len(sample):
        return None
    if statistic == "mean":
        return float(sample.mean())
    share = 1.0 if statistic == "max" else float(statistic[1:]) / 100.0
    return quantiles(sample, [share if slo.upper else 1.0 - share])[0]


def _goodput_result(slo: Slo, attainment: float | None, rate: float | None) -> LimitResult:
    value = attainment if slo.unit == "share" else rate
    return LimitResult(
        limit_text=str(slo),
        metric=slo.metric,
        statistic=None,
        limit=slo.limit,
        unit=slo.unit,
        value=value,
        verdict="met" if value is not None and slo.holds(value) else "missed",
        unanswered=0,
        requests_met=0,
        requests_missed=0,
        requests_undefined=0,
    )
