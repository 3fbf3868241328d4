"""The cheapest single change that would make the nearest miss keep its limits; every one offered was evaluated.

The cost of a change is the share by which it changes what was asked for: fewer bytes, fewer prompt tokens, less load,
more GPUs, a looser limit. Whether a byte is dearer than a GPU is for people to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from aiconfig.candidate import Candidate
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluation import Evaluate, keeps
from aiconfig.formats import checkpoint_formats
from aiconfig.judge import screened
from aiconfig.workload import Workload
from policies.frozen import frozen
from reports.sla import Sla, Slo
from twin.perf.formats import kv_bytes, weight_bytes
from twin.perf.models import find_model

KINDS: Final = ("format", "context", "load", "gpus", "bound")
STEPS: Final = 7
"""Evaluations of one kind of change at most."""
LEAST_SHARE: Final = 1 / 16
"""Less of a prompt or a load than this is no longer the same question."""


@frozen
class Change:
    """One change, in words, with its cost (a share) and the estimate that keeps the limits."""

    kind: str
    text: str
    cost: float
    estimate: Estimate


@frozen
class Case:
    """What missed: a candidate under a demand at a load, judged by `sla`."""

    candidate: Candidate
    workload: Workload
    load: Load
    sla: Sla
    estimate: Estimate


def single_changes(case: Case, evaluate: Evaluate) -> tuple[Change, ...]:
    """The cheapest change of each kind that keeps the limits, cheapest first."""
    kinds: tuple[Callable[[Case, Evaluate], Iterator[Change]], ...] = (_formats, _context, _load, _gpus, _bound)
    found = [change for kind in kinds for change in kind(case, evaluate)]
    return tuple(sorted(found, key=lambda change: (change.cost, KINDS.index(change.kind))))


def _formats(case: Case, evaluate: Evaluate) -> Iterator[Change]:
    """Smaller weights or KV, the least change first."""
    first = case.candidate.pools[0]
    options: list[tuple[float, str, Candidate]] = []
    for weights in checkpoint_formats(find_model(case.candidate.model)):
        pools = tuple(replace(pool, weights=weights) for pool in case.candidate.pools)
        saved = 1.0 - weight_bytes(weights) / weight_bytes(first.weights)
        options.append((saved, f"{weights} weights instead of {first.weights}", replace(case.candidate, pools=pools)))
    pools = tuple(replace(pool, kv="fp8") for pool in case.candidate.pools)
    saved = 1.0 - kv_bytes("fp8") / kv_bytes(first.kv)
    options.append((saved, f"fp8 KV instead of {first.kv}", replace(case.candidate, pools=pools)))
    for cost, text, smaller in sorted(options, key=lambda option: option[:2]):
        if cost > 0.0:
            estimate = evaluate(smaller, case.workload, case.load)
            if estimate is not None and keeps(estimate, case.sla):
                yield Change(kind="format", text=text, cost=cost, estimate=estimate)
                return


def _context(case: Case, evaluate: Evaluate) -> Iterator[Change]:
    """Shorter prompts; a common prefix is shortened with them."""

    def shorter(share: float) -> tuple[Workload, Estimate | None]:
        isl = max(1, int(case.workload.isl * share))
        workload = replace(case.workload, isl=isl, prefix_tokens=min(case.workload.prefix_tokens, isl - 1))
        return workload, evaluate(case.candidate, workload, case.load)

    found = _largest_share(lambda share: shorter(share)[1], case.sla)
    if found is not None:
        share, estimate = found
        isl = shorter(share)[0].isl
        text = f"prompts of {isl} tokens instead of {case.workload.isl}"
        yield Change(kind="context", text=text, cost=1.0 - isl / case.workload.isl, estimate=estimate)


def _load(case: Case, evaluate: Evaluate) -> Iterator[Change]:
    """Less load, where there is less."""
    load = case.load
    if load.users == 1:
        return

    def less(share: float) -> Estimate | None:
        fewer = Load(users=max(1, int(load.users * share))) if load.users else Load(rps=(load.rps or 0.0) * share)
        return evaluate(case.candidate, case.workload, fewer)

    found = _largest_share(less, case.sla)
    if found is not None:
        estimate = found[1]
        new, old = (one.users or one.rps or 0.0 for one in (estimate.load, load))
        yield Change(kind="load", text=f"{estimate.load} instead of {load}", cost=1.0 - new / old, estimate=estimate)


def _gpus(case: Case, evaluate: Evaluate) -> Iterator[Change]:
    """More workers, or larger ones; the fewest GPUs that do."""
    options = []
    for times in (2, 4):
        more = tuple(replace(pool, replicas=pool.replicas * times) for pool in case.candidate.pools)
        wide = tuple(
            replace(pool, layout=replace(pool.layout, tp=pool.layout.tp * times)) for pool in case.candidate.pools
        )
        options += [replace(case.candidate, pools=pools) for pools in (more, wide)]
    for candidate in sorted(options, key=lambda one: one.simplicity):
        estimate = evaluate(candidate, case.workload, case.load)
        if estimate is not None and keeps(estimate, case.sla):
            old, new = case.candidate.gpus, candidate.gpus
            labels = " + ".join(pool.label for pool in candidate.pools)
            text = f"{new} GPUs instead of {old}: {labels}"
            yield Change(kind="gpus", text=text, cost=new / old - 1.0, estimate=estimate)
            return


def _bound(case: Case, evaluate: Evaluate) -> Iterator[Change]:
    """Limits loosened to what the candidate does, in three digits."""
    limits = {limit.slo: limit for limit in screened(case.estimate, case.sla).limits}
    slos, told, cost = [], [], 0.0
    for slo in case.sla.slos:
        limit = limits.get(slo)
        if limit is None or not (limit.excess or 0.0) > 0.0 or limit.value is None or math.isinf(limit.excess or 0.0):
            slos.append(slo)
            continue
        looser = replace(slo, limit=_rounded(slo, limit.value))
        slos.append(looser)
        told.append(f"{looser} instead of {slo}")
        cost = max(cost, looser.limit / slo.limit - 1.0 if slo.upper else slo.limit / looser.limit - 1.0)
    if told and keeps(case.estimate, Sla(slos=tuple(slos), text=case.sla.text)):
        yield Change(kind="bound", text=", ".join(told), cost=cost, estimate=case.estimate)


def _rounded(slo: Slo, value: float) -> float:
    """The value in three digits, towards the looser side."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return (math.ceil(value / digit - 1e-9) if slo.upper else math.floor(value / digit + 1e-9)) * digit


def _largest_share(evaluate: Callable[[float], Estimate | None], sla: Sla) -> tuple[float, Estimate] | None:
    """The largest share that keeps the limits, within a twentieth, by bisection in its logarithm."""
    low, high = LEAST_SHARE, 1.0
    estimate = evaluate(low)
    if estimate is None or not keeps(estimate, sla):
        return None
    best = (low, estimate)
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        estimate = evaluate(middle)
        if estimate is not None and keeps(estimate, sla):
            low, best = middle, (middle, estimate)
        else:
            high = middle
    return best
