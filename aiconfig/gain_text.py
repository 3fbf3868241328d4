"""What ways to serve are worth, in words: for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from aiconfig import words
from aiconfig.gains import Gain
from aiconfig.objectives import OBJECTIVES
from aiconfig.outcome import Scored
from aiconfig.reasons import REASONS
from aiconfig.request import SearchRequest
from aiconfig.serving import USUAL_SERVING
from reports import text


def gain_lines(request: SearchRequest, gains: Sequence[Gain], found: Sequence[Scored]) -> Iterator[str]:
    """For people: each way to serve with what it changes, and on which workers."""
    if not gains:
        return
    by_name = {one.candidate.name: one for one in found}
    unit = OBJECTIVES[request.objective].unit
    base = request.servings[0].text
    yield f"served otherwise, against the same workers with {base}, each at its load:"
    width = max(len(gain.serving) for gain in gains)
    for gain in gains:
        one, against = by_name[gain.name], by_name.get(gain.against)
        workers = words.deployment(replace(one.candidate, serving=USUAL_SERVING))
        if against is None:
            meaning = REASONS.get(gain.refused or "", "it was not simulated")
            yield f"  {gain.serving:<{width}}  {workers} at {one.load}: {one.judgement.verdict}; without it {meaning}"
            continue
        changes = [f"{_change(gain.change)} {unit}", *_latencies(request, one, against), *_cached(one, against)]
        limits = _limits(one, against)
        yield f"  {gain.serving:<{width}}  {', '.join(changes)}; {workers} at {one.load}{_load(one, against)}{limits}"


def _latencies(request: SearchRequest, one: Scored, against: Scored) -> Iterator[str]:
    for metric in ("ttft", "tpot"):
        statistic = words.statistic_of(request.sla, metric, one.estimate)
        new, old = (each.estimate.value(metric, statistic) for each in (one, against))
        change = new / old - 1.0 if old and new is not None else None
        yield f"{metric.upper()} {statistic} {_change(change)}"


def _cached(one: Scored, against: Scored) -> Iterator[str]:
    new, old = one.estimate.hit_share, against.estimate.hit_share
    if new is not None and old is not None:
        yield f"hit rate {text.share(new)} instead of {text.share(old)}"


def _load(one: Scored, against: Scored) -> str:
    return "" if one.load == against.load else f" instead of {against.load}"


def _limits(one: Scored, against: Scored) -> str:
    new, old = one.judgement.verdict, against.judgement.verdict
    return "" if new == old else f"; limits: {new} instead of {old}"


def _change(value: float | None) -> str:
    """In tenths of a percent: less than that is noise."""
    return "not known" if value is None else f"{value * 100:+.1f} %"
