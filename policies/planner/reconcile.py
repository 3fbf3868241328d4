"""From what the loops and the twin say of a role to one claim, and through the constraints to a verdict.

With a fast loop, the slow one and the twin say how few there may be; without, how many there are to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.cluster.ids import Role
from policies.cluster.ticks import PlanReason
from policies.planner.constrain import Bounds, Claim, Verdict, constrain
from policies.planner.fleet import Count
from policies.planner.load import Vote
from policies.planner.merge import Kind, Proposal, merged
from policies.planner.propose import Need
from policies.planner.settings import PlannerSettings


def wanted(
    scales_load: bool, start: int, said: Vote | None, need: Need | None, answer: int | None
) -> tuple[int, PlanReason]:
    """How many workers and why, before constraints; `start` where nobody says anything. `answer` is the twin's, and
    stands for what the slow loop says."""
    slow = answer if answer is not None else None if need is None else need.workers
    hold = PlanReason.NO_CHANGE if need is None or need.hold is None else need.hold
    if not scales_load:
        return (start, hold) if slow is None else (slow, PlanReason.NO_CHANGE)
    proposals = []
    if said is not None:
        proposals.append(Proposal(kind=Kind.SET, workers=said.workers, by="load"))
    if slow is not None:
        proposals.append(Proposal(kind=Kind.AT_LEAST, workers=slow, by="throughput"))
    want = merged(proposals, start)
    assert want is not None
    if said is not None and said.workers < start <= want:
        return want, PlanReason.CAPPED_BY_THROUGHPUT
    return want, said.reason if said is not None else hold


def claim(
    role: Role,
    count: Count,
    want: int,
    reason: PlanReason,
    *,
    may_shrink: bool,
    may_grow: bool,
    busy: bool,
) -> Claim:
    """A role before the constraints. `busy`: an earlier decision is not over, or a start failed a moment ago."""
    return Claim(
        role=role,
        ready=count.ready,
        pending=count.pending,
        draining=count.draining,
        recallable=count.recallable,
        want=want,
        reason=_direction(want, count.current, reason),
        patient=may_shrink,
        cool_up=may_grow,
        growing=count.pending > 0 or busy,
    )


def judged(
    claims: Sequence[Claim], settings: PlannerSettings, bounds: Bounds, needs: Mapping[Role, Need]
) -> dict[Role, Verdict]:
    """The verdicts; where nothing changes because nothing would help, that is said."""
    found = constrain(claims, settings, bounds)
    for one in claims:
        verdict, need = found[one.role], needs.get(one.role)
        unreachable = need is not None and need.capacity is not None and need.capacity.unreachable
        if unreachable and verdict.final == one.current and verdict.reason is PlanReason.NO_CHANGE:
            found[one.role] = Verdict(bounded=verdict.bounded, final=verdict.final, reason=PlanReason.SLA_UNREACHABLE)
    return found


def only_said(verdict: Verdict, current: int) -> Verdict:
    """Advisory: what would have been ordered, said and not done."""
    if verdict.final == current:
        return verdict
    return Verdict(bounded=verdict.bounded, final=verdict.final, reason=PlanReason.ADVISORY)


def _direction(want: int, current: int, reason: PlanReason) -> PlanReason:
    """The reason of a proposal, before anything constrains it."""
    if want > current:
        return PlanReason.SCALE_UP
    if want < current:
        return PlanReason.SCALE_DOWN
    return PlanReason.NO_CHANGE if reason in (PlanReason.SCALE_UP, PlanReason.SCALE_DOWN) else reason
