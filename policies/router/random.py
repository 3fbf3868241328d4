"""Random: every live worker is equally likely, by a draw that belongs to the request."""

from __future__ import annotations

from policies.cluster.draws import draw, pick
from policies.cluster.events import RequestArrived
from policies.cluster.state import WorkerView
from policies.router.base import Choice, Router


class Random(Router):
    """Index floor(u * n) of the live workers."""

    timeless = True

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        u = draw(self.settings.seed, "random", event.draw_id)
        return Choice(pick(u, len(live)), "random", f"u {u:.6f} of {len(live)}")
