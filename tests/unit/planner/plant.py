"""A toy cluster for tests of the planner: a load function, queues as fluids, start-up, drain; exact and instantaneous.

It does what a world owes (every order ends once; the invariants watch), makes windows of traffic and forward passes of
the reference costs, and bills GPUs from the order of a start until a worker is gone. Nothing here is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from builders import worker

from policies.cluster.actions import Action, AddWorker, CancelStart, DrainWorker, RecallWorker, SetTimer
from policies.cluster.controller import Controller
from policies.cluster.events import (
    Event,
    RequestArrived,
    RequestRejected,
    TimerFired,
    WorkerDraining,
    WorkerEvent,
    WorkerLost,
    WorkerRecalled,
    WorkerStartCancelled,
    WorkerStartFailed,
    WorkerStarting,
)
from policies.cluster.ids import RequestId, Role, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.journal import Header, Journal, replay
from policies.cluster.ticks import NotePlan, RoleTick, Tick
from policies.cluster.traffic import ForwardPass, PassLoad, TrafficWindow, WindowKind
from policies.cluster.twin_asks import AskTwin, Outcome, TwinAnswered
from policies.planner.planner import Planner, build
from policies.planner.settings import PlannerSettings, PoolSettings
from policies.planner.step_model import StepCoefficients

COSTS = {
    Role.PREFILL: StepCoefficients(base_s=0.010, per_x_s=20e-6),
    Role.DECODE: StepCoefficients(base_s=0.004, per_x_s=0.2e-3, per_kv_s=0.1e-6),
    Role.MIXED: StepCoefficients(base_s=0.010, per_x_s=20e-6, per_kv_s=0.1e-6),
}
ISL, OSL = 3000, 150
RPS = {Role.PREFILL: 15.384615, Role.DECODE: 12.078510, Role.MIXED: 7.523848}
"""Requests per second of one worker within 500 and 50 ms: M1, M6, M10."""
MOST = 8192
_WORKER, _PASS, _WINDOW, _TIMER = range(4)


def planned(*roles: Role, prior: bool = True, g: int = 1, **changes: object) -> PlannerSettings:
    """Settings for some roles, target sla, the reference costs known beforehand."""
    roles = roles or (Role.PREFILL,)
    pool_changes = {key: changes.pop(key) for key in ("min_endpoint",) if key in changes}
    pools = tuple(
        PoolSettings(
            role=role,
            group=role.value,
            engine_num_gpu=g,
            prior=COSTS[role] if prior else None,
            **pool_changes,  # type: ignore[arg-type]
        )
        for role in roles
    )
    mode = {(Role.PREFILL,): "prefill", (Role.DECODE,): "decode", (Role.MIXED,): "agg"}.get(roles, "disagg")
    given: dict[str, object] = {"optimization_target": "sla", "max_gpu_budget": 64, "load_scaling": False, **changes}
    return PlannerSettings(pools=pools, mode=mode, **given)  # type: ignore[arg-type]


@dataclass
class Plant:
    """One run. `load(t)` is requests per second. `window(i, w)` may change window i, or leave it out (None). `slow(id,
    age)` multiplies a worker's step times; `silent(id, t)` keeps its passes back; `start(id)` says ok, never or fails.
    """

    settings: PlannerSettings
    load: Callable[[float], float]
    start_with: Mapping[Role, int]
    window: Callable[[int, TrafficWindow], TrafficWindow | None] = lambda _, w: w
    slow: Callable[[int, float], float] = lambda _, __: 1.0
    silent: Callable[[int, float], bool] = lambda _, __: False
    start: Callable[[int], str] = lambda _: "ok"
    twin: Callable[[AskTwin], tuple[Outcome, ...]] | None = None
    think_s: float = 0.0
    drain_s: float = 20.0
    told_after_s: float = 0.0  # from the order to drain until it is heard of
    startup_s: float | None = None
    passes: int = 1
    journaled: bool = False
    planner: Planner | None = None
    now_s: float = 0.0
    billed_s: dict[int, float] = field(default_factory=dict)
    ticks: list[tuple[float, Tick]] = field(default_factory=list)
    orders: list[tuple[float, Action]] = field(default_factory=list)
    counts: list[tuple[float, dict[Role, int]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.planner = self.planner or build(self.settings)
        self.journal = Journal(self.lines.append, Header(versions={}, config={}, seed=0, policies=("Planner",)))
        self.controller = Controller([self.planner], self.journal if self.journaled else None)
        self.invariants = Invariants()
        self.queue: dict[Role, float] = {pool.role: 0.0 for pool in self.settings.pools}
        self._todo: list[tuple[float, int, int, Callable[[], None]]] = []
        self._seq = self._next_id = self._passes = 0
        self._timers: dict[str, int] = {}
        self._leaves: dict[WorkerId, int] = {}
        self._since_s: dict[WorkerId, float] = {}
        if self.startup_s is None:
            self.startup_s = self.settings.startup_s
        for role, n in self.start_with.items():
            for _ in range(n):
                self._up(self._new_id(), role)
        self.counts.append((0.0, dict(self.start_with)))
        if self.settings.scales_load or any(pool.prior is None for pool in self.settings.pools):
            self.at(self.settings.load_adjustment_interval_s, _PASS, self._pass)
        self.at(self.settings.throughput_adjustment_interval_s, _WINDOW, lambda: self._window(0))

    # ------------------------------------------------------------ what a test asks

    def run(self, until_s: float) -> Plant:
        while self._todo and self._todo[0][0] <= until_s:
            self.now_s, _, _, do = heapq.heappop(self._todo)
            do()
        self.now_s = until_s
        return self

    def n(self, role: Role) -> int:
        """Workers that take work."""
        return len(self.controller.view.live_of(role))

    def seen(self, role: Role) -> list[int]:
        """Workers that take work after each tick, one after the other, repeats left out."""
        found: list[int] = []
        for _, now in self.counts:
            if not found or found[-1] != now[role]:
                found.append(now[role])
        return found

    def role_ticks(self, role: Role) -> list[tuple[float, RoleTick]]:
        return [(t, one) for t, tick in self.ticks for one in tick.roles if one.role is role]

    def reasons(self, role: Role) -> list[str]:
        return [one.reason.value for _, one in self.role_ticks(role)]

    def finals(self, role: Role) -> list[int]:
        return [one.final for _, one in self.role_ticks(role)]

    def changes(self, kind: type[Action] | None = None) -> list[tuple[float, Action]]:
        """Orders that change counts."""
        kinds = (AddWorker, DrainWorker, CancelStart, RecallWorker) if kind is None else (kind,)
        return [(t, order) for t, order in self.orders if isinstance(order, kinds)]

    def gpu_s(self) -> float:
        open_s = sum(self.now_s - since_s for since_s in self._since_s.values())
        return sum(self.billed_s.values()) + open_s

    def check_replay(self) -> None:
        """The journal, through a fresh planner, gives the same orders and records."""
        assert self.journaled
        self.journal.flush()
        lines = "".join(self.lines).splitlines()
        difference = replay(lines, [build(self.settings)])
        assert difference is None, str(difference)

    # ------------------------------------------------------------ time

    def at(self, at_s: float, order: int, do: Callable[[], None]) -> int:
        self._seq += 1
        heapq.heappush(self._todo, (at_s, order, self._seq, do))
        return self._seq

    def post(self, event: Event) -> None:
        actions = self.controller.step(event)
        self.invariants.observe(event, actions)
        if isinstance(event, WorkerEvent):
            self.invariants.audit(self.controller.view)
        for action in actions:
            self._do(action)
        if isinstance(event, TimerFired):
            self.counts.append((self.now_s, {role: self.n(role) for role in self.queue}))

    def _do(self, action: Action) -> None:
        self.orders.append((self.now_s, action))
        match action:
            case SetTimer():
                key = self.at(action.due_s, _TIMER, lambda: self._fire(action.name, key))
                self._timers[action.name] = key
            case AddWorker():
                self._begin(action)
            case CancelStart():
                if action.worker_id in self.controller.view.starting:
                    self._gone(action.worker_id)
                    self.post(WorkerStartCancelled(at_s=self.now_s, worker_id=action.worker_id))
            case DrainWorker() if self.told_after_s:
                self.at(self.now_s + self.told_after_s, _WORKER, lambda: self.drain(action.worker_id))
            case DrainWorker():
                self.drain(action.worker_id)
            case RecallWorker():
                self._leaves.pop(action.worker_id, None)
                self.post(WorkerRecalled(at_s=self.now_s, worker_id=action.worker_id))
            case NotePlan():
                self.ticks.append((self.now_s, action.tick))
            case AskTwin():
                answer = () if self.twin is None else self.twin(action)
                self.at(self.now_s + self.think_s, _PASS, lambda: self._answer(action.query_id, answer))
            case _:
                raise AssertionError(action)

    def _fire(self, name: str, key: int) -> None:
        if self._timers.get(name) == key:
            self.post(TimerFired(at_s=self.now_s, name=name))

    def _answer(self, query_id: int, outcomes: tuple[Outcome, ...]) -> None:
        self.post(TwinAnswered(at_s=self.now_s, query_id=query_id, outcomes=outcomes))

    # ------------------------------------------------------------ workers

    def _new_id(self) -> WorkerId:
        self._next_id += 1
        return WorkerId(self._next_id - 1)

    def _begin(self, order: AddWorker) -> None:
        assert order.role is not None
        assert order.decision_id is not None
        worker_id, role = self._new_id(), order.role
        self._since_s[worker_id] = self.now_s
        self.post(
            WorkerStarting(
                at_s=self.now_s, worker_id=worker_id, name=f"w{worker_id}", role=role, group=order.group,
                decision_id=order.decision_id,
            )
        )  # fmt: skip
        how = self.start(worker_id)
        assert self.startup_s is not None
        if how == "ok":
            self.at(self.now_s + self.startup_s, _WORKER, lambda: self._ready(worker_id, role))
        elif how == "fails":
            self.at(self.now_s + self.startup_s, _WORKER, lambda: self._fail(worker_id))

    def _ready(self, worker_id: WorkerId, role: Role) -> None:
        if worker_id in self.controller.view.starting:
            self._up(worker_id, role)

    def _fail(self, worker_id: WorkerId) -> None:
        if worker_id in self.controller.view.starting:
            self._gone(worker_id)
            self.post(WorkerStartFailed(at_s=self.now_s, worker_id=worker_id, reason="no GPU"))

    def _up(self, worker_id: WorkerId, role: Role) -> None:
        self._since_s.setdefault(worker_id, self.now_s)
        self.post(worker(worker_id, at_s=self.now_s, role=role))

    def add_by_hand(self, role: Role) -> None:
        self._up(self._new_id(), role)

    def drain(self, worker_id: WorkerId) -> None:
        self.post(WorkerDraining(at_s=self.now_s, worker_id=worker_id))
        key = self.at(self.now_s + self.drain_s, _WORKER, lambda: self._leave(worker_id, key))
        self._leaves[worker_id] = key

    def _leave(self, worker_id: WorkerId, key: int) -> None:
        if self._leaves.get(worker_id) == key:
            self._gone(worker_id)
            self.post(WorkerLost(at_s=self.now_s, worker_id=worker_id, reason="drained"))

    def _gone(self, worker_id: WorkerId) -> None:
        self.billed_s[worker_id] = self.now_s - self._since_s.pop(worker_id)

    def arrive(self, name: str = "r") -> None:
        """One request, which nobody takes (there is no router here)."""
        self.post(RequestArrived(at_s=self.now_s, request_id=RequestId(name), isl=ISL))
        self.post(RequestRejected(at_s=self.now_s, request_id=RequestId(name), reason="no router"))

    # ------------------------------------------------------------ demand and engines

    def _window(self, i: int) -> None:
        step_s = self.settings.throughput_adjustment_interval_s
        t0_s = self.now_s - step_s
        num_req = sum(self.load(t0_s + (k + 0.5) * step_s / 60) for k in range(60)) * step_s / 60
        told = self.window(
            i,
            TrafficWindow(
                at_s=self.now_s, t0_s=t0_s, t1_s=self.now_s, kind=WindowKind.OBSERVED, num_req=num_req,
                isl=ISL if num_req else None, osl=OSL if num_req else None,
            ),
        )  # fmt: skip
        if told is not None:
            self.post(told)
        self.at(self.now_s + step_s, _WINDOW, lambda: self._window(i + 1))

    def _pass(self) -> None:
        step_s = self.settings.load_adjustment_interval_s
        for role in self.queue:
            live = self.controller.view.live_of(role)
            rate = self.load(self.now_s - step_s / 2)
            if role is not Role.DECODE:
                most = len(live) * MOST / COSTS[role].seconds(MOST)
                self.queue[role] = max(0.0, self.queue[role] + step_s * (rate * ISL - most))
            for one in live:
                if not self.silent(one.worker_id, self.now_s):
                    for k in range(self.passes):
                        self._tell(one.worker_id, role, rate / len(live), k)
        self.at(self.now_s + step_s, _PASS, self._pass)

    def _tell(self, worker_id: WorkerId, role: Role, rate: float, k: int) -> None:
        self._passes += 1
        queued = self.queue[role] / max(1, self.n(role))
        b = concurrency(rate) if role is not Role.PREFILL else 0.0
        kv = b * (ISL + OSL // 2) * (1 + 0.01 * k)  # passes of one report differ a little
        tokens = min(MOST, rate * ISL * 0.1 * (1 + 0.3 * k)) if role is not Role.DECODE else 0.0
        x = b if role is Role.DECODE else tokens
        seconds = COSTS[role].seconds(x, kv) if x or kv else 0.0
        up_s = self.controller.view.workers[worker_id].up.at_s
        self.post(
            ForwardPass(
                at_s=self.now_s,
                worker_id=worker_id,
                counter=self._passes,
                wall_time_s=seconds * self.slow(worker_id, self.now_s - up_s),
                scheduled=PassLoad(sum_prefill_tokens=tokens, num_decode_requests=b, sum_decode_kv_tokens=kv),
                queued=PassLoad(sum_prefill_tokens=queued),
            )
        )


def concurrency(rate: float) -> float:
    """Sequences that a decode worker runs at a rate of requests per second: b = rate · osl · itl(b), at most 256."""
    cost, ctx = COSTS[Role.DECODE], ISL + OSL // 2
    left = 1 - rate * OSL * (cost.per_x_s + cost.per_kv_s * ctx)
    return min(256.0, rate * OSL * cost.base_s / left) if left > 0 else 256.0


def changed(window: TrafficWindow, kind: WindowKind, **changes: object) -> TrafficWindow:
    return replace(window, kind=kind, **changes)  # type: ignore[arg-type]


def distinct(values: Iterable[int]) -> list[int]:
    """The values with repeats in a row left out."""
    found: list[int] = []
    for value in values:
        if not found or found[-1] != value:
            found.append(value)
    return found
