"""News between routers on the simulated network: late, in order for each pair, or lost.

It decides nothing, and never duplicates or reorders what one router tells another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from policies.cluster.actions import PublishBooking
from policies.cluster.draws import draw
from policies.cluster.events import PeerBooking
from policies.frozen import frozen
from twin.engine.ticks import instant
from twin.mocker.clock import Order

if TYPE_CHECKING:
    from twin.mocker.world import MockWorld

_LATE = int(Order.LATE)


@frozen
class SyncPlan:
    """How news travel between so many `routers`: they take `delay_s`, and up to `jitter_s` more (drawn); `loss` is the
    share of messages that are lost."""

    routers: int
    delay_s: float
    jitter_s: float
    loss: float
    seed: int


class RouterSync:
    """Carries out `PublishBooking` on one world."""

    def __init__(self, world: MockWorld, plan: SyncPlan) -> None:
        self._world = world
        self._plan = plan
        self._sent: dict[tuple[int, int], int] = {}
        self._due_s: dict[tuple[int, int], float] = {}
        self.lost = 0

    def send(self, action: PublishBooking) -> None:
        """Each router that it is meant for hears of it, in its time, unless it is lost on that way."""
        everybody = range(self._plan.routers) if action.dest is None else (action.dest,)
        for dest in everybody:
            if dest != action.origin:
                self._send(action, dest)

    def _send(self, action: PublishBooking, dest: int) -> None:
        plan, pair = self._plan, (action.origin, dest)
        n = self._sent[pair] = self._sent.get(pair, 0) + 1
        name = f"{action.origin}>{dest}"
        if plan.loss and draw(plan.seed, "sync loss", name, n) < plan.loss:
            self.lost += 1
            return
        jitter_s = plan.jitter_s * draw(plan.seed, "sync delay", name, n) if plan.jitter_s else 0.0
        at_s = instant(self._world.clock.now + plan.delay_s + jitter_s)
        at_s = self._due_s[pair] = max(at_s, self._due_s.get(pair, 0.0))
        if at_s <= self._world.clock.now:
            self._deliver(action, dest)()
        else:
            self._world.call(at_s, _LATE, self._deliver(action, dest))

    def _deliver(self, action: PublishBooking, dest: int) -> Callable[[], None]:
        def deliver() -> None:
            self._world.post(
                PeerBooking(
                    at_s=self._world.clock.now,
                    origin=action.origin,
                    dest=dest,
                    seq=action.seq,
                    kind=action.kind,
                    ops=action.ops,
                )
            )

        return deliver
