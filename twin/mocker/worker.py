"""One simulated worker: a SimPy process around one engine.

It plans, waits for the end, commits, hands the outcome to the world, and starts again; an arrival in the middle of a
leap moves its end. Which worker gets what is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from simpy.events import Event

from policies.cluster.events import WorkerUp
from policies.cluster.ids import WorkerId
from twin.engine.plan import Outcome, StepPlan
from twin.engine.protocol import Engine
from twin.engine.sequence import Sequence
from twin.mocker.clock import Clock, Order, is_pending


class MockWorker:
    """A worker of the simulated world.

    `on_step` is called at the end of each step or leap, with what came of it; `on_evicting` when a leap begins that
    will evict cached blocks on its way (`plan.evict_s`).
    """

    __slots__ = (
        "_clock",
        "_idle",
        "_on_evicting",
        "_on_step",
        "_plan",
        "_step_end",
        "_step_start",
        "_wake",
        "engine",
        "up",
    )

    def __init__(
        self,
        clock: Clock,
        engine: Engine,
        up: WorkerUp,
        on_step: Callable[[MockWorker, Outcome], None],
        on_evicting: Callable[[MockWorker, StepPlan], None],
    ) -> None:
        self._clock = clock
        self.engine = engine
        self.up = up
        self._on_step = on_step
        self._on_evicting = on_evicting
        self._step_end = Order.STEP_END + up.worker_id
        self._step_start = Order.STEP_START + up.worker_id
        self._plan: StepPlan | None = None
        self._idle = Event(clock)
        self._wake: Event = self._idle
        clock.process(self._run())

    @property
    def worker_id(self) -> WorkerId:
        return self.up.worker_id

    def submit(self, seq: Sequence) -> str | None:
        """Give the engine a request now; returns its reason when it refuses."""
        refusal = self.engine.submit(seq)
        if refusal is not None:
            return refusal
        if self._plan is None:
            self.nudge()
        elif not self.engine.head_is_blocked:
            self.cut()
        return None

    @property
    def busy(self) -> bool:
        """Whether a step (or a leap) is under way."""
        return self._plan is not None

    def nudge(self) -> None:
        """There may be something to do: an idle worker looks again, at this instant, when everything else is done."""
        if self._plan is None and is_pending(self._idle):
            self._clock.put(self._idle, self._clock.now, self._step_start)

    def cut(self) -> None:
        """Let a leap end with the step that is under way now."""
        plan = self._plan
        if plan is not None and (plan.steps > 1 or plan.settled) and self.engine.truncate(plan, self._clock.now):
            self._wake = self._clock.move(self._wake, plan.end_s, self._step_end)

    def settle(self, plan: StepPlan) -> bool:
        """Account for what a leap has done by now; False when it is over or cut short before its next eviction."""
        if plan is not self._plan:
            return False
        self.engine.settle(plan, self._clock.now)
        return True

    def load(self, at_s: float) -> tuple[int, int, int, int]:
        """Running, waiting, active and cached blocks at `at_s`, in the middle of a leap too."""
        return self.engine.load(self._plan, at_s)

    def _run(self) -> Generator[Event, None, None]:
        clock, engine = self._clock, self.engine
        while True:
            yield self._idle
            plan = engine.plan(clock.now)
            while plan is not None:
                self._plan = plan
                self._wake = clock.at(plan.end_s, self._step_end)
                if plan.evict_s is not None:
                    self._on_evicting(self, plan)
                yield self._wake
                self._plan = None
                self._on_step(self, engine.commit(plan))
                if clock.peek() <= clock.now:  # something else is due at this instant: it goes first
                    yield clock.at(clock.now, self._step_start)
                plan = engine.plan(clock.now)
            self._idle = Event(clock)
