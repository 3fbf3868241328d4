"""Round robin: the live workers in turn, by id. Nothing about load or content is looked at."""

from __future__ import annotations

from policies.cluster.events import RequestArrived
from policies.cluster.state import WorkerView
from policies.router.base import Choice, Router
from policies.router.settings import RouterSettings


class RoundRobin(Router):
    """One counter over the list as it is now: who is lost drops out of the turn, who comes back joins it.

    An adapter or model that only some workers serve has a counter of its own: with one for lists of different lengths,
    a pattern in the demand could leave some of them out for ever.
    """

    timeless = True

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._turns: dict[str, int] = {}

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        whose = event.lora if event.lora and live[0].up.loras is not None else ""
        if event.hints is not None and event.hints.model is not None and live[0].up.models is not None:
            whose = f"{event.hints.model}|{whose}"
        turn = self._turns.get(whose, 0)
        self._turns[whose] = turn + 1
        return Choice(turn % len(live), "rr", f"turn {turn} of {len(live)}")
