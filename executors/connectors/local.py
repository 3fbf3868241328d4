"""Processes of this host: orders are carried out worker by worker, by the fleet and its starter."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from policies.cluster.actions import AddWorker, DrainWorker, RecallWorker
from policies.cluster.ids import Role, WorkerId
from policies.cluster.ticks import Tick
from policies.errors import CapabilityError

if TYPE_CHECKING:
    from executors.fleet import Fleet


class Local:
    """`gpus`: of one worker, by group (1 where nobody says)."""

    confirms = False

    def __init__(self, fleet: Fleet, gpus: Mapping[str, int] = MappingProxyType({})) -> None:
        self._fleet = fleet
        self._gpus = gpus

    def start(self, worker_id: WorkerId, order: AddWorker) -> tuple[str, Role, int]:
        if order.role is None:
            raise CapabilityError(f"{order!r} is part of a decision and does not say what the worker will be")
        return self._fleet.add(order.group, worker_id), order.role, self._gpus.get(order.group, 1)

    def call_off(self, worker_id: WorkerId, group: str, decision_id: int | None) -> None:
        self._fleet.call_off(worker_id)

    def drain(self, order: DrainWorker) -> bool:
        self._fleet.drain(order.worker_id, order.deadline_s)
        return True

    def recall(self, order: RecallWorker) -> bool:
        self._fleet.recall(order.worker_id)  # the fleet tells it
        return False

    def settle(self) -> None:
        """Each order was carried out as it came."""

    def advise(self, tick: Tick) -> None:
        """Nothing is done."""

    async def close(self) -> None:
        """The fleet ends what it has started."""
