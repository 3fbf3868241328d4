"""One simulated worker: what SimPy events do to one engine.

It plans, waits for the end, commits, hands the outcome to the world, and starts again; an arrival in the middle of a
leap moves its end. Which worker gets what is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from simpy.events import Event

from policies.cluster.events import WorkerUp
from policies.cluster.ids import WorkerId
from twin.engine.plan import Look, Outcome, StepPlan
from twin.engine.protocol import Engine
from twin.engine.sequence import Sequence
from twin.engine.ticks import before
from twin.mocker.clock import Clock, Order, is_pending
from twin.perf.protocol import LatencyModel

if TYPE_CHECKING:
    from twin.engine.loading import HostLoad
    from twin.mocker.hostlanes import HostLane, Loading


class MockWorker:
    """A worker of the simulated world. `lane` is what loads from host memory cross, where it has any.

    `on_step` is called at the end of each step or leap, with what came of it; `on_evicting` when a leap begins that
    will evict cached blocks on its way (`plan.evict_s`).
    """

    __slots__ = (
        "_at_step_end",
        "_clock",
        "_dropped",
        "_idle",
        "_lane",
        "_loaded",
        "_loads",
        "_moving",
        "_on_end",
        "_on_evicting",
        "_on_start",
        "_on_step",
        "_plan",
        "_step_end",
        "_step_start",
        "_wake",
        "attentive",
        "down",
        "down_s",
        "engine",
        "fenced",
        "hung",
        "up",
    )

    def __init__(
        self,
        clock: Clock,
        engine: Engine,
        up: WorkerUp,
        on_step: Callable[[MockWorker, Outcome], None],
        on_evicting: Callable[[MockWorker, StepPlan], None],
        lane: HostLane | None = None,
    ) -> None:
        self._clock = clock
        self.engine = engine
        self.up = up
        self._on_step = on_step
        self._on_evicting = on_evicting
        self._step_end = Order.STEP_END + up.worker_id
        self._step_start = Order.STEP_START + up.worker_id
        self.attentive = False  # somebody waits for the end of the very next step: no leap may go past it
        self._plan: StepPlan | None = None
        self._idle = self._wake = Event(clock)
        self._on_start, self._on_end = (self._next,), (self._end,)  # whom a step that begins, or ends, wakes
        self._dropped: list[Sequence] = []
        self._lane = lane
        self._loads: list[HostLoad] = getattr(engine, "pending_loads", [])
        self._moving: dict[HostLoad, Loading | None] = {}
        self._loaded: list[Sequence] = []  # loads that came up during the running step
        self._at_step_end: list[Callable[[], None]] = []  # to be done when the running step is over
        self.down = False  # gone, with all that it had
        self.down_s: float | None = None  # since when
        self.fenced = False  # known to be gone: what it said before is not believed any more
        self.hung = False  # takes requests and does nothing
        self._rest()

    @property
    def worker_id(self) -> WorkerId:
        return self.up.worker_id

    def submit(self, seq: Sequence) -> str | None:
        """Give the engine a request now; returns its reason when it refuses. Lost on a worker that is down."""
        if self.down:
            return None
        refusal = self.engine.submit(seq)
        if refusal is not None:
            return refusal
        plan = self._plan
        if plan is None:
            self.nudge()
        elif (plan.steps > 1 or plan.settled) and not self.engine.head_is_blocked:
            self.cut()
        return None

    @property
    def plan(self) -> StepPlan | None:
        """The step or leap that is under way."""
        return self._plan

    @property
    def busy(self) -> bool:
        """Whether a step (or a leap) is under way."""
        return self._plan is not None

    def between_steps(self) -> bool:
        """Whether no step is under way at this very instant: idle, or inside a leap where one step ends and another
        is about to begin. The engine's books are then those of this instant."""
        plan = self._plan
        if plan is None:
            return True
        if self.hung:
            return False
        self._settle(plan)
        return plan.settled and plan.start_s == self._clock.now

    def nudge(self) -> None:
        """There may be something to do: an idle worker looks again, at this instant, when everything else is done."""
        if self._plan is None and not self.hung and is_pending(self._idle):
            self._clock.put(self._idle, self._clock.now, self._step_start)

    def attend(self) -> None:
        """Blocks have made room between its steps: what is to become of them is seen to at this instant."""
        if self._lane is not None:
            self.nudge()

    def cut(self) -> None:
        """Let a leap end with the step that is under way now."""
        plan = self._plan
        if plan is None or self.hung:
            return
        if (plan.steps > 1 or plan.settled) and self.engine.truncate(plan, self._clock.now):
            self._wake = self._clock.move(self._wake, plan.end_s, self._step_end)
            if plan.end_s <= self._clock.now:  # here a step of the leap ends: what comes now finds it over
                self._settle(plan)

    def _settle(self, plan: StepPlan) -> None:
        """Account for the steps of a leap that are over by what is happening now."""
        self.engine.settle(plan, self._clock.over_s)

    def settle(self, plan: StepPlan, at_s: float) -> bool:
        """Account for what a leap has done by `at_s`; False when it is over or cut short before its next eviction."""
        if plan is not self._plan or self.hung:
            return False
        self.engine.settle(plan, at_s)
        return True

    # ------------------------------------------------------------ faults

    def drop(self, seq: Sequence) -> None:
        """Nobody wants a request any more. `seq` says what it has made by now; the running step is its last."""
        self.count(seq)
        if self._plan is None:
            self.engine.cancel(seq)
            self.nudge()  # it may have held a place, or room, without running: blocks on their way up
        else:
            self.cut()
            self._dropped.append(seq)

    def count(self, seq: Sequence) -> None:
        """Let `seq` say what it has made, and when last, before this instant."""
        self._account()
        seq.outputs, seq.last_token_s = self.engine.made(seq)

    def made(self, seq: Sequence) -> tuple[int, float | None]:
        """What a request has made before this instant, and when the last of it. Touches nothing of it."""
        self._account()
        return self.engine.made(seq)

    def last_token_s(self, seq: Sequence) -> float | None:
        """When the last token of a request came, those of steps that are over now included. Touches nothing of it."""
        if self._plan is not None and not self.hung:
            self._settle(self._plan)
        made, last_s = self.engine.made(seq)
        return last_s if made else None

    def cut_off(self) -> None:
        """Nobody hears of the tokens that it makes from this instant on; it works on."""
        self._account()
        self.cut()
        self.engine.withhold(self._clock.now)

    def caught_up(self, now_s: float) -> None:
        """All that it has made up to this instant is heard of now."""
        if self._plan is not None:
            self.engine.settle(self._plan, now_s)
            self.cut()
        self.engine.deliver(now_s)

    def return_as(self, up: WorkerUp) -> None:
        """It registers anew, with what it has cached; what it does for requests of before is never heard of."""
        self.up = up
        self.fenced = False
        if self._plan is None:
            self.engine.deliver(up.at_s)
        else:
            self._at_step_end.append(lambda: self.engine.deliver(self._clock.now))

    def kill(self) -> None:
        """The worker stops being there; nothing that it was about to do happens."""
        self._account()
        self._plan = None
        self._clock.drop(self._wake)
        self._clock.drop(self._idle)
        for load in list(self._moving):
            self._stop_load(load)
        if self._lane is not None:
            self._lane.close()
        if not self.down:
            self.down, self.down_s = True, self._clock.now

    def pace(self, latency: LatencyModel) -> None:
        """From the next step on, steps take what `latency` says."""
        self._account()
        self.cut()
        self.engine.latency = latency
        self.engine.reprice(self._plan)

    def hang(self) -> None:
        """Nothing comes of the running step, and no other begins, until `resume`."""
        self._account()
        self.cut()
        self.hung = True
        stopped = Event(self._clock)
        for event in (self._wake, self._idle):
            if event.callbacks and not is_pending(event):
                stopped.callbacks = event.callbacks
                event.callbacks = []
                self._clock.drop(event)
                if event is self._idle:
                    self._idle = stopped
        self._wake = stopped

    def resume(self) -> None:
        """Go on where it hung: the step that was running has ended meanwhile, or ends when it was to."""
        self.hung = False
        now_s, plan = self._clock.now, self._plan
        if plan is not None:
            self.engine.reprice(plan, max(plan.end_s, now_s))
            self._clock.put(self._wake, plan.end_s, self._step_end)
        elif self._wake.callbacks:
            self._clock.put(self._wake, now_s, self._step_start)
        elif not self.engine.idle:
            self.nudge()

    def _account(self) -> None:
        """Account for the steps of a leap that have ended before this instant."""
        if self._plan is not None and not self.hung:
            self.engine.settle(self._plan, before(self._clock.now))

    def _let_go(self, outcome: Outcome) -> None:
        """The step is over in which requests were dropped: they are gone, and nothing is told of them."""
        for seq in self._dropped:
            made = seq.outputs, seq.last_token_s
            self.engine.cancel(seq)
            seq.outputs, seq.last_token_s = made
            for told in (outcome.firsts, outcome.held, outcome.ended):
                if seq in told:
                    told.remove(seq)
        self._dropped = []
        outcome.freed = True

    def when_step_ends(self, what: Callable[[], None]) -> None:
        """Let something be done when the step that is under way is over."""
        self.cut()
        self._at_step_end.append(what)

    def _finish_step(self) -> None:
        todo, self._at_step_end = self._at_step_end, []
        for what in todo:
            what()

    def _begin_loads(self) -> None:
        """Loads from a lower tier have begun: see to them when they have come up."""
        assert self._lane is not None
        for load in self._loads:
            load.on_dropped = partial(self._stop_load, load)
            self._moving[load] = self._lane.load(load, partial(self._on_loaded, load))
        self._loads.clear()

    def _stop_load(self, load: HostLoad) -> None:
        """Nobody wants it any more."""
        transfer = self._moving.pop(load, None)
        if transfer is not None:
            transfer.cancel()

    def _on_loaded(self, load: HostLoad) -> None:
        if load not in self._moving:
            return
        del self._moving[load]
        if self._plan is not None:
            self._loaded.append(load.seq)
            self.cut()
        else:
            self.engine.loaded(load.seq)  # type: ignore[attr-defined]  # only engines with a tier begin loads
            self.nudge()

    def _take_in(self) -> None:
        """What has come up while a step was under way is the engine's now."""
        for seq in self._loaded:
            self.engine.loaded(seq)  # type: ignore[attr-defined]
        self._loaded.clear()

    def load(self, at_s: float) -> tuple[int, int, int, int]:
        """Running, waiting, active and cached blocks at `at_s`, in the middle of a leap too."""
        return self.engine.load(self._plan, at_s)

    def look(self, at_s: float) -> Look:
        """The step that is under way behind `at_s`, in the middle of a leap too, and who waits."""
        return self.engine.look(self._plan, at_s)

    # ------------------------------------------------------------ one step after the other

    def _rest(self) -> None:
        """Wait until there is something to do."""
        self._idle = Event(self._clock)
        self._idle.callbacks.append(self._next)

    def _next(self, _: Event | None = None) -> None:
        """Plan the next step and begin it, or rest."""
        clock, engine, lane = self._clock, self.engine, self._lane
        plan = engine.plan(clock._now)
        if self._loads:
            self._begin_loads()
        if lane is not None:
            lane.attend()
        if plan is None:
            self._rest()
            return
        self._plan = plan
        if self.attentive and plan.steps > 1:
            engine.truncate(plan, clock.now)
        self._wake = clock.at(plan.end_s, self._step_end, self._on_end)
        if plan.evict_s is not None:
            self._on_evicting(self, plan)

    def _end(self, _: Event) -> None:
        """The step is over: what came of it is told, and the next one begins when everything else is done."""
        clock, engine, lane, plan = self._clock, self.engine, self._lane, self._plan
        assert plan is not None
        self._plan = None
        outcome = engine.commit(plan)
        if self._dropped:
            self._let_go(outcome)
        if self._at_step_end:
            self._finish_step()
        if self._loaded and not plan.ends_nothing:
            self._take_in()
        if lane is not None:
            lane.attend()
        self._on_step(self, outcome)
        if self._loaded:
            self._take_in()
            if lane is not None:
                lane.attend()
        queue = clock._queue
        if queue and queue[0][0] <= clock._now:  # something else is due at this instant: it goes first
            self._wake = clock.at(clock._now, self._step_start, self._on_start)
        else:
            self._next()
