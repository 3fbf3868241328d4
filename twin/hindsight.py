"""What decisions would have come to elsewhere: for a sample of them, the TTFT on every worker that could be chosen.

The simulator knows the true state of its workers, so each can be run on, without what arrives later, until the prompt's
first token. That happens in a copy of the process that is thrown away: nothing of it may reach the run, whose results
are the same with and without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from policies.cluster.actions import Action, Dispatch
from policies.cluster.controller import Policy
from policies.cluster.events import Event, RequestArrived
from policies.cluster.ids import Leg, WorkerId
from policies.cluster.state import ClusterView
from reports.told import OracleMeta, OracleSample
from twin.engine.sequence import Phase
from twin.mocker.requests import OpenRequest
from twin.mocker.wires import FRONTEND
from twin.mocker.world import MockWorld

SAMPLES: Final = 48
"""Decisions of a run, spread evenly, that are looked at: each costs a few steps of every worker."""
MAX_STEPS: Final = 2000
"""Steps of one worker until the first token; a decision that needs more is left out, and counted."""


class Hindsight:
    """Decides as `policy` does, and looks at one in so many decisions on prompts. `world` is set before the run.

    Where the number of `rows` is not known, it begins with every decision, and with twice as many as are wanted it
    forgets every second one and goes on at half the pace.
    """

    subscribes: ClassVar[frozenset[type[Event]]] = frozenset()

    def __init__(self, policy: Policy, rows: int | None) -> None:
        self.subscribes = policy.subscribes  # type: ignore[misc]  # that of the policy at hand
        self.world: MockWorld | None = None
        self._policy = policy
        self._every = 1 if rows is None else max(1, -(-rows // SAMPLES))
        self._decisions = 0
        self._looked_at: dict[int, OracleSample | None] = {}

    def decide(self, event: Event, view: ClusterView) -> Iterable[Action]:
        arrival = type(event) is RequestArrived
        for action in self._policy.decide(event, view):
            if arrival and isinstance(action, Dispatch) and action.leg is not Leg.DECODE and action.candidates:
                self._note(action)
            yield action

    @property
    def meta(self) -> OracleMeta | None:
        """What was found; None when no decision was looked at."""
        if not self._looked_at:
            return None
        samples = tuple(sample for sample in self._looked_at.values() if sample is not None)
        return OracleMeta(every=self._every, samples=samples, left_out=len(self._looked_at) - len(samples))

    def _note(self, action: Dispatch) -> None:
        at, self._decisions = self._decisions, self._decisions + 1
        if at % self._every or self.world is None:
            return
        self._looked_at[at] = self._look(self.world, action)
        if len(self._looked_at) >= 2 * SAMPLES:
            self._every *= 2
            self._looked_at = {at: found for at, found in self._looked_at.items() if at % self._every == 0}

    def _look(self, world: MockWorld, action: Dispatch) -> OracleSample | None:
        able = [candidate.worker_id for candidate in action.candidates if candidate.why_not is None]
        found = _in_a_copy(world, action, able)
        if found is None or action.worker_id not in found:
            return None
        best = min(found, key=lambda worker_id: (found[worker_id], worker_id != action.worker_id, worker_id))
        return OracleSample(
            row=world.open[action.request_id].row.row,
            at_s=world.clock.now,
            worker_id=action.worker_id,
            ttft_s=found[action.worker_id],
            best_worker_id=best,
            best_ttft_s=found[best],
        )


def _in_a_copy(world: MockWorld, action: Dispatch, able: Sequence[WorkerId]) -> dict[int, float] | None:
    """TTFT by worker, found in a forked process; None where one of them could not be told."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:  # the copy: it says what it found and is gone, whatever happens
        try:
            found = ttfts(world, action, able)
            with os.fdopen(theirs, "wb") as pipe:
                pipe.write(json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    plain = json.loads(told) if told else None
    return None if plain is None else {int(worker_id): ttft_s for worker_id, ttft_s in plain.items()}


def ttfts(world: MockWorld, action: Dispatch, able: Sequence[WorkerId]) -> dict[int, float] | None:
    """Run each of the workers on with the request until its first token. It uses the world up."""
    request = world.open[action.request_id]
    found: dict[int, float] = {}
    for worker_id in able:
        ttft_s = _ttft(world, request, worker_id, action.leg)
        if ttft_s is None:
            return None
        found[worker_id] = ttft_s
    return found


def _ttft(world: MockWorld, request: OpenRequest, worker_id: WorkerId, leg: Leg) -> float | None:
    """From arrival to the first token (or, on a prefill worker, to the end of the prompt) on this worker alone; None
    where it refuses, is stuck or cut off, waits for a lower tier, or takes too many steps.
    """
    worker = world.workers[worker_id]
    if worker.down or worker.hung or world.wires.cut(FRONTEND, worker_id):
        return None
    seq = world.sequence_for(request, leg, worker)
    if worker.submit(seq) is not None:
        return None
    engine, now_s = worker.engine, world.clock.now
    plan = worker.plan or engine.plan(now_s)
    for _ in range(MAX_STEPS):
        if plan is None or getattr(engine, "pending_loads", None):
            return None
        now_s = plan.end_s
        engine.commit(plan)
        if seq.first_token_s is not None:
            return seq.first_token_s - request.arrival_s
        if seq.phase is Phase.HELD:
            return now_s - request.arrival_s
        plan = engine.plan(now_s)
    return None
