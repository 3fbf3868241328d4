"""The contract catches who breaks it: one router for each promise, right but for that one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import ClassVar

import pytest
from builders import router_settings
from contract.policy_contract import RouterContract

from policies.cluster.actions import Action, Dispatch
from policies.cluster.controller import Policy
from policies.cluster.events import BlocksStored, Event, RequestArrived
from policies.cluster.ids import WorkerId
from policies.cluster.state import ClusterView, WorkerView
from policies.errors import InvariantError
from policies.router.base import Choice, Router
from policies.router.least_loaded import LeastLoaded

MADE = count()


class Moody(LeastLoaded):
    """Chooses by how many were made before it."""

    def __init__(self, settings: object) -> None:
        super().__init__(settings)  # type: ignore[arg-type]
        self._mood = next(MADE)

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        return Choice(self._mood % len(live), "mood", "it felt like it")


class Meddling(LeastLoaded):
    """Counts its dispatch in the view itself."""

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        view._live_by_role.clear()
        if view.live and isinstance(event, RequestArrived):
            object.__setattr__(view.live[0], "in_flight", view.live[0].in_flight + 1)
        return super().decide(event, view)


class Silent(LeastLoaded):
    """Gives no reason."""

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        return super()._choose(event, live)._replace(reason=" ")


class Credulous(LeastLoaded):
    """Takes whoever tells of blocks for a worker, and avoids the first one once it has heard of more than there are."""

    subscribes = LeastLoaded.subscribes | {BlocksStored}

    def __init__(self, settings: object) -> None:
        super().__init__(settings)  # type: ignore[arg-type]
        self._heard: set[WorkerId] = set()

    def _learn(self, event: Event) -> None:
        super()._learn(event)
        if isinstance(event, BlocksStored):
            self._heard.add(event.worker_id)

    def _choose(self, event: RequestArrived, live: tuple[WorkerView, ...]) -> Choice:
        if len(self._heard) > len(live):
            return Choice(len(live) - 1, "min", "the last")
        return super()._choose(event, live)


class Hoarding(LeastLoaded):
    """Remembers every request for ever."""

    def __init__(self, settings: object) -> None:
        super().__init__(settings)  # type: ignore[arg-type]
        self._seen: list[str] = []

    def _sent(self, event: RequestArrived, worker_id: WorkerId, overlap_blocks: int) -> None:
        super()._sent(event, worker_id, overlap_blocks)
        self._seen.append(event.request_id)


class Scribbling(LeastLoaded):
    """Writes into what it is told."""

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        orders = list(super().decide(event, view))
        if isinstance(event, RequestArrived):
            object.__setattr__(event, "isl", event.isl + 1)
        return orders


class Verbose(LeastLoaded):
    """Remembers every request in one long text."""

    def __init__(self, settings: object) -> None:
        super().__init__(settings)  # type: ignore[arg-type]
        self._told = ""

    def _sent(self, event: RequestArrived, worker_id: WorkerId, overlap_blocks: int) -> None:
        super()._sent(event, worker_id, overlap_blocks)
        self._told += f"{event.request_id} went to worker {worker_id}\n"


class Secretive(LeastLoaded):
    """Remembers every request where nobody looks: in what a function has caught."""

    def __init__(self, settings: object) -> None:
        super().__init__(settings)  # type: ignore[arg-type]
        past: list[str] = []
        self._note = lambda name: past.append(name)

    def _sent(self, event: RequestArrived, worker_id: WorkerId, overlap_blocks: int) -> None:
        super()._sent(event, worker_id, overlap_blocks)
        self._note(event.request_id)


class Communal(LeastLoaded):
    """Remembers every request for all of its class."""

    past: ClassVar[list[str]] = []

    def _sent(self, event: RequestArrived, worker_id: WorkerId, overlap_blocks: int) -> None:
        super()._sent(event, worker_id, overlap_blocks)
        self.past.append(event.request_id)


class Stubborn(Router):
    """Sends everything to whoever came first, there or not."""

    def decide(self, event: Event, view: ClusterView) -> Sequence[Action]:
        if not isinstance(event, RequestArrived):
            return ()
        return (Dispatch(request_id=event.request_id, worker_id=WorkerId(1), rule="one", reason="always"),)


@pytest.mark.parametrize(
    ("kind", "promise", "words"),
    [
        (Moody, "test_the_same_events_give_the_same_actions", "other actions"),
        (Meddling, "test_it_never_changes_what_it_is_shown", "Meddling changed the view"),
        (Silent, "test_it_explains_itself", "no reason"),
        (Credulous, "test_workers_that_it_does_not_know_change_nothing", "changed what it orders"),
        (Scribbling, "test_it_never_changes_what_it_is_shown", "Scribbling changed the event"),
        (Hoarding, "test_what_it_remembers_is_bounded", "more and more"),
        (Verbose, "test_what_it_remembers_is_bounded", "more and more"),
        (Secretive, "test_what_it_remembers_is_bounded", "more and more"),
        (Communal, "test_what_it_remembers_is_bounded", "more and more"),
        (Stubborn, "test_nothing_goes_to_a_worker_that_is_lost_or_leaving", "worker 1 is not there"),
        (Stubborn, "test_without_workers_requests_are_refused", "worker 1 is not there"),
        (Stubborn, "test_pins_hold_and_pass_no_fence", "worker 1 is draining"),
    ],
)
def test_a_broken_promise_is_found(kind: type[Router], promise: str, words: str) -> None:
    class Contract(RouterContract):
        def make(self) -> Policy:
            return kind(router_settings("mine"))

    with pytest.raises((AssertionError, InvariantError), match=words):
        getattr(Contract(), promise)()


@pytest.mark.parametrize("promise", [name for name in dir(RouterContract) if name.startswith("test_")])
def test_the_one_that_they_are_made_of_keeps_all(promise: str) -> None:
    class Contract(RouterContract):
        def make(self) -> Policy:
            return LeastLoaded(router_settings("mine"))

    getattr(Contract(), promise)()
