"""What every policy owes its cluster, as tests to inherit: a plug-in's author writes `make` and runs them.

    from contract.policy_contract import RouterContract

    class TestMine(RouterContract):
        def make(self) -> Policy:
            return MyRouter(router_settings("mine"))

A promise is checked on histories with losses, drains, returns, odd reports and clients that leave. Nothing here knows
how a policy is made inside: memory is counted by walking everything that hangs on it.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from enum import Enum
from functools import partial

from builders import BLOCK_SIZE, Scene, worker

from policies.cluster.actions import Action, Dispatch, Reject, SetTimer
from policies.cluster.blocks import BlockPath, Branch, ContentTree
from policies.cluster.controller import Policy
from policies.cluster.draws import draw, pick
from policies.cluster.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    RequestArrived,
    WorkerEvent,
    WorkerLost,
    WorkerReported,
    WorkerUp,
)
from policies.cluster.ids import WorkerId
from policies.cluster.state import ClusterView
from policies.router.refusals import REFUSALS

NOBODY = WorkerId(999)


class PolicyContract:
    """The promises of any policy. `make` gives a fresh one; `history` plays something that concerns it."""

    def make(self) -> Policy:
        """A fresh policy; two of them must be equal."""
        raise NotImplementedError

    def workers(self) -> list[WorkerUp]:
        """Workers 0 to 3 of the histories."""
        return [worker(n) for n in range(4)]

    def history(self, policy: Policy) -> Scene:
        """A cluster in which the policy has had much to decide, and everything has ended."""
        scene = Scene(policy, self.workers())
        play(scene, rounds=60)
        drain(scene)
        return scene

    # ------------------------------------------------------------ the promises

    def test_the_same_events_give_the_same_actions(self) -> None:
        notes = []
        for _ in range(2):
            watched = Watched(self.make())
            self.history(watched)
            notes.append(watched.actions)
        first = next((pair for pair in zip(*notes, strict=False) if pair[0] != pair[1]), None)
        assert first is None, f"the same events, other actions: {first}"
        assert any(notes[0]), "the history asked nothing of it"

    def test_it_never_changes_what_it_is_shown(self) -> None:
        """Between the orders that it gives, the view is as it was."""
        watched = Watched(self.make(), guard=True)
        self.history(watched)
        assert watched.actions

    def test_it_explains_itself(self) -> None:
        watched = Watched(self.make())
        self.history(watched)
        for action in (action for actions in watched.actions for action in actions):
            assert action.reason.strip(), f"no reason: {action!r}"
            assert "\n" not in action.reason, f"a reason of several lines: {action!r}"
            if isinstance(action, Dispatch):
                assert action.rule, f"no rule: {action!r}"
            if isinstance(action, Reject):
                assert action.code in REFUSALS, f"a code that no client knows: {action!r}"

    def test_workers_that_it_does_not_know_change_nothing(self) -> None:
        plain, told = self.make(), self.make()
        one, two = Watched(plain), Watched(told)
        self.history(one)
        self.history(_Haunted(two))
        assert one.decisions == two.decisions, "news of unknown workers changed what it orders"
        assert entries(told) == entries(plain), "news of unknown workers are remembered"

    def test_what_it_remembers_is_bounded(self) -> None:
        """After all requests have ended, a long history leaves no more behind than a short one; after all workers
        are lost, no more than a fresh policy has, save for names that are settled once and for all."""
        policy = self.make()
        scene = Scene(policy, self.workers())
        play(scene, rounds=40)
        drain(scene)
        first = entries(policy)
        play(scene, rounds=120, start=40)
        drain(scene)
        assert entries(policy) <= first + SLACK, f"remembers more and more: {first} entries, then {entries(policy)}"
        for worker_id in list(scene.view.workers):
            scene.lost(worker_id)
        fresh = entries(self.make())
        assert entries(policy) <= fresh + SLACK, f"{entries(policy)} entries are left of nothing, fresh it has {fresh}"


SLACK = 24
"""Entries that may come to stay: counters by name, the last list of workers."""


class RouterContract(PolicyContract):
    """The promises of a policy that places requests."""

    def test_every_request_is_placed_or_refused_or_waits(self) -> None:
        scene = Scene(self.make(), 3)
        for n in range(60):
            request(scene, f"r{n}", n)
        waiting = {name for name in scene.view.requests if name not in scene.where}
        for name in list(scene.view.requests):
            if name in scene.where:
                scene.first_token(name)
                scene.finish(name)
        while waiting & scene.view.requests.keys():
            open_ = [name for name in scene.view.requests if name in scene.where]
            assert open_, f"requests {waiting} wait for nothing"
            for name in open_:
                scene.first_token(name)
                scene.finish(name)
        scene.invariants.finish()

    def test_nothing_goes_to_a_worker_that_is_lost_or_leaving(self) -> None:
        scene = Scene(self.make(), 4)  # the scene checks it at each step
        play(scene, rounds=30)
        scene.lost(1)
        scene.draining(2)
        sent = {request(scene, f"x{n}", n) for n in range(40)}
        assert sent <= {0, 3, None}, f"sent to {sent}, and only 0 and 3 take new work"

    def test_without_workers_requests_are_refused(self) -> None:
        scene = Scene(self.make(), 1)
        scene.lost(0)
        action = scene.arrive("r")
        assert isinstance(action, Reject), f"nobody is there: {action!r}"
        assert REFUSALS[action.code].status in (400, 503), f"{action!r}"

    def test_pins_hold_and_pass_no_fence(self) -> None:
        scene = Scene(self.make(), 3)
        assert scene.send("r0", isl=64, hint=1) == 1
        scene.draining(1)
        action = scene.arrive("r1", isl=64, hint=1)
        assert isinstance(action, Reject), f"worker 1 is leaving: {action!r}"
        assert action.code == "pinned_dead", f"{action!r}"

    def test_what_reads_no_time_decides_the_same_at_any(self) -> None:
        """`reads_time` is what a leg goes by that is decided later than its request arrived."""
        plain, told = self.make(), self.make()
        if getattr(told, "reads_time", True):
            return
        one, two = Watched(plain), Watched(told)
        self.history(one)
        self.history(_OldArrivals(two))
        assert one.decisions == two.decisions, "it says that it reads no time, and its decisions depend on it"


# ---------------------------------------------------------------- histories


def request(scene: Scene, name: str, n: int, hint: int | None = None) -> int | None:
    """A request with content that others share; where it went, None if nowhere yet."""
    length = 1 + _chance("length", n, 20)
    keys = [_chance("family", n, 5), *(100 + _chance("family", n, 5) * 100 + k for k in range(length // 2))]
    keys += [10_000 + 100 * n + k for k in range(length)]
    asked = {"priority": _chance("priority", n, 3), "session_id": f"s{_chance('session', n, 12)}"}
    isl = min(len(keys), length) * BLOCK_SIZE - _chance("tail", n, BLOCK_SIZE)
    scene.arrive(name, isl=isl, keys=keys, hint=_hint(scene, n) if hint is None else hint, **asked)
    return scene.where.get(name)


def _hint(scene: Scene, n: int) -> int | None:
    """Every mode has to do with requests that name a worker; for mode direct they are all that it can place."""
    return _chance("pin", n, 6) if n % 5 == 0 else None


def play(scene: Scene, rounds: int, start: int = 0) -> None:
    """Arrivals, first tokens, ends of every kind, cache news, losses, drains and returns."""
    for n in range(start, start + rounds):
        request(scene, f"p{n}", n)
        open_ = [name for name in scene.view.requests if name in scene.where and _is_there(scene, name)]
        if open_ and n % 3:
            name = open_[_chance("first", n, len(open_))]
            if scene.view.requests[name].state.value == "dispatched":
                scene.first_token(name)
                scene.stored(scene.where[name], [n % 5, *range(100, 104)])
        if len(open_) > 6:
            name = open_[_chance("end", n, len(open_))]
            [scene.finish, scene.fail, scene.cancel][_chance("how", n, 3)](name)
        if n % 11 == 7:
            scene.removed(_chance("removed", n, 4), [n % 5, *range(100, 104)], lo=2)
        if n % 25 == 20:
            _replace_worker(scene, 1 + _chance("lost", n, 3), epoch=n)


def _replace_worker(scene: Scene, worker_id: int, epoch: int) -> None:
    """A worker leaves with all it has, and comes back as another one."""
    before = scene.view.workers[WorkerId(worker_id)].up
    scene.draining(worker_id)
    for name in [name for name in scene.view.requests if scene.where.get(name) == worker_id]:
        if _is_there(scene, name):
            scene.fail(name)
    scene.lost(worker_id)
    scene.post(replace(before, at_s=scene.next_s, epoch=epoch))


def drain(scene: Scene) -> None:
    """Everybody's request ends; those that waited are let go in between."""
    while scene.view.requests:
        name = next((name for name in scene.view.requests if _is_there(scene, name)), None)
        if name is None:
            for waiting in list(scene.view.requests):
                scene.cancel_waiting(waiting)
        else:
            scene.finish(name)
    for worker_id in scene.view.workers:
        scene.cleared(worker_id)
    scene.invariants.finish()


def _is_there(scene: Scene, name: str) -> bool:
    return scene.view.requests[name].worker_id is not None  # type: ignore[index]


def _chance(what: str, n: int, below: int) -> int:
    return pick(draw(11, what, str(n)), below)


# ---------------------------------------------------------------- watching


class Watched:
    """A policy, and every list of actions that it gave; with `guard`, the view may not change while it thinks."""

    def __init__(self, policy: Policy, *, guard: bool = False) -> None:
        self._policy = policy
        self._guard = guard
        self.subscribes = policy.subscribes
        self.actions: list[tuple[Action, ...]] = []

    @property
    def decisions(self) -> list[Action]:
        """What was ordered, without the timers."""
        return [action for actions in self.actions for action in actions if not isinstance(action, SetTimer)]

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        given: list[Action] = []
        told = repr(event) if self._guard else ""
        before = picture(view) if self._guard else ""
        for action in self._policy.decide(event, view):
            assert not self._guard or picture(view) == before, f"{type(self._policy).__name__} changed the view"
            given.append(action)
            yield action
            before = picture(view) if self._guard else ""
        assert not self._guard or picture(view) == before, f"{type(self._policy).__name__} changed the view"
        assert not self._guard or repr(event) == told, f"{type(self._policy).__name__} changed the event"
        self.actions.append(tuple(given))


class _Haunted:
    """Tells a policy, before each event, news of a worker that nobody has ever seen."""

    def __init__(self, policy: Watched) -> None:
        self._policy = policy
        self.subscribes = policy.subscribes
        self._tree = ContentTree(BLOCK_SIZE, BLOCK_SIZE)

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        for ghost in self._ghosts(event.at_s):
            if type(ghost) in self.subscribes:
                for action in self._policy.decide(ghost, view):
                    assert isinstance(action, SetTimer), f"{ghost!r} had an answer"  # to look again is no decision
                    yield action
        yield from self._policy.decide(event, view)

    def _ghosts(self, at_s: float) -> Sequence[WorkerEvent]:
        runs = self._tree.path([1, 2, 3], 3 * BLOCK_SIZE).runs()
        report = WorkerReported(
            at_s=at_s, worker_id=NOBODY, measured_s=at_s, running=1, waiting=1, active_blocks=1, cached_blocks=1
        )
        return (
            BlocksStored(at_s=at_s, worker_id=NOBODY, runs=runs),
            BlocksRemoved(at_s=at_s, worker_id=NOBODY, runs=runs),
            BlocksCleared(at_s=at_s, worker_id=NOBODY),
            report,
            WorkerLost(at_s=at_s, worker_id=NOBODY),
        )


class _OldArrivals:
    """Tells a policy of each request as if it had arrived at the very start."""

    def __init__(self, policy: Watched) -> None:
        self._policy = policy
        self.subscribes = policy.subscribes

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        return self._policy.decide(replace(event, at_s=0.0) if isinstance(event, RequestArrived) else event, view)


def picture(view: ClusterView) -> str:
    """All that a view shows, as text."""
    workers = [(w.up, w.in_flight, w.draining, w.report) for w in view.workers.values()]
    requests = [(r.arrived.request_id, r.state, r.worker_id, r.attempt, r.failed_on) for r in view.requests.values()]
    return repr((workers, requests, [w.worker_id for w in view.live]))


def entries(policy: object) -> int:
    """How many things hang on a policy: elements of every collection that can be reached from it, once each, and every
    64 characters, bytes or bits of what is one long thing. What its class, its module and its functions keep counts."""
    seen: set[int] = set()
    total = 0
    left: deque[object] = deque([policy, *_shared_by_all(type(policy))])
    while left:
        thing = left.popleft()
        total += _length(thing) // 64
        if id(thing) in seen or _is_atom(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            total += len(thing)
            left.extend((*thing.keys(), *thing.values()))
        elif isinstance(thing, Sequence | Set | deque):
            total += len(thing)
            left.extend(thing)
        elif inspect.isroutine(thing) or isinstance(thing, partial):
            left.extend(_caught(thing))
        else:
            left.extend(_fields(thing))
    return total


def _length(thing: object) -> int:
    """Of a text, bytes, or a number in binary."""
    if isinstance(thing, str | bytes | bytearray):
        return len(thing)
    return thing.bit_length() if isinstance(thing, int) else 0


def _shared_by_all(kind: type) -> Iterable[object]:
    """Collections that all policies of a class have in common: attributes of the class, variables of its module."""
    names = [*vars(kind).values(), *vars(sys.modules[kind.__module__]).values()]
    return (thing for thing in names if isinstance(thing, list | dict | set | deque | bytearray))


def _caught(routine: object) -> list[object]:
    """What a function, a method or a partial call keeps alive."""
    cells = getattr(routine, "__closure__", None) or ()
    names = ("__self__", "__func__", "__defaults__", "func", "args", "keywords")
    found = [getattr(routine, name, None) for name in names]
    return [cell.cell_contents for cell in cells] + [thing for thing in found if not inspect.ismodule(thing)]


def _is_atom(thing: object) -> bool:
    """What holds nothing that a policy keeps: plain values, code, shared content, the view's own objects."""
    return isinstance(thing, _ATOMS) or inspect.ismodule(thing)


_ATOMS = (str, bytes, int, float, bool, Enum, type(None), type, Branch, BlockPath, ClusterView)


def _fields(thing: object) -> list[object]:
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    held = [getattr(thing, name) for name in slots if hasattr(thing, name)]
    return held + list(vars(thing).values() if hasattr(thing, "__dict__") else ())


def _slots(kind: type) -> Sequence[str]:
    slots: str | Sequence[str] = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [f"_{kind.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names]
