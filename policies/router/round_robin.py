"""Round robin: the live workers in turn, by id. Nothing about load or content is looked at."""

from __future__ import annotations

from policies.cluster.events import RequestArrived
from policies.cluster.state import WorkerView
from policies.router.base import Choice, Router
from policies.router.settings import RouterSettings


class RoundRobin(Router):
    """One counter over the list as it is now: who is lost drops out of the turn, who comes back joins it."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._turn = 0

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        turn = self._turn
        self._turn = turn + 1
        return Choice(turn % len(live), "rr", f"turn {turn} of {len(live)}")
