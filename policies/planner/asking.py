"""The planner's side of a question to the twin: what is asked, what is remembered, and what of an answer is used.

While it is off, late, distrusted or in error, the rules' plan stands; what an answer says stays within two workers of
the rules until a day of trust. Questions go on while there is no trust, or it could never come. It must never tell the
twin what the planner does not know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import xxhash

from policies.cluster.draws import draw
from policies.cluster.ids import Role
from policies.cluster.traffic import TrafficWindow
from policies.cluster.twin_asks import AskTwin, Outcome, Plan, RoleState, Scenario, Snapshot, TwinAnswered
from policies.planner.constrain import Bounds
from policies.planner.fleet import Count
from policies.planner.lookahead import RULE, Choice, Counts, Frame, choose, judged, plans, prescreened
from policies.planner.lookahead_settings import LookaheadSettings
from policies.planner.propose import Need
from policies.planner.samples import Heard
from policies.planner.settings import PlannerSettings
from policies.planner.step_model import StepModel
from policies.planner.trust import Trust
from policies.planner.windows import Traffic

_INTERVALS = 3
_EXTRA = 2
_HIGH = 0.9


def inner(settings: PlannerSettings) -> PlannerSettings:
    """The settings of the planner inside a simulation that a planner asked for: it asks nobody."""
    return replace(settings, lookahead=None)


def horizon_s(settings: PlannerSettings) -> float:
    """How far plans are simulated: three intervals, or until a start of now has served two."""
    interval_s = settings.throughput_adjustment_interval_s
    return max(_INTERVALS * interval_s, settings.startup_s + _EXTRA * interval_s)


def scenarios(traffic: Traffic, settings: PlannerSettings) -> tuple[Scenario, ...]:
    """Demand as foreseen, its 90 % quantile, and as foreseen with errors drawn anew; empty before any traffic.
    The same state, the same paths."""
    interval_s = settings.throughput_adjustment_interval_s
    steps = math.ceil(horizon_s(settings) / interval_s - 1e-9)
    model = traffic.num_req
    paths = {
        "p50": model.path(steps),
        "p90": model.path(steps, _HIGH),
        "bootstrap": model.bootstrap(steps, lambda k: draw(settings.seed, "planner", "path", k)),
    }
    return tuple(
        Scenario(name=name, interval_s=interval_s, arrivals=path, lengths=traffic.lengths, hit_rate=traffic.hit_rate)
        for name, path in paths.items()
        if path
    )


class Asking:
    """Questions, answers and trust. `answers` holds the workers of a used answer by role, until the next answer or
    until nobody waits for one any more; `plan` its name; `waits`: nothing has been done yet at this question."""

    def __init__(self, settings: PlannerSettings, traffic: Traffic, models: Mapping[Role, StepModel]) -> None:
        self._settings, self._traffic, self._models = settings, traffic, models
        self._limits: LookaheadSettings | None = settings.lookahead
        self._trust = Trust(settings.lookahead) if settings.lookahead is not None else None
        self._open: AskTwin | None = None
        self._rule: Counts = ()
        self._current: Counts = ()
        self._foretold: dict[str, float | None] = {}
        self._memo: dict[str, tuple[Outcome, ...]] = {}
        self.answers: dict[Role, int] = {}
        self.plan: str | None = None
        self.unreachable = False
        self.waits = False
        self.asked = self.late = self.distrusted = self.chosen = self.failed = self.inconsistent = 0

    @property
    def on(self) -> bool:
        return self._limits is not None

    @property
    def wait_s(self) -> float:
        return 0.0 if self._limits is None else self._limits.wait_s

    @property
    def trusted(self) -> bool | None:
        """Whether answers are used; None without look-ahead."""
        return None if self._trust is None else self._trust.open

    @property
    def errors(self) -> Mapping[str, float]:
        """How far off the twin has been, by metric."""
        return {} if self._trust is None else self._trust.errors

    def forget(self) -> None:
        """What was answered does not hold any more: the rules do."""
        self.answers, self.plan, self.unreachable, self.waits = {}, None, False, False

    @property
    def open(self) -> bool:
        """Whether an answer is still to come."""
        return self._open is not None

    def bridge(self, now_s: float) -> float | None:
        """Go on without the answer: by the rules. Where an earlier answer is in force, it is not taken back while the
        next one may still come in time (else every interval would go down and up again): until when, or None."""
        question, before = self._open, self.answers
        self.forget()
        if question is None or not before or now_s >= question.deadline_s:
            return None
        rules = dict(zip(before, self._rule, strict=True))
        self.answers = {role: max(n, rules[role]) for role, n in before.items()}
        return question.deadline_s

    # ------------------------------------------------------------ questions

    def ask(
        self,
        now_s: float,
        counts: Mapping[Role, Count],
        heard: Mapping[Role, Heard],
        rule: Mapping[Role, int],
        needs: Mapping[Role, Need],
        bounds: Bounds,
    ) -> AskTwin | None:
        """The question of this interval; None where one is open, too little is known, or the answer is remembered
        (then it is used at once)."""
        limits, work = self._limits, self._traffic.work()
        found = scenarios(self._traffic, self._settings)
        rps = {role: need.capacity.rps for role, need in needs.items() if need.capacity is not None}
        if limits is None or self._open is not None or work is None or not found or len(rps) < len(counts):
            self.forget()
            return None
        frame = self._frame(counts, rule, bounds)
        interval_s = self._settings.throughput_adjustment_interval_s
        offered = prescreened(plans(frame, limits), frame, max(found[0].arrivals) / interval_s, rps, limits.most_asked)
        snapshot = Snapshot(
            taken_s=now_s,
            roles=tuple(self._state(role, count, heard[role]) for role, count in counts.items()),
            hit_rate=self._traffic.hit_rate,
            accept_length=self._traffic.accept_length,
            isl=work.isl,
            osl=work.osl,
        )
        seeds = tuple(range(self._settings.seed, self._settings.seed + limits.seeds))
        question = AskTwin(
            reason=f"{len(offered)} plans on {len(found)} paths of demand",
            query_id=self.asked,
            key=_key(snapshot, offered, found, seeds),
            snapshot=snapshot,
            plans=offered,
            scenarios=found,
            seeds=seeds,
            horizon_s=horizon_s(self._settings),
            deadline_s=now_s + limits.deadline_share * interval_s,
        )
        self._rule, self._current = frame.rule, frame.current
        remembered = self._memo.get(question.key)
        if remembered is not None:
            self.forget()
            self._use(question, remembered, now_s)
            return None
        self.asked += 1
        self._open = question
        return question

    def _frame(self, counts: Mapping[Role, Count], rule: Mapping[Role, int], bounds: Bounds) -> Frame:
        pools = [self._settings.pool(role) for role in counts]
        return Frame(
            roles=tuple(counts),
            current=tuple(count.current for count in counts.values()),
            rule=tuple(rule[role] for role in counts),
            least=tuple(pool.min_endpoint for pool in pools),
            gpus=tuple(pool.gpus for pool in pools),
            budget=bounds.most,
            draining_gpus=sum(c.draining * p.gpus for c, p in zip(counts.values(), pools, strict=True)),
            step=self._settings.max_throughput_scaling_replicas,
            startup_s=self._settings.startup_s,
        )

    def _state(self, role: Role, count: Count, heard: Heard) -> RoleState:
        cost = self._models[role].coefficients
        return RoleState(
            role=role,
            group=self._settings.pool(role).group,
            ready=count.ready,
            pending=count.pending,
            draining=count.draining,
            queued_prefill_tokens=float(sum(e.queued_prefill_tokens for e in heard.engines)),
            queued_decode_kv_tokens=float(sum(e.queued_kv_tokens for e in heard.engines)),
            running_decode_kv_tokens=float(sum(e.running_kv_tokens for e in heard.engines)),
            running_decode_requests=float(sum(e.decode_requests for e in heard.engines)),
            base_s=None if cost is None else cost.base_s,
            per_x_s=None if cost is None else cost.per_x_s,
            per_kv_s=None if cost is None else cost.per_kv_s,
        )

    # ------------------------------------------------------------ answers

    def answered(self, event: TwinAnswered) -> bool:
        """Take in an answer; whether the planner has something to do now: to use it, or not to wait any more."""
        question = self._open
        if question is None or question.query_id != event.query_id:
            return False
        self._open = None
        had = self.waits or bool(self.answers)
        self.forget()
        if event.error is not None or not event.outcomes:
            self.failed += 1
            return had
        if event.at_s > question.deadline_s:
            self.late += 1
            return had
        self._memo[question.key] = event.outcomes
        if self._limits is not None and len(self._memo) > self._limits.memo:
            del self._memo[next(iter(self._memo))]
        return self._use(question, event.outcomes, event.at_s) or had

    def compare(self, window: TrafficWindow) -> None:
        """What the twin had foretold for a window, against what was seen."""
        if self._trust is None or not self._foretold:
            return
        seen = {"ttft_p95_s": window.ttft_p95_s, "itl_p95_s": window.itl_p95_s}
        self._trust.compare(self._foretold, seen, window.completed, window.at_s)

    def _use(self, question: AskTwin, outcomes: tuple[Outcome, ...], now_s: float) -> bool:
        """Choose; whether the choice is used. What the plan in force was said to come to is kept, to be compared."""
        assert self._limits is not None
        assert self._trust is not None
        by_plan = [[o for o in outcomes if o.plan == i] for i in range(len(question.plans))]
        found = [judged(plan, runs) for plan, runs in zip(question.plans, by_plan, strict=True) if runs]
        if not found:
            return False
        choice = choose(found, self._current, self._limits)
        if not self._trust.open:
            self.distrusted += 1
            rule = next((one for one in found if one.plan.name == RULE), choice.judged)
            self._foretold = {"ttft_p95_s": rule.ttft_p95_s, "itl_p95_s": rule.itl_p95_s}
            return False
        self._foretold = {"ttft_p95_s": choice.judged.ttft_p95_s, "itl_p95_s": choice.judged.itl_p95_s}
        self.inconsistent += choice.inconsistent
        self.chosen += choice.plan.name != RULE
        self.unreachable = choice.unreachable
        self._answer(choice, self._trust.proven(now_s))
        return True

    def _answer(self, choice: Choice, proven: bool) -> None:
        """The first step of the plan, within the envelope around the rules."""
        assert self._limits is not None
        reach = self._limits.reach
        for count, rule in zip(choice.plan.steps[0].counts, self._rule, strict=True):
            n = count.workers if proven else min(max(count.workers, rule - reach), rule + reach)
            self.answers[count.role] = n
        self.plan = choice.plan.name


def _key(snapshot: Snapshot, offered: tuple[Plan, ...], found: tuple[Scenario, ...], seeds: tuple[int, ...]) -> str:
    """A name for all that the answer depends on; when it was asked is not part of it."""
    text = repr((replace(snapshot, taken_s=0.0), offered, found, seeds))
    return f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"
