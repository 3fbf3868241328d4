"""The slow loop: how many workers the forecast needs, once every throughput interval.

With a fast loop beside it, it says how few there may be: each bound starts from the last one (so that noise around a
whole number does not come through it) and needs what the very next interval does. Alone it starts from what there is,
and an order of now must last until it is ready and one interval more.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.cluster.ids import Role
from policies.planner.fleet import Count
from policies.planner.propose import Need, needs
from policies.planner.settings import PlannerSettings
from policies.planner.step_model import StepModel
from policies.planner.windows import Reading, Traffic


class SlowLoop:
    """What it said last, by role: `needs`."""

    def __init__(self, settings: PlannerSettings, traffic: Traffic, models: Mapping[Role, StepModel]) -> None:
        self._settings, self._traffic, self._models = settings, traffic, models
        self.needs: dict[Role, Need] = {}

    def look(self, reading: Reading, counts: Mapping[Role, Count]) -> None:
        """Say it anew. A bound stays while nothing new can be told."""
        s = self._settings
        ahead = self._traffic.num_req.path(1 if s.scales_load else s.horizon)
        rps = max(ahead) / s.throughput_adjustment_interval_s if ahead else None
        now = {role: self._from(role, count) for role, count in counts.items()}
        found = needs(s, self._models, reading, self._traffic.work(), rps, now)
        self.needs = {role: self._kept(role, need) if s.scales_load else need for role, need in found.items()}

    @property
    def tells(self) -> bool:
        """Whether it could tell of every role."""
        return bool(self.needs) and all(need.hold is None for need in self.needs.values())

    def bound(self, role: Role) -> int | None:
        """Workers that it said last; None where it has not been able to yet."""
        need = self.needs.get(role)
        return None if need is None else need.workers

    def _from(self, role: Role, count: Count) -> int:
        if not self._settings.scales_load:
            return count.current
        bound = self.bound(role)
        return self._settings.pool(role).min_endpoint if bound is None else bound

    def _kept(self, role: Role, need: Need) -> Need:
        before = self.needs.get(role)
        if need.workers is not None or before is None or before.workers is None:
            return need
        return Need(workers=before.workers, hold=need.hold, capacity=before.capacity)
