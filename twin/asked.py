"""Answers questions to the twin in a simulated world: at once, or after the time that thinking is said to take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.cluster.twin_asks import AskTwin, Outcome, TwinAnswered
from policies.errors import TwinError
from policies.planner.asking import inner
from twin.engine.ticks import instant
from twin.mocker.clock import Order

if TYPE_CHECKING:
    from policies.planner.settings import PlannerSettings
    from twin.mocker.world import MockWorld

_COMMAND = int(Order.COMMAND)


class Answering:
    """Of one world. `asked` counts the questions."""

    def __init__(self, world: MockWorld, settings: PlannerSettings, think_s: float) -> None:
        self._world = world
        self._settings = inner(settings)
        self._think_s = think_s
        self.asked = 0

    def ask(self, question: AskTwin) -> None:
        """Answer when it has been thought about, with an error where that cannot be done."""
        from twin.ahead.answer import answer

        self.asked += 1
        outcomes: tuple[Outcome, ...] = ()
        error = None
        try:
            outcomes = answer(question, self._settings)
        except TwinError as why:
            error = str(why)
        clock = self._world.clock
        clock.watch(
            instant(clock.now + self._think_s),
            _COMMAND,
            lambda: self._world.post(
                TwinAnswered(at_s=clock.now, query_id=question.query_id, outcomes=outcomes, error=error)
            ),
        )
