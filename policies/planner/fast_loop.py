"""The fast loop: one worker more or one less, by what the engines show, once every load interval.

It does not shrink before anything has been seen: no work yet, no word of the slow loop yet where there is one. Nor to a
count that was too few for the same demand before.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.cluster.ids import Role
from policies.cluster.ticks import PlanReason
from policies.planner.experience import Experience
from policies.planner.fleet import Count
from policies.planner.load import Vote
from policies.planner.propose import vote
from policies.planner.samples import Heard
from policies.planner.settings import PlannerSettings
from policies.planner.slow_loop import SlowLoop
from policies.planner.step_model import StepModel
from policies.planner.windows import Reading, Traffic


class FastLoop:
    """`worked`: whether anybody has been seen at work, or has come, yet."""

    def __init__(
        self, settings: PlannerSettings, traffic: Traffic, models: Mapping[Role, StepModel], slow: SlowLoop
    ) -> None:
        self._settings, self._traffic, self._models, self._slow = settings, traffic, models, slow
        span_s, share = settings.hold_s, settings.load_scaling_down_sensitivity
        self._past = {role: Experience(span_s, share) for role in models}
        self.worked = False

    def votes(
        self, now_s: float, counts: Mapping[Role, Count], heard: Mapping[Role, Heard], reading: Reading
    ) -> dict[Role, Vote]:
        """What it says now, by role."""
        if any(not engine.idle for one in heard.values() for engine in one.engines):
            self.worked = True
        return {role: self._vote(now_s, role, count, heard[role], reading) for role, count in counts.items()}

    def _vote(self, now_s: float, role: Role, count: Count, heard: Heard, reading: Reading) -> Vote:
        said = vote(self._settings, self._models[role], heard, count, self._traffic.work(), role)
        past, rps = self._past[role], self._rps(reading)
        if said.workers > count.current and not count.pending:
            past.grew(count.ready, rps, now_s)
        if said.workers < count.current:
            if self._waits(now_s, role):
                return Vote(workers=count.current, reason=PlanReason.AWAITING_FIRST_TRAFFIC)
            if past.forbids(said.workers, rps, now_s):
                return Vote(workers=count.current, reason=PlanReason.REFUSED_CONSOLIDATION)
        if count.current == 1 and all(e.idle for e in heard.engines) and self._nobody_comes(role, reading):
            return Vote(workers=0, reason=PlanReason.SCALE_DOWN)
        return said

    def _waits(self, now_s: float, role: Role) -> bool:
        s, started_s = self._settings, self._traffic.started_s or 0.0
        unseen = not self.worked and not self._traffic.seen_traffic and now_s - started_s < s.hold_s
        return unseen or (s.scales_throughput and self._slow.bound(role) is None)

    def _nobody_comes(self, role: Role, reading: Reading) -> bool:
        """Whether the last worker of a role may go: none need be there, and none has come or is expected."""
        return self._settings.pool(role).min_endpoint == 0 and reading.fed == 0 and not self._slow.bound(role)

    def _rps(self, reading: Reading) -> float | None:
        """The demand of the last window in requests per second; None where it is not known."""
        return None if reading.fed is None else reading.fed / self._settings.throughput_adjustment_interval_s
