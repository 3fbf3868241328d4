"""How many workers a trace needs, interval by interval, for whoever knows the future: static counts are tried on all of
it by simulation, and in each interval the smallest that keeps the limits is what an oracle would have.

Counts that are tried grow along one line: as the planner's formulas would have them for a growing demand, so that
prefill and decode workers stay in proportion. Nothing here runs a simulation itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from policies.cluster.ids import Role
from policies.frozen import frozen
from policies.planner.capacity import Limits, Work, capacity
from policies.planner.settings import PlannerSettings
from reports.columns import F64
from twin.scheduled import Step

Counts = tuple[int, ...]


@frozen
class Needs:
    """By interval, the smallest tried counts (in the order of `roles`) that keep the limits there, and in how many
    intervals none of them does (the one that came nearest is taken then)."""

    roles: tuple[Role, ...]
    by_interval: tuple[Counts, ...]
    unreachable: int
    tried: tuple[Counts, ...]


def line_of_counts(settings: PlannerSettings, isl: float, osl: float, most_gpus: int) -> Iterator[Counts]:
    """Counts for a growing demand of average requests, each larger than the one before, within `most_gpus`."""
    work = Work(isl=isl, osl=osl)
    limits = Limits(ttft_s=settings.ttft_s, itl_s=settings.itl_s)
    rps = []
    for pool in settings.pools:
        can = capacity(pool.role, pool.prior, pool, work, limits).rps if pool.prior is not None else 1.0
        rps.append(can)
    least = tuple(max(1, pool.min_endpoint) for pool in settings.pools)
    gpus = tuple(pool.gpus for pool in settings.pools)
    counts = least
    while sum(n * g for n, g in zip(counts, gpus, strict=True)) <= most_gpus:
        yield counts
        # the role that is full first gets the next worker
        tight = min(range(len(counts)), key=lambda i: (counts[i] * rps[i], i))
        counts = tuple(n + (i == tight) for i, n in enumerate(counts))


def needs(
    roles: tuple[Role, ...],
    line: Iterator[Counts],
    attained: Callable[[Counts], F64],
    target: float,
    *,
    patience: int = 2,
) -> Needs:
    """Try counts in order until every interval keeps the target, or `patience` of them in a row help none that does
    not. `attained` is the attainment of each interval of a run with static counts."""
    tried: list[Counts] = []
    shares: list[F64] = []
    idle = 0
    for counts in line:
        shares.append(attained(counts))
        tried.append(counts)
        best = np.maximum.reduce(shares)
        if (best >= target).all():
            break
        before = np.maximum.reduce(shares[:-1]) if len(shares) > 1 else np.zeros_like(best)
        short = best < target
        idle = 0 if (best[short] > before[short] + 0.005).any() else idle + 1
        if idle >= patience:
            break
    table = np.stack(shares)
    kept = table >= target
    first = np.where(kept.any(axis=0), kept.argmax(axis=0), table.argmax(axis=0))
    return Needs(
        roles=roles,
        by_interval=tuple(tried[place] for place in first),
        unreachable=int((~kept.any(axis=0)).sum()),
        tried=tuple(tried),
    )


def peak(found: Needs) -> Counts:
    """What is enough at any time."""
    return tuple(max(column) for column in zip(*found.by_interval, strict=True))


def mean(found: Needs) -> Counts:
    """What is needed on average, rounded up."""
    return tuple(math.ceil(sum(column) / len(column) - 1e-9) for column in zip(*found.by_interval, strict=True))


def oracle_steps(found: Needs, interval_s: float, startup_s: float) -> list[Step]:
    """Orders of somebody who knows: each start so early that it is ready as its interval begins, each drain when the
    last interval that needs it is over and none needs it again before it could be back."""
    counts = np.array(found.by_interval, dtype=np.int64)
    times = sorted(
        {0.0} | {t for i in range(len(counts)) for t in (i * interval_s, max(0.0, i * interval_s - startup_s))}
    )
    steps: list[Step] = []
    last: Mapping[Role, int] | None = None
    for at_s in times:
        low = min(len(counts) - 1, int(at_s / interval_s + 1e-9))
        high = min(len(counts) - 1, int((at_s + startup_s) / interval_s + 1e-9))
        want = counts[low : high + 1].max(axis=0)
        workers = {role: int(n) for role, n in zip(found.roles, want, strict=True)}
        if workers != last:
            steps.append(Step(at_s=at_s, workers=workers))
            last = workers
    return steps


def named(counts: Counts, roles: Sequence[Role]) -> str:
    """Counts in words: 4, or 2 prefill + 3 decode."""
    if len(roles) == 1:
        return str(counts[0])
    return " + ".join(f"{n} {role.value}" for n, role in zip(counts, roles, strict=True))
