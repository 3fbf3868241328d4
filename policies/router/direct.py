"""Direct: the client says which worker. A request that does not say is refused, never sent to some other worker."""

from __future__ import annotations

from policies.cluster.events import RequestArrived
from policies.cluster.state import ClusterView, WorkerView
from policies.router.base import Router
from policies.router.select import Refusal


class Direct(Router):
    """Everything else is the pin that all modes know."""

    def _free(self, event: RequestArrived, live: tuple[WorkerView, ...], view: ClusterView) -> Refusal:
        return Refusal("bad_hint", "mode direct needs a worker id with every request")
