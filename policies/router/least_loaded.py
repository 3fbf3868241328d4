"""Least loaded: the live worker with the fewest requests in flight, by our own count."""

from __future__ import annotations

from policies.cluster.events import Event, RequestArrived, WorkerLost
from policies.cluster.ids import Place
from policies.cluster.state import WorkerView
from policies.router.base import Choice, Router
from policies.router.select import Ties
from policies.router.settings import RouterSettings


class LeastLoaded(Router):
    """Equals are told apart by the tie rule."""

    timeless = True

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._ties = Ties(settings.tie_break, settings.seed)

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        loads = [worker.in_flight for worker in live]
        index, rule = self._ties.lowest(event.draw_id, loads, [worker.up.worker_id for worker in live])
        return Choice(index, rule, f"{loads[index]} in flight, least of {len(live)}")

    def _learn(self, event: Event) -> None:
        if isinstance(event, WorkerLost):
            self._ties.forget(event.worker_id)

    def _sent(self, event: RequestArrived, place: Place, overlap_blocks: int) -> None:
        self._ties.note(place)
