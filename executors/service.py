"""The live world as the frontend's backend: what is served, who is there, and what may be set while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from executors.backend import Ask, Serving, WorkerGlance
from executors.glance import decision, worker_glance
from executors.requests import Stream
from executors.shadow.figures import Glance
from executors.shadow.watch import Shadow
from executors.world import LiveWorld
from policies.cluster.events import BusyThresholdsChanged, Threshold
from policies.cluster.ids import Role, WorkerId
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.resilience.readiness import readiness
from policies.router.overload import BusySettings

if TYPE_CHECKING:
    from executors.peers import Peers

LIMITS = tuple(one.name for one in fields(BusySettings))


@frozen
class Wanted:
    """A model that is to be served: by which roles, and how many tokens a request may have, answer included."""

    model: str
    roles: frozenset[Role]
    context_tokens: int


class Service:
    """`backend.Backend` over a live world."""

    def __init__(
        self,
        world: LiveWorld,
        wanted: Sequence[Wanted],
        thresholds: Mapping[str, float | None] | None = None,
        shadow: Shadow | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.world = world
        self._shadow = shadow
        self._peers = peers
        self._wanted = tuple(wanted)
        self._thresholds: dict[str, float | None] = dict.fromkeys(LIMITS) | dict(thresholds or {})
        self._sets = world.controller.wants(BusyThresholdsChanged)

    def shadow(self) -> Glance | None:
        """What the twin beside it predicts, against what was measured; None where there is none."""
        return self._shadow.glance() if self._shadow is not None else None

    def predicted(self) -> Mapping[str, object]:
        """What the dashboard draws of it."""
        return self._shadow.series() if self._shadow is not None else {}

    def peer_counts(self) -> Mapping[str, int]:
        """For the gauges of the frontend; empty without peers."""
        if self._peers is None:
            return {}
        return self._peers.counts.table() | {"others": len(self._peers.others)}

    def submit(self, ask: Ask) -> Stream:
        return self.world.submit(ask)

    def serving(self) -> Serving:
        """A model may be asked for while each of its roles has a worker, and is ready while one of them takes work."""
        models, ready, missing, contexts = [], [], [], []
        for one in self._wanted:
            roles = sorted(one.roles, key=lambda role: role.value)
            absent = [role for role in roles if not self._live(one.model, role)]
            missing += [f"{role.value} workers of {one.model}: none is ready" for role in absent]
            found = readiness(self.world.controller.view, (role for role in roles if role not in absent))
            missing += found.why
            if not absent:
                models.append(one.model)
                contexts.append(self._context(one))
            if not absent and found.ready:
                ready.append(one.model)
        return Serving(
            models=tuple(models),
            ready=tuple(ready),
            missing=tuple(missing),
            context_tokens=min(contexts, default=max((one.context_tokens for one in self._wanted), default=0)),
            draining=self.world.refusing is not None,
        )

    def _live(self, model: str, role: Role) -> bool:
        return any(
            not worker.lost and not worker.draining and worker.up.role is role and model in worker.facts.models
            for worker in self.world.fleet.workers.values()
        )

    def _context(self, one: Wanted) -> int:
        """What every worker of the model takes."""
        told = [
            worker.facts.context_tokens
            for worker in self.world.fleet.workers.values()
            if not worker.lost and one.model in worker.facts.models
        ]
        return min([one.context_tokens, *told]) if one.context_tokens else min(told, default=0)

    def workers(self) -> Sequence[WorkerGlance]:
        view, fleet = self.world.controller.view, self.world.fleet
        up = [worker_glance(worker, view) for worker in fleet.workers.values() if not worker.lost]
        return up + [_starting(name, group) for name, group in fleet.starting.items()]

    def decisions(self, count: int) -> Sequence[Mapping[str, object]]:
        kept = list(self.world.decided)[-count:] if count > 0 else []
        return [decision(at_s, action, self.world.fleet) for at_s, action in reversed(kept)]

    def busy_thresholds(self) -> Mapping[str, float | None]:
        return dict(self._thresholds)

    def set_busy_thresholds(self, changes: Mapping[str, float | None]) -> None:
        told = tuple(Threshold(name=name, limit=limit) for name, limit in changes.items())
        event = BusyThresholdsChanged(at_s=self.world.clock.now(), changes=told)
        BusySettings().changed(event)
        if not self._sets:
            raise ConfigError("the router was started without limits on load: set one of [router.busy] and start again")
        self.world.post(event)
        self._thresholds |= changes


def _starting(name: str, group: str) -> WorkerGlance:
    return WorkerGlance(
        worker_id=WorkerId(-1),
        name=name,
        role=group,
        state="starting",
        in_flight=0,
        running=None,
        waiting=None,
        kv_share=None,
        cached_blocks=None,
    )
