"""How many workers run: the policy. Observe, predict, propose, reconcile, constrain, execute, at every tick.

The slow loop (throughput) asks what a forecast needs, the fast one (load) what the engines show; where both run, the
slow one only says how few there may be. Each tick that ran a loop leaves its record (`NotePlan`), whatever came of it.
Nothing here reads a clock; windows and passes are only taken in, and decided on at the next tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from policies.cluster.actions import Action, SetTimer
from policies.cluster.events import (
    Event,
    RequestArrived,
    TimerFired,
    WorkerDraining,
    WorkerEvent,
    WorkerLost,
    WorkerRecalled,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
    WorkerUp,
)
from policies.cluster.ids import Role
from policies.cluster.scaling import GpuBudgetChanged, ScaleDone, ScaleFailed
from policies.cluster.state import ClusterView
from policies.cluster.ticks import NotePlan, PlanReason, Tick
from policies.cluster.traffic import ForwardPass, TrafficWindow
from policies.cluster.twin_asks import TwinAnswered
from policies.planner import records
from policies.planner.asking import Asking
from policies.planner.constrain import Bounds, Claim, Verdict
from policies.planner.decisions import Decisions
from policies.planner.fast_loop import FastLoop
from policies.planner.fleet import Count, Fleet
from policies.planner.forecast.build import Maker, forecaster
from policies.planner.forecast.guarded import Guarded
from policies.planner.load import Vote
from policies.planner.reconcile import claim, judged, only_said, wanted
from policies.planner.samples import Heard, Passes
from policies.planner.settings import PlannerSettings
from policies.planner.slow_loop import SlowLoop
from policies.planner.step_model import StepModel
from policies.planner.windows import Traffic

TICK, WAIT = "tick", "planner-twin"

_WORKERS: frozenset[type[Event]] = frozenset(
    {WorkerUp, WorkerLost, WorkerDraining, WorkerRecalled, WorkerStarting, WorkerStartFailed, WorkerStartCancelled}
)


class Planner:
    """Plans the roles of its mode. Begins to tick with the first event that it hears."""

    subscribes: ClassVar[frozenset[type[Event]]] = _WORKERS | {
        TimerFired,
        TrafficWindow,
        ForwardPass,
        GpuBudgetChanged,
        ScaleDone,
        ScaleFailed,
        TwinAnswered,
    }

    def __init__(self, settings: PlannerSettings, plugins: Mapping[str, Maker] = MappingProxyType({})) -> None:
        s = self.settings = settings
        self.models = {
            pool.role: StepModel(
                pool.role, pool.prior, s.max_num_fpm_samples, s.fpm_sample_bucket_size, s.load_min_observations
            )
            for pool in s.pools
        }
        num_req, isl, osl = (Guarded(forecaster(s.load_predictor, s.forecast, plugins)) for _ in range(3))
        most_accept = 1.0 + max(pool.nextn for pool in s.pools)
        self.traffic = Traffic(s.throughput_adjustment_interval_s, s.hold_s, num_req, isl, osl, most_accept)
        stale_s = 2 * s.load_adjustment_interval_s
        self.passes = Passes(self.models, stale_s, s.warmup_skip_s, s.warmup_skip_passes)
        self.bounds = Bounds(most=s.max_gpu_budget, least=s.min_gpu_budget)
        self.slow = SlowLoop(s, self.traffic, self.models)
        self.fast = FastLoop(s, self.traffic, self.models, self.slow)
        self.asking = Asking(s, self.traffic, self.models)
        self._fleet = Fleet()
        self._decisions = Decisions(s, self._fleet, self.traffic)
        self._patience = self._decisions.patience
        self._ticks = self._records = 0
        self._begun_s: float | None = None
        self._woken_s: float | None = None

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened how often: see `Decisions`."""
        return self._decisions.counters

    # ------------------------------------------------------------ events

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        orders: list[Action] = []
        if self._begun_s is None:
            self._begun_s = self.traffic.started_s = event.at_s
            orders.append(self._next_tick())
        match event:
            case TimerFired() if event.name == TICK:
                orders += self._tick(event.at_s, view)
            case TimerFired() if event.name == WAIT and self.asking.open:
                until_s = self.asking.bridge(event.at_s)
                if until_s is not None:
                    orders.append(_wait_until(until_s))
                orders += self._plan(event.at_s, view, ("throughput",))
            case ForwardPass():
                self.passes.take(event)
            case TrafficWindow():
                self.traffic.take(event)
                self.asking.compare(event)
            case GpuBudgetChanged():
                self.bounds = Bounds(most=event.max_gpus, least=event.min_gpus)
            case ScaleDone() | ScaleFailed():
                self._decisions.ended(event)
            case TwinAnswered():
                if self.asking.answered(event):
                    orders += self._plan(event.at_s, view, ("answer",))
            case RequestArrived():
                orders += self._wake(event.at_s, view)
            case WorkerEvent():
                self._hear(event, view)
        return orders

    def _hear(self, event: WorkerEvent, view: ClusterView) -> None:
        self._fleet.hear(event, view)
        match event:
            case WorkerUp():
                self.passes.up(event)
                if event.role in self._patience:
                    self._patience[event.role].succeeded()
            case WorkerLost():
                self.passes.lost(event.worker_id)
            case WorkerStartFailed() | WorkerStartCancelled():
                role = self._fleet.start_ended(event.worker_id)
                if role in self._patience and isinstance(event, WorkerStartFailed):
                    self._decisions.start_failed(role, event.at_s)

    # ------------------------------------------------------------ a tick

    def _next_tick(self) -> SetTimer:
        assert self._begun_s is not None
        due_s = self._begun_s + (self._ticks + 1) * self.settings.tick_s
        return SetTimer(name=TICK, due_s=due_s, background=True, reason="plan the workers")

    def _tick(self, now_s: float, view: ClusterView) -> list[Action]:
        s = self.settings
        self._ticks += 1
        slow = s.scales_throughput and self._ticks % _every(s.throughput_adjustment_interval_s, s.tick_s) == 0
        fast = s.scales_load and self._ticks % _every(s.load_adjustment_interval_s, s.tick_s) == 0
        orders: list[Action] = [self._next_tick()]
        if slow:
            self.slow.look(self.traffic.at(now_s), self._counts(view))
            asked = self._ask(now_s, view)
            orders += asked
            slow = not asked
        due = ("throughput",) * slow + ("load",) * fast
        return orders + self._plan(now_s, view, due) if due else orders

    def _ask(self, now_s: float, view: ClusterView) -> list[Action]:
        """Ask the twin, where that is wanted and possible: then the answer is waited for."""
        if not self.asking.on or not self.slow.tells:
            self.asking.forget()
            return []
        counts, heard = self._counts(view), self._heard(view, now_s)
        verdicts = self._judged(self._claims(now_s, counts, {}, ruled=True))
        rule = {role: verdict.final for role, verdict in verdicts.items()}
        question = self.asking.ask(now_s, counts, heard, rule, self.slow.needs, self.bounds)
        if question is None:
            return []
        self.asking.waits = True
        return [question, _wait_until(now_s + self.asking.wait_s)]

    def _plan(self, now_s: float, view: ClusterView, due: tuple[str, ...]) -> list[Action]:
        """From the proposals to orders, and the record of all of it."""
        orders, notices = self._decisions.look(now_s, view, self.bounds)
        reading, counts, heard = self.traffic.at(now_s), self._counts(view), self._heard(view, now_s)
        votes = self.fast.votes(now_s, counts, heard, reading) if "load" in due else {}
        for one in self._claims(now_s, counts, votes):
            self._patience[one.role].wants_fewer(one.want < one.current)
        claims = self._claims(now_s, counts, votes)
        verdicts = self._judged(claims)
        if self.settings.advisory:
            verdicts = {role: only_said(v, counts[role].current) for role, v in verdicts.items()}
        else:
            orders += self._decisions.execute(view, counts, verdicts)
        self._records += 1
        decided = any(getattr(order, "decision_id", None) is not None for order in orders)
        note = Tick(
            number=self._records,
            due=due,
            demand=records.demand(self.traffic, reading, now_s),
            forecasts=records.forecasts(self.traffic, self.settings),
            models=records.step_costs(self.models, now_s),
            roles=records.role_ticks(claims, verdicts, self.slow.needs, votes, self.asking.answers, heard),
            gpus=records.gpus(claims, self.settings),
            budget=self.bounds.most,
            notices=tuple(notices),
            decision_id=self._decisions.number if decided else None,
            plan=self.asking.plan,
            trusted=self.asking.trusted,
        )
        return [*orders, NotePlan(tick=note, reason=_told(note))]

    def _counts(self, view: ClusterView) -> dict[Role, Count]:
        return {role: self._fleet.count(view, role) for role in self._patience}

    def _heard(self, view: ClusterView, now_s: float) -> dict[Role, Heard]:
        return {role: self.passes.heard(view, role, now_s) for role in self._patience}

    def _claims(
        self, now_s: float, counts: Mapping[Role, Count], votes: Mapping[Role, Vote], *, ruled: bool = False
    ) -> list[Claim]:
        """Every role before the constraints; `ruled`: by the forecast alone, whatever the twin or the engines say."""
        closed = self.settings.confirm and self._decisions.open is not None
        claims = []
        for role, count in counts.items():
            need, said, patience = self.slow.needs.get(role), votes.get(role), self._patience[role]
            start = (
                count.current
                if self.settings.drift_policy == "adopt"
                else self._decisions.held.get(role, count.current)
            )
            if said is not None and said.workers == count.current:
                said = Vote(workers=start, reason=said.reason)  # it wants nothing; what was ordered before stands
            want, reason = wanted(self.settings.scales_load, start, said, need, self.asking.answers.get(role))
            if ruled and need is not None and need.workers is not None:
                want = need.workers
            if self._awake() and want < 1:
                want, reason = 1, PlanReason.NO_CHANGE
            claims.append(
                claim(
                    role,
                    count,
                    want,
                    reason,
                    may_shrink=patience.may_shrink(now_s) and not closed,
                    may_grow=patience.may_grow(now_s),
                    busy=closed or patience.backs_off(now_s),
                )
            )
        return claims

    def _judged(self, claims: list[Claim]) -> dict[Role, Verdict]:
        return judged(claims, self.settings, self.bounds, self.slow.needs)

    def _wake(self, now_s: float, view: ClusterView) -> list[Action]:
        """Somebody came while there was nobody: one worker of each role that has none."""
        asleep = any(self._fleet.count(view, role).current == 0 for role in self._patience)
        self._woken_s = now_s
        self.fast.worked = True
        return self._plan(now_s, view, ("wake",)) if asleep and not self.settings.advisory else []

    def _awake(self) -> bool:
        """Whether somebody came whom no window shows yet."""
        window = self.traffic.window
        return self._woken_s is not None and (window is None or window.t0_s <= self._woken_s)


class WakingPlanner(Planner):
    """A planner that may go down to no worker at all, and so has to hear of every arrival."""

    subscribes: ClassVar[frozenset[type[Event]]] = Planner.subscribes | {RequestArrived}


def build(settings: PlannerSettings, plugins: Mapping[str, Maker] = MappingProxyType({})) -> Planner:
    """The planner for these settings; `plugins` are forecasters by name."""
    to_zero = any(pool.min_endpoint == 0 for pool in settings.pools)
    return WakingPlanner(settings, plugins) if to_zero else Planner(settings, plugins)


def _wait_until(due_s: float) -> SetTimer:
    return SetTimer(name=WAIT, due_s=due_s, background=True, reason="go on without the twin")


def _every(interval_s: float, tick_s: float) -> int:
    return round(interval_s / tick_s)


def _told(tick: Tick) -> str:
    """The tick in one line."""
    return "; ".join(f"{r.role.value} {r.ready}+{r.pending} to {r.final}: {r.reason.value}" for r in tick.roles)
