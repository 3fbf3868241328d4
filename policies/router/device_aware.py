"""Device-aware least loaded: workers without GPUs get a share of the requests that fits how slow they are."""

from __future__ import annotations

from policies.cluster.events import Event, RequestArrived, WorkerLost
from policies.cluster.ids import Place
from policies.cluster.state import WorkerView
from policies.errors import ConfigError
from policies.router.base import Choice, Router
from policies.router.select import Ties
from policies.router.settings import RouterSettings


class DeviceAware(Router):
    """A worker without GPUs counts as one `device_ratio`-th of one with: while the first kind has fewer requests open
    than its share of those of the second, it gets the next one; within a kind the least loaded does.
    """

    timeless = True

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        if settings.device_ratio is None:
            raise ConfigError("router.device_ratio is not given, and mode device-aware-weighted needs it, like 8")
        self._ratio = settings.device_ratio
        self._ties = Ties(settings.tie_break, settings.seed)

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        on_cpu = [at for at, worker in enumerate(live) if worker.up.on_cpu]
        others = [at for at, worker in enumerate(live) if not worker.up.on_cpu]
        group, told = self._group(live, on_cpu, others)
        loads = [live[at].in_flight for at in group]
        place, rule = self._ties.lowest(event.draw_id, loads, [live[at].up.worker_id for at in group])
        return Choice(group[place], rule, f"{told}; {loads[place]} in flight, least of {len(group)}")

    def _group(self, live: tuple[WorkerView, ...], on_cpu: list[int], others: list[int]) -> tuple[list[int], str]:
        """The kind that gets the request."""
        if not on_cpu or not others:
            return on_cpu or others, "one kind of workers"
        cpu, gpu = (sum(live[at].in_flight for at in group) for group in (on_cpu, others))
        share = gpu * len(on_cpu) // (self._ratio * len(others))
        if cpu < share:
            return on_cpu, f"{cpu} open without GPUs, share {share}"
        return others, f"{cpu} open without GPUs are their share, {share}"

    def _learn(self, event: Event) -> None:
        if isinstance(event, WorkerLost):
            self._ties.forget(event.worker_id)

    def _sent(self, event: RequestArrived, place: Place, overlap_blocks: int) -> None:
        self._ties.note(place)
