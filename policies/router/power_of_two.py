"""Power of two choices: two different workers are drawn, the one with fewer requests in flight is taken."""

from __future__ import annotations

from policies.cluster.draws import draw, pick
from policies.cluster.events import RequestArrived
from policies.cluster.state import WorkerView
from policies.router.base import Choice, Router


class PowerOfTwo(Router):
    """The first of the pair wins a tie; a single worker is taken as it is."""

    timeless = True

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        if len(live) == 1:
            return Choice(0, "p2c", "the only one")
        first, second = self._pair(event.draw_id, len(live))
        mine, other = live[first].in_flight, live[second].in_flight
        if other < mine:
            return Choice(second, "p2c", f"{other} in flight against {mine}")
        return Choice(first, "p2c", f"{mine} in flight against {other}")

    def _pair(self, draw_id: str, n: int) -> tuple[int, int]:
        """Two different indices below n; each ordered pair is equally likely."""
        seed = self.settings.seed
        first = pick(draw(seed, "p2c", draw_id, 0), n)
        second = pick(draw(seed, "p2c", draw_id, 1), n - 1)
        return first, second + 1 if second >= first else second
