"""Look-ahead: which plans are worth asking the twin for, and which of the answers to take.

Instead of inverting a formula, a handful of plans is simulated over the window that an order of now lasts, on a few
paths of demand. Of those that keep the promised attainment with confidence the cheapest is taken:

    lower bound = mean − t(0.95, n − 1) · sd / √n        over scenarios and seeds, the same draws for every plan

The mean alone would take a plan that keeps it half of the time (case K2). It must never simulate anything itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from policies.cluster.ids import Role
from policies.cluster.twin_asks import Outcome, Plan, PlanStep, RoleCount
from policies.frozen import frozen
from policies.planner.lookahead_settings import LookaheadSettings

_T95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
"""One-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom."""
_NORMAL95 = 1.645
RULE, STAY = "rule", "stay"
Counts = tuple[int, ...]


# ---------------------------------------------------------------- plans


@frozen
class Frame:
    """What plans are made within: roles in the order of the pools, workers now (ready and on their way) and by the
    rules, least workers and GPUs of one, GPUs in all (None: no bound) and held by workers that drain, workers that may
    change at once, and seconds until a new one is ready."""

    roles: tuple[Role, ...]
    current: Counts
    rule: Counts
    least: Counts
    gpus: Counts
    budget: int | None
    draining_gpus: int
    step: int
    startup_s: float

    def allows(self, counts: Counts) -> bool:
        """Within floors, step and budget."""
        inside = all(
            n >= low and abs(n - now) <= self.step for n, low, now in zip(counts, self.least, self.current, strict=True)
        )
        return inside and (self.budget is None or self.total(counts) + self.draining_gpus <= self.budget)

    def total(self, counts: Counts) -> int:
        return sum(n * g for n, g in zip(counts, self.gpus, strict=True))


def plans(frame: Frame, settings: LookaheadSettings) -> list[Plan]:
    """The rules' answer first, then to stay, two-step plans (now, and again when the first new workers are ready), and
    every count within `reach` of now, nearest to the rules' first; at most `most_plans`, none twice."""
    near = _near(frame, settings.reach)
    near.sort(key=lambda c: (sum(abs(a - b) for a, b in zip(c, frame.rule, strict=True)), frame.total(c), c))
    found: dict[tuple[Counts, ...], str] = {(frame.rule,): RULE}
    found.setdefault((frame.current,), STAY)
    for name, first in (("rule", frame.rule), ("stay", frame.current)):
        for i, role in enumerate(frame.roles):
            then = tuple(n + (i == j) for j, n in enumerate(first))
            if frame.allows(then):
                found.setdefault((first, then), f"{name} then {role.value}+1")
    for counts in near:
        found.setdefault((counts,), "/".join(map(str, counts)))
    return [_plan(name, steps, frame) for steps, name in list(found.items())[: settings.most_plans]]


def prescreened(
    offered: Sequence[Plan], frame: Frame, demand_rps: float, rps: Mapping[Role, float], most: int
) -> tuple[Plan, ...]:
    """At most `most` plans: the rules' and to stay always, then those of least shortage by the formulas of capacity
    (a tenth of the demand is no shortage: the twin is asked because the formulas are rough), the cheaper first."""

    def key(plan: Plan) -> tuple[int, float, int, str]:
        last = [count.workers for count in plan.steps[-1].counts]
        can = min(n * rps[role] for n, role in zip(last, frame.roles, strict=True))
        short = max(0.0, 1 - can / demand_rps) if demand_rps > 0 else 0.0
        return (plan.name not in (RULE, STAY), math.floor(short * 10), frame.total(tuple(last)), plan.name)

    return tuple(sorted(offered, key=key)[:most])


def _near(frame: Frame, reach: int) -> list[Counts]:
    found: list[Counts] = [()]
    for now in frame.current:
        found = [(*rest, now + d) for rest in found for d in range(-reach, reach + 1)]
    return [counts for counts in found if frame.allows(counts)]


def _plan(name: str, steps: tuple[Counts, ...], frame: Frame) -> Plan:
    return Plan(
        name=name,
        steps=tuple(
            PlanStep(
                after_s=i * frame.startup_s,
                counts=tuple(RoleCount(role=role, workers=n) for role, n in zip(frame.roles, counts, strict=True)),
            )
            for i, counts in enumerate(steps)
        ),
    )


# ---------------------------------------------------------------- choice


@frozen
class Judged:
    """One plan over all its runs: GPU-seconds, attainment and its lower bound, latencies of the first scenario."""

    plan: Plan
    gpu_s: float
    attainment: float
    low: float
    sd: float
    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None


@frozen
class Choice:
    """What is done. `unreachable`: no plan keeps the promise. `inconsistent`: more GPUs came out worse, beyond chance,
    so that the runs are not believed and the rules' plan is taken."""

    judged: Judged
    unreachable: bool = False
    inconsistent: bool = False

    @property
    def plan(self) -> Plan:
        return self.judged.plan


def judged(plan: Plan, runs: Sequence[Outcome]) -> Judged:
    """A plan by its runs, one at least."""
    kept = [run.attainment for run in runs]
    sd = stdev(kept) if len(kept) > 1 else 0.0
    first = [run for run in runs if run.scenario == 0]
    return Judged(
        plan=plan,
        gpu_s=fmean(run.gpu_s for run in runs),
        attainment=fmean(kept),
        low=fmean(kept) - (t95(len(kept) - 1) * sd / math.sqrt(len(kept)) if len(kept) > 1 else 0.0),
        sd=sd,
        ttft_p95_s=_mean(run.ttft_p95_s for run in first),
        itl_p95_s=_mean(run.itl_p95_s for run in first),
    )


def t95(freedom: int) -> float:
    """The one-sided 95 % quantile of Student's t."""
    return _T95[freedom - 1] if freedom <= len(_T95) else _NORMAL95


def choose(found: Sequence[Judged], current: Counts, settings: LookaheadSettings) -> Choice:
    """The cheapest plan that keeps the promise, else the one of most attainment; the rules' plan where another is not
    enough of a gain, or the runs contradict one another. `found` is in the order of the plans asked for."""
    rule = next((one for one in found if one.plan.name == RULE), None)
    if rule is not None and _inconsistent(found):
        return Choice(judged=rule, inconsistent=True)
    kept = [one for one in found if one.low >= settings.attainment]
    if not kept:
        best = max(found, key=lambda one: one.attainment)
        return Choice(judged=_or_rule(best, rule, settings), unreachable=True)
    best = min(kept, key=lambda one: one.gpu_s + settings.change_cost_gpu_s * changes(one.plan, current))
    if rule is not None and rule.low < settings.attainment:
        return Choice(judged=best)  # what keeps the promise goes before what does not
    return Choice(judged=_or_rule(best, rule, settings))


def changes(plan: Plan, current: Counts) -> int:
    """Workers that a plan starts or stops."""
    made, before = 0, current
    for step in plan.steps:
        now = tuple(count.workers for count in step.counts)
        made += sum(abs(a - b) for a, b in zip(now, before, strict=True))
        before = now
    return made


def _or_rule(best: Judged, rule: Judged | None, settings: LookaheadSettings) -> Judged:
    """The rules' plan, unless the other saves or lifts enough."""
    if rule is None or best is rule:
        return best
    saves = best.gpu_s <= rule.gpu_s * (1 - settings.save_share)
    lifts = best.attainment >= rule.attainment + settings.lift_points
    return best if saves or lifts else rule


def _inconsistent(found: Sequence[Judged]) -> bool:
    """Whether a plan with no fewer workers of any role, and more of one, kept the promise worse by more than 2 sd."""
    flat = [(tuple(count.workers for count in one.plan.steps[0].counts), one) for one in found]
    flat = [(counts, one) for counts, one in flat if len(one.plan.steps) == 1]
    for fewer, small in flat:
        for more, large in flat:
            bigger = more != fewer and all(a >= b for a, b in zip(more, fewer, strict=True))
            if bigger and large.attainment < small.attainment - 2 * max(small.sd, large.sd) - 1e-9:
                return True
    return False


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
