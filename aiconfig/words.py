"""Candidates, limits and figures of a search as people read them: one wording for terminal, page and explanation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aiconfig.bands import band_of
from aiconfig.candidate import Candidate
from aiconfig.estimate import CLOSED_FORM, Band, Estimate
from aiconfig.judge import Judgement, LimitVerdict
from aiconfig.outcome import Scored
from aiconfig.request import SearchRequest
from aiconfig.result import objective_of, terms_of
from reports import text
from reports.sla import DEFAULT_STATISTIC, Sla

VERDICTS: Final = {
    "meets": "meets",
    "likely": "likely meets",
    "not judged": "is not judged on",
    "unlikely": "misses",
    "fails": "misses",
}
"""The verdict on a limit as a verb."""


def deployment(candidate: Candidate) -> str:
    """A candidate in a few words; what distinguishes it further is in its name."""
    pools = []
    for pool in candidate.pools:
        role = "" if pool.role == "mixed" else f"{pool.role} "
        formats = pool.weights if pool.kv == pool.weights else f"{pool.weights}/{pool.kv}"
        pools.append(f"{role}{pool.label} {formats}")
    drafts = f", {candidate.nextn} drafts" if candidate.nextn else ""
    served = "".join(f", {part}" for part in candidate.serving.parts)
    return f"{candidate.engine} {' + '.join(pools)}{drafts}{served}"


def gpus(candidate: Candidate) -> str:
    """8 x h100_sxm, or several kinds of them."""
    counts: dict[str, int] = {}
    for pool in candidate.pools:
        counts[pool.gpu] = counts.get(pool.gpu, 0) + pool.gpus
    return " + ".join(f"{count} x {gpu}" for gpu, count in counts.items())


def statistic_of(sla: Sla | None, metric: str, estimate: Estimate) -> str:
    """Which statistic of a metric is shown: that of its limit, else the usual one; the closed form has means alone."""
    if estimate.level == CLOSED_FORM:
        return "mean"
    named = [slo.statistic for slo in sla.slos if slo.metric == metric] if sla is not None else []
    return next((name for name in named if name), DEFAULT_STATISTIC)


def ms(value_s: float | None) -> str:
    """Milliseconds without the unit."""
    return text.in_unit(value_s, "ms")


def figure(estimate: Estimate, request: SearchRequest) -> str:
    """What the objective of the request is about, with its unit."""
    objective = objective_of(request)
    return f"{text.figures(objective.figure(estimate, terms_of(request)))} {objective.unit}"


def per_gpu(estimate: Estimate, request: SearchRequest) -> float:
    """Output tokens a second for each GPU of the budget."""
    return estimate.output_tokens_per_s / request.gpus


def value_of(limit: LimitVerdict) -> str:
    """A limit's figure in the unit of the limit."""
    if limit.value is None:
        return "not known"
    match limit.slo.unit:
        case "s":
            return text.time(limit.value)
        case "share":
            return text.share(limit.value)
        case unit:
            return f"{text.figures(limit.value)} {unit}"


def margin(limit: LimitVerdict) -> str:
    """How far from its limit a figure is: "29.0 % below", "10.0 % over"."""
    if limit.excess is None or limit.value is None:
        return "not judged"
    way = ("below it", "over it") if limit.slo.upper else ("above it", "short of it")
    return f"{abs(limit.excess) * 100:.1f} % {way[1] if limit.excess > 0.0 else way[0]}"


def limit_line(limit: LimitVerdict) -> str:
    """meets p95 ttft <= 200ms with 142 ms, 29.0 % below it."""
    verb = VERDICTS[limit.verdict]
    if limit.verdict == "not judged":
        return f"{verb} {limit.slo}"
    return f"{verb} {limit.slo} with {value_of(limit)}, {margin(limit)}"


def limits_line(judgement: Judgement) -> str:
    """All limits of one candidate, the one that binds first."""
    binding = judgement.binding
    rest = [limit for limit in judgement.limits if limit is not binding]
    return "; ".join(limit_line(limit) for limit in ([binding] if binding else []) + rest)


def band(band: Band | None) -> str:
    """Half and nine in ten of the errors: ±14 %, or ±14..38 %."""
    if band is None:
        return "not known"
    wide = "" if band.wide is None else f"..{band.wide * 100:.0f}"
    return f"±{band.typical * 100:.0f}{wide} %"


def bands_cell(estimate: Estimate) -> str:
    """Bands of TTFT and TPOT."""
    return " / ".join(band(band_of(estimate, metric)).replace("±", "").replace(" %", "") for metric in ("ttft", "tpot"))


def band_lines(estimate: Estimate) -> Iterator[str]:
    """What the bands mean, once for each level, what they have beside the estimate, and what they do not cover."""
    told: dict[str, list[str]] = {}
    for metric in ("ttft", "tpot"):
        found = band_of(estimate, metric)
        if found is not None:
            told.setdefault(found.level, []).append(f"{metric} {band(found)}")
    for level, bands in told.items():
        wide = "; nine in ten within the second figure" if any(".." in one for one in bands) else ""
        yield f"{', '.join(bands)}: half of the errors are within that{wide} ({level})"
    outside = band_of(estimate, "ttft")
    if outside is not None and outside.outside_s:
        yield f"ttft was measured with {text.time(outside.outside_s)} outside the engine, which the estimate has not"
    for beyond in estimate.beyond:
        yield f"not covered by that: {beyond}"


def kv_line(one: Scored) -> str:
    """How much of the KV is in use, and when it is full."""
    users = f"KV full at {one.fit.users:,} users"
    if one.load.users is None:
        return f"KV peak {text.share(one.estimate.kv_share)}, {users}"
    return f"KV peak {text.share(one.estimate.kv_share)}, {users}; {one.load} here"
