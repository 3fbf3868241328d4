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
from policies.planner.constrain import Bounds, Claim, Verdict, constrain
from policies.planner.experience import Experience
from policies.planner.fleet import Count, Fleet
from policies.planner.forecast.build import Maker, forecaster
from policies.planner.forecast.guarded import Guarded
from policies.planner.load import Vote
from policies.planner.merge import Kind, Proposal, merged
from policies.planner.patience import Patience
from policies.planner.propose import Need, needs, vote
from policies.planner.samples import Heard, Passes
from policies.planner.settings import PlannerSettings
from policies.planner.step_model import StepModel
from policies.planner.windows import Reading, Traffic

TICK, WAIT = "tick", "planner-twin"

_WORKERS: frozenset[type[Event]] = frozenset(
    {WorkerUp, WorkerLost, WorkerDraining, WorkerRecalled, WorkerStarting, WorkerStartFailed, WorkerStartCancelled}
)
_HOLDS = (PlanReason.NO_CHANGE, PlanReason.REFUSED_CONSOLIDATION)


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
        self.counters: dict[str, int] = {}
        """What happened how often, beside what records tell: `scale_changes.<role>.<dir>`, `budget_clamped`,
        `external_changes`, `start_failed.<role>`, `scale_timeout.<role>`, `decisions_failed`."""
        self.asking = Asking(s, self.traffic, self.models)
        self._fleet = Fleet()
        self._patience = {pool.role: Patience(s) for pool in s.pools}
        self._past = {pool.role: Experience(s.hold_s, s.load_scaling_down_sensitivity) for pool in s.pools}
        self._needs: dict[Role, Need] = {}
        self._held: dict[Role, int] = {}  # what each role was last left at
        self._open_decision: int | None = None
        self._decisions = self._ticks = self._records = 0
        self._begun_s: float | None = None
        self._woken_s: float | None = None
        self._worked = False  # whether any engine has been seen at work

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
                self._ended(event)
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
                    self._patience[role].failed(event.at_s)
                    self._count(f"start_failed.{role.value}")

    def _ended(self, event: ScaleDone | ScaleFailed) -> None:
        if event.decision_id == self._open_decision:
            self._open_decision = None
        if isinstance(event, ScaleFailed):
            self._count("decisions_failed")

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
            reading = self.traffic.at(now_s)
            self._needs = self._slow(reading, view)
            asked = self._ask(now_s, view)
            orders += asked
            slow = not asked
        due = ("throughput",) * slow + ("load",) * fast
        return orders + self._plan(now_s, view, due) if due else orders

    def _slow(self, reading: Reading, view: ClusterView) -> dict[Role, Need]:
        """What the forecast needs. The fast loop is given how few there may be: then each bound starts from the last
        one, and needs what the very next interval does; else an order of now must last until it is ready."""
        s = self.settings
        interval_s = s.throughput_adjustment_interval_s
        ahead = self.traffic.num_req.path(1 if s.scales_load else s.horizon)
        rps = max(ahead) / interval_s if ahead else None
        now: dict[Role, int] = {}
        for pool in s.pools:
            before = self._needs.get(pool.role)
            bound = pool.min_endpoint if before is None or before.workers is None else before.workers
            now[pool.role] = bound if s.scales_load else self._fleet.count(view, pool.role).current
        found = needs(s, self.models, reading, self.traffic.work(), rps, now)
        return {role: self._kept(role, need) for role, need in found.items()} if s.scales_load else found

    def _kept(self, role: Role, need: Need) -> Need:
        """A bound stays while nothing new can be told."""
        before = self._needs.get(role)
        if need.workers is not None or before is None or before.workers is None:
            return need
        return Need(workers=before.workers, hold=need.hold, capacity=before.capacity)

    def _ask(self, now_s: float, view: ClusterView) -> list[Action]:
        """Ask the twin, where that is wanted and possible: then the answer is waited for."""
        if not self.asking.on or any(need.hold is not None for need in self._needs.values()):
            self.asking.forget()
            return []
        counts = {role: self._fleet.count(view, role) for role in self._patience}
        heard = {role: self.passes.heard(view, role, now_s) for role in self._patience}
        claims = [self._claim(role, count, None, now_s, ruled=True) for role, count in counts.items()]
        rule = {role: verdict.final for role, verdict in self._judged(claims).items()}
        question = self.asking.ask(now_s, counts, heard, rule, self._needs, self.bounds)
        if question is None:
            return []
        self.asking.waits = True
        return [question, _wait_until(now_s + self.asking.wait_s)]

    def _plan(self, now_s: float, view: ClusterView, due: tuple[str, ...]) -> list[Action]:
        """From the proposals to orders, and the record of all of it."""
        orders, notices = self._look(now_s, view)
        counts = {role: self._fleet.count(view, role) for role in self._patience}
        reading = self.traffic.at(now_s)
        heard = {role: self.passes.heard(view, role, now_s) for role in self._patience}
        self._worked = self._worked or any(not e.idle for h in heard.values() for e in h.engines)
        votes = self._votes(now_s, counts, heard, reading) if "load" in due else {}
        for claim in self._claims(now_s, counts, votes):
            self._patience[claim.role].wants_fewer(claim.want < claim.current)
        claims = self._claims(now_s, counts, votes)
        verdicts = self._judged(claims)
        if self.settings.advisory:
            verdicts = {role: _only_said(v, counts[role].current) for role, v in verdicts.items()}
        else:
            orders += self._execute(view, counts, verdicts)
        self._records += 1
        decided = [a for a in orders if getattr(a, "decision_id", None) is not None]
        note = Tick(
            number=self._records,
            due=due,
            demand=records.demand(self.traffic, reading, now_s),
            forecasts=records.forecasts(self.traffic, self.settings),
            models=records.step_costs(self.models, now_s),
            roles=tuple(
                records.role_tick(
                    claim,
                    verdicts[claim.role],
                    self._needs.get(claim.role),
                    votes.get(claim.role),
                    self.asking.answers.get(claim.role),
                    heard[claim.role],
                )
                for claim in claims
            ),
            gpus=records.gpus(claims, self.settings),
            budget=self.bounds.most,
            notices=tuple(notices),
            decision_id=self._decisions if decided else None,
            plan=self.asking.plan,
            trusted=self.asking.trusted,
        )
        return [*orders, NotePlan(tick=note, reason=_told(note))]

    def _look(self, now_s: float, view: ClusterView) -> tuple[list[Action], list[str]]:
        """What somebody should know; starts that take too long are given up."""
        orders: list[Action] = []
        reading = self.traffic.at(now_s)
        notices = list(reading.flags)
        if reading.hold is PlanReason.NO_DATA and self.traffic.silent_s(now_s) > self.settings.no_data_alarm_s:
            notices.append("no_data_alarm")
        for role, patience in self._patience.items():
            count = self._fleet.count(view, role)
            if patience.look(count, now_s):
                notices.append(f"scale_timeout.{role.value}")
                self._count(f"scale_timeout.{role.value}")
                self._open_decision = None
                if not self.settings.advisory:
                    orders += self._fleet.cancel_all(view, role, "not up in time: given up, tried again later")
            if patience.alarmed:
                notices.append(f"starts_fail.{role.value}")
            if self._fleet.strangers_of(role) and role in self._held:
                notices.append(f"external_change.{role.value}")
                self._count("external_changes")
        if self.bounds.most is not None and self.settings.least_gpus > self.bounds.most:
            notices.append("budget_below_minimum")
        return orders, notices

    def _votes(
        self, now_s: float, counts: Mapping[Role, Count], heard: Mapping[Role, Heard], reading: Reading
    ) -> dict[Role, Vote]:
        """The fast loop; who has not seen any work yet waits for it before it shrinks."""
        assert self._begun_s is not None
        waits = not self._worked and not self.traffic.seen_traffic and now_s - self._begun_s < self.settings.hold_s
        work, rps = self.traffic.work(), self._rps(reading)
        found = {}
        for role, count in counts.items():
            said = vote(self.settings, self.models[role], heard[role], count, work, role)
            idle = all(engine.idle for engine in heard[role].engines)
            if said.workers > count.current and not count.pending:
                self._past[role].grew(count.ready, rps, now_s)
            if said.workers < count.current and (waits or not self._bounded(role)):
                said = Vote(workers=count.current, reason=PlanReason.AWAITING_FIRST_TRAFFIC)
            elif said.workers < count.current and self._past[role].forbids(said.workers, rps, now_s):
                said = Vote(workers=count.current, reason=PlanReason.REFUSED_CONSOLIDATION)
            elif count.current == 1 and idle and self._nobody_comes(role, reading):
                said = Vote(workers=0, reason=PlanReason.SCALE_DOWN)
            found[role] = said
        return found

    def _rps(self, reading: Reading) -> float | None:
        """The demand of the last window in requests per second; None where it is not known."""
        return None if reading.fed is None else reading.fed / self.settings.throughput_adjustment_interval_s

    def _bounded(self, role: Role) -> bool:
        """Whether the slow loop, where it runs, has said how few there may be: before, the fast one never shrinks."""
        need = self._needs.get(role)
        return not self.settings.scales_throughput or (need is not None and need.workers is not None)

    def _nobody_comes(self, role: Role, reading: Reading) -> bool:
        """Whether the last worker of a role may go: none need be there, and none has come or is expected."""
        need = self._needs.get(role)
        expected = need is not None and need.workers
        return self.settings.pool(role).min_endpoint == 0 and reading.fed == 0 and not expected

    # ------------------------------------------------------------ reconcile, constrain

    def _claims(self, now_s: float, counts: Mapping[Role, Count], votes: Mapping[Role, Vote]) -> list[Claim]:
        return [self._claim(role, counts[role], votes.get(role), now_s) for role in self._patience]

    def _claim(self, role: Role, count: Count, said: Vote | None, now_s: float, *, ruled: bool = False) -> Claim:
        """One role before the constraints; `ruled`: by the forecast alone, whatever the twin or the engines say."""
        need, patience = self._needs.get(role), self._patience[role]
        start = count.current if self.settings.drift_policy == "adopt" else self._held.get(role, count.current)
        if said is not None and said.workers == count.current:
            said = Vote(workers=start, reason=said.reason)  # it wants nothing; what was ordered before stands
        want, reason = self._reconciled(role, start, said, need)
        if ruled and need is not None and need.workers is not None:
            want = need.workers
        if self._awake() and want < 1:
            want, reason = 1, PlanReason.NO_CHANGE
        closed = self.settings.confirm and self._open_decision is not None
        return Claim(
            role=role,
            ready=count.ready,
            pending=count.pending,
            draining=count.draining,
            recallable=count.recallable,
            want=want,
            reason=_direction(want, count.current, reason),
            patient=patience.may_shrink(now_s) and not closed,
            cool_up=patience.may_grow(now_s),
            growing=count.pending > 0 or patience.backs_off(now_s) or closed,
        )

    def _reconciled(self, role: Role, start: int, said: Vote | None, need: Need | None) -> tuple[int, PlanReason]:
        """The proposals made into one: with a fast loop the slow one says how few, else how many."""
        slow = self.asking.answers.get(role, None if need is None else need.workers)
        hold = None if need is None else need.hold
        if not self.settings.scales_load:
            if slow is None:
                return start, hold or PlanReason.NO_CHANGE
            return slow, PlanReason.NO_CHANGE
        proposals = []
        if said is not None:
            proposals.append(Proposal(kind=Kind.SET, workers=said.workers, by="load"))
        if slow is not None:
            proposals.append(Proposal(kind=Kind.AT_LEAST, workers=slow, by="throughput"))
        want = merged(proposals, start)
        assert want is not None
        reason = said.reason if said is not None else hold or PlanReason.NO_CHANGE
        if said is not None and said.workers < start <= want:
            reason = PlanReason.CAPPED_BY_THROUGHPUT
        return want, reason

    def _judged(self, claims: list[Claim]) -> dict[Role, Verdict]:
        found = constrain(claims, self.settings, self.bounds)
        for claim in claims:
            verdict, need = found[claim.role], self._needs.get(claim.role)
            unreachable = need is not None and need.capacity is not None and need.capacity.unreachable
            if unreachable and verdict.final == claim.current and verdict.reason is PlanReason.NO_CHANGE:
                found[claim.role] = Verdict(
                    bounded=verdict.bounded, final=verdict.final, reason=PlanReason.SLA_UNREACHABLE
                )
        return found

    # ------------------------------------------------------------ execute

    def _execute(
        self, view: ClusterView, counts: Mapping[Role, Count], verdicts: Mapping[Role, Verdict]
    ) -> list[Action]:
        targets = {}
        for role, verdict in verdicts.items():
            current = counts[role].current
            if verdict.reason in (PlanReason.BUDGET_FIT, PlanReason.BUDGET_HOLD):
                self._count("budget_clamped")
            self._held[role] = verdict.final
            if verdict.final != current:
                direction = "up" if verdict.final > current else "down"
                self._count(f"scale_changes.{role.value}.{direction}")
                targets[role] = (verdict.final, f"{verdict.reason.value}: {role.value} {current} to {verdict.final}")
        if not targets:
            return []
        pools = {pool.role: pool for pool in self.settings.pools}
        decision_id = self._decisions + 1
        orders = list(self._fleet.orders(view, targets, pools, decision_id, self.settings.drain_timeout_s))
        if orders:
            self._decisions = decision_id
            self._open_decision = decision_id
            for role in targets:
                self._patience[role].ordered()
        return orders

    def _wake(self, now_s: float, view: ClusterView) -> list[Action]:
        """Somebody came while there was nobody: one worker of each role that has none."""
        asleep = any(self._fleet.count(view, role).current == 0 for role in self._patience)
        self._woken_s = now_s
        self._worked = True
        return self._plan(now_s, view, ("wake",)) if asleep and not self.settings.advisory else []

    def _awake(self) -> bool:
        """Whether somebody came whom no window shows yet."""
        window = self.traffic.window
        return self._woken_s is not None and (window is None or window.t0_s <= self._woken_s)

    def _count(self, what: str) -> None:
        self.counters[what] = self.counters.get(what, 0) + 1


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


def _direction(want: int, current: int, reason: PlanReason) -> PlanReason:
    """The reason of a proposal, before anything constrains it."""
    if want > current:
        return PlanReason.SCALE_UP
    if want < current:
        return PlanReason.SCALE_DOWN
    return PlanReason.NO_CHANGE if reason in (PlanReason.SCALE_UP, PlanReason.SCALE_DOWN) else reason


def _only_said(verdict: Verdict, current: int) -> Verdict:
    """Advisory: what would have been ordered, said and not done."""
    if verdict.final == current:
        return verdict
    return Verdict(bounded=verdict.bounded, final=verdict.final, reason=PlanReason.ADVISORY)


def _told(tick: Tick) -> str:
    """The tick in one line."""
    return "; ".join(f"{r.role.value} {r.ready}+{r.pending} to {r.final}: {r.reason.value}" for r in tick.roles)
