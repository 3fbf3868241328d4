"""What may be ordered of what is wanted: floors, steps, the GPU budget, patience.

In this order: floor, at most 8 workers at once, no shrinking before its time, then the budget, which is hard. Each
stage that changes a count says so; the last one that did is the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.cluster.ids import Role
from policies.cluster.ticks import PlanReason
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.planner.budget import Share, above_floor, fit_from
from policies.planner.settings import PlannerSettings


@frozen
class Claim:
    """One role before the constraints: ready, on their way up and out, wanted and why. `patient`: whether it may shrink
    now, `cool_up` whether it may grow, as far as agreeing ticks and cooldowns go. `growing`: an earlier start is not
    over, or failed a moment ago, so nothing new is started."""

    role: Role
    ready: int
    pending: int
    draining: int
    want: int
    reason: PlanReason
    patient: bool = True
    growing: bool = False
    recallable: int | None = None
    cool_up: bool = True

    @property
    def current(self) -> int:
        return self.ready + self.pending


@frozen
class Verdict:
    """One role after them: `bounded` within floor and steps, `final` within everything, and what decided."""

    bounded: int
    final: int
    reason: PlanReason


@frozen
class Bounds:
    """GPUs that may be used and must be (None: no bound)."""

    most: int | None
    least: int | None


def clamped(want: int, current: int, step: int, floor: int) -> int:
    """`want` within `step` of `current`; a floor may take more than a step to repair."""
    return max(floor, min(max(want, current - step), current + step))


def constrain(claims: Sequence[Claim], settings: PlannerSettings, bounds: Bounds) -> dict[Role, Verdict]:
    """Every role's claim within all constraints. The claims are in the order of the pools."""
    bounded = {claim.role: _bounded(claim, settings) for claim in claims}
    budgeted = _within_budget(claims, {role: n for role, (n, _) in bounded.items()}, settings, bounds)
    verdicts = {}
    for claim in claims:
        wanted, reason = bounded[claim.role]
        final = budgeted[claim.role]
        if final != wanted:
            reason = PlanReason.BUDGET_HOLD if final == claim.current else PlanReason.BUDGET_FIT
        verdicts[claim.role] = Verdict(bounded=wanted, final=final, reason=reason)
    return verdicts


def _bounded(claim: Claim, settings: PlannerSettings) -> tuple[int, PlanReason]:
    """Within floor, step, patience and what is under way."""
    floor = settings.pool(claim.role).min_endpoint
    current, want, reason = claim.current, claim.want, claim.reason
    n = max(floor, want)
    if n != want:
        reason = PlanReason.FLOOR
    stepped = clamped(n, current, settings.max_throughput_scaling_replicas, floor)
    if stepped != n:
        n, reason = stepped, PlanReason.DELTA_CLAMPED
    if n > current and claim.growing:
        return current, PlanReason.SCALING_IN_PROGRESS
    if n > current and not claim.cool_up and current >= floor:
        return current, PlanReason.COOLDOWN
    if n < current:
        return _shrunk(claim, n, reason)
    return n, reason


def _shrunk(claim: Claim, n: int, reason: PlanReason) -> tuple[int, PlanReason]:
    """While starts are under way only these may be called off; ready workers go when patience allows it."""
    if claim.pending:
        left = max(n, claim.ready)
        return left, reason if left == n else PlanReason.SCALING_IN_PROGRESS
    if not claim.patient:
        return claim.current, PlanReason.COOLDOWN
    return n, reason


def _within_budget(
    claims: Sequence[Claim], counts: Mapping[Role, int], settings: PlannerSettings, bounds: Bounds
) -> dict[Role, int]:
    """Draining workers still hold their GPUs: the total may not exceed the ceiling at any instant."""
    shares = [_share(claim, counts[claim.role], settings) for claim in claims]
    current = [claim.current for claim in claims]
    kept = [counts[claim.role] for claim in claims]
    if bounds.most is not None:
        try:
            kept = list(fit_from(shares, current, bounds.most))
        except ConfigError:  # lowered live below the least: as few as there must be, and no more
            kept = [min(n, max(share.least, 0)) for n, share in zip(kept, shares, strict=True)]
    if sum(kept) < sum(current) and bounds.least is not None:
        over = bounds.most is not None and _gpus(current, shares) > bounds.most
        kept = kept if over else list(above_floor(kept, current, shares, bounds.most, bounds.least))
    if bounds.most is not None:
        kept = _paid(claims, kept, shares, bounds.most)
    return {claim.role: n for claim, n in zip(claims, kept, strict=True)}


def _paid(claims: Sequence[Claim], counts: Sequence[int], shares: Sequence[Share], most: int) -> list[int]:
    """Growth is paid from GPUs that nobody holds now: those of workers that drain, or are about to, are not free yet.

    A draining worker that is recalled costs nothing new; a start that is called off is free at once.
    """
    held = 0
    for claim, n, share in zip(claims, counts, shares, strict=True):
        cancelled = min(claim.pending, max(0, claim.current - n))
        held += (claim.current + claim.draining - cancelled) * share.gpus
    free = most - held
    kept = [min(n, claim.current) for claim, n in zip(claims, counts, strict=True)]
    for i, claim in enumerate(claims):
        back = claim.draining if claim.recallable is None else claim.recallable
        recalled = min(max(0, counts[i] - kept[i]), back)
        kept[i] += recalled
    grew = True
    while grew:  # one worker of each role in turn
        grew = False
        for i, n in enumerate(counts):
            if kept[i] < n and shares[i].gpus <= free:
                kept[i] += 1
                free -= shares[i].gpus
                grew = True
    return kept


def _share(claim: Claim, want: int, settings: PlannerSettings) -> Share:
    pool = settings.pool(claim.role)
    return Share(want=want, least=min(pool.min_endpoint, want), gpus=pool.gpus)


def _gpus(counts: Sequence[int], shares: Sequence[Share]) -> int:
    return sum(n * share.gpus for n, share in zip(counts, shares, strict=True))
