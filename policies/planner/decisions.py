"""Decisions: from verdicts to orders, what each role was left at, which decision is not over, and what went wrong.

Every order of one decision has its number. A connector that confirms ends each with ScaleDone or ScaleFailed.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.cluster.actions import Action
from policies.cluster.ids import Role
from policies.cluster.scaling import ScaleDone, ScaleFailed
from policies.cluster.state import ClusterView
from policies.cluster.ticks import PlanReason
from policies.planner.constrain import Bounds, Verdict
from policies.planner.fleet import Count, Fleet
from policies.planner.patience import Patience
from policies.planner.settings import PlannerSettings
from policies.planner.windows import Traffic


class Decisions:
    """`patience` and `held` (the workers it was last left at) by role; `open` is the last decision, as long as nobody
    has said that it is over. `counters`: what happened how often, beside what records tell:
    `scale_changes.<role>.<dir>`, `budget_clamped`, `external_changes`, `start_failed.<role>`, `scale_timeout.<role>`,
    `decisions_failed`.
    """

    def __init__(self, settings: PlannerSettings, fleet: Fleet, traffic: Traffic) -> None:
        self._settings, self._fleet, self._traffic = settings, fleet, traffic
        self.patience = {pool.role: Patience(settings) for pool in settings.pools}
        self.held: dict[Role, int] = {}
        self.number = 0
        self.open: int | None = None
        self.counters: dict[str, int] = {}

    def look(self, now_s: float, view: ClusterView, bounds: Bounds) -> tuple[list[Action], list[str]]:
        """What somebody should know, one word each; starts that take too long are given up."""
        orders: list[Action] = []
        reading = self._traffic.at(now_s)
        notices = list(reading.flags)
        if reading.hold is PlanReason.NO_DATA and self._traffic.silent_s(now_s) > self._settings.no_data_alarm_s:
            notices.append("no_data_alarm")
        for role, patience in self.patience.items():
            if patience.look(self._fleet.count(view, role), now_s):
                notices.append(f"scale_timeout.{role.value}")
                self._count(f"scale_timeout.{role.value}")
                self.open = None
                orders += self._fleet.cancel_all(view, role, "not up in time: given up, tried again later")
            if patience.alarmed:
                notices.append(f"starts_fail.{role.value}")
            if self._fleet.strangers_of(role) and role in self.held:
                notices.append(f"external_change.{role.value}")
                self._count("external_changes")
        if bounds.most is not None and self._settings.least_gpus > bounds.most:
            notices.append("budget_below_minimum")
        return orders, notices

    def execute(
        self, view: ClusterView, counts: Mapping[Role, Count], verdicts: Mapping[Role, Verdict]
    ) -> list[Action]:
        """The orders that make it so; none where nothing changes."""
        targets = {}
        for role, verdict in verdicts.items():
            current = counts[role].current
            if verdict.reason in (PlanReason.BUDGET_FIT, PlanReason.BUDGET_HOLD):
                self._count("budget_clamped")
            self.held[role] = verdict.final
            if verdict.final != current:
                direction = "up" if verdict.final > current else "down"
                self._count(f"scale_changes.{role.value}.{direction}")
                targets[role] = (verdict.final, f"{verdict.reason.value}: {role.value} {current} to {verdict.final}")
        pools = {pool.role: pool for pool in self._settings.pools}
        number = self.number + 1
        orders = list(self._fleet.orders(view, targets, pools, number, self._settings.drain_timeout_s))
        if orders:
            self.number = self.open = number
            for role in targets:
                self.patience[role].ordered()
        return orders

    def ended(self, event: ScaleDone | ScaleFailed) -> None:
        """A decision is over."""
        if event.decision_id == self.open:
            self.open = None
        if isinstance(event, ScaleFailed):
            self._count("decisions_failed")

    def start_failed(self, role: Role, at_s: float) -> None:
        """A worker of a role did not come up."""
        self.patience[role].failed(at_s)
        self._count(f"start_failed.{role.value}")

    def _count(self, what: str) -> None:
        self.counters[what] = self.counters.get(what, 0) + 1
