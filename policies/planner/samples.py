"""Forward passes, taken in: which are kept, which teach the step models, and who has not been heard of.

A pass that cannot be is dropped and counted by reason; one of a young worker says what waits there, and teaches nothing
(its caches and kernels are cold). Only the last pass of each rank is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter

from policies.cluster.events import WorkerUp
from policies.cluster.ids import Role, WorkerId
from policies.cluster.state import ClusterView
from policies.cluster.traffic import ForwardPass, PassLoad
from policies.frozen import frozen
from policies.planner.step_model import Sample, StepModel

_VALUES = attrgetter(*(one.name for one in fields(PassLoad)))
Rank = tuple[WorkerId, int]


@frozen
class Engine:
    """One rank of a worker as its last pass shows it: tokens and sequences that run and that wait."""

    worker_id: WorkerId
    dp_rank: int
    queued_prefill_tokens: float
    scheduled_prefill_tokens: float
    running_kv_tokens: float
    queued_kv_tokens: float
    decode_requests: float

    @property
    def kv_tokens(self) -> float:
        """KV that its decodes hold, or will hold again once they run."""
        return self.running_kv_tokens + self.queued_kv_tokens

    @property
    def idle(self) -> bool:
        return not (self.queued_prefill_tokens or self.scheduled_prefill_tokens or self.decode_requests)


@frozen
class Heard:
    """The engines of one role, and the workers that have not been heard of."""

    engines: tuple[Engine, ...]
    stale: tuple[WorkerId, ...]


class Passes:
    """The last pass of every rank of the roles that are planned, and the models that they teach."""

    def __init__(
        self, models: Mapping[Role, StepModel], stale_s: float, warmup_s: float = 30.0, warmup_passes: int = 20
    ) -> None:
        self._models = models
        self._stale_s = stale_s
        self._warmup_s, self._warmup_passes = warmup_s, warmup_passes
        self._last: dict[Rank, ForwardPass] = {}
        self._seen: dict[WorkerId, int] = {}
        self._roles: dict[WorkerId, Role] = {}
        self._up_s: dict[WorkerId, float] = {}
        self.dropped: dict[str, int] = {}

    def up(self, event: WorkerUp) -> None:
        """A worker is ready; one that comes back is a new one."""
        self.lost(event.worker_id)
        if event.role in self._models:
            self._roles[event.worker_id] = event.role
            self._up_s[event.worker_id] = event.at_s
            self._seen[event.worker_id] = 0

    def lost(self, worker_id: WorkerId) -> None:
        for rank in [rank for rank in self._last if rank[0] == worker_id]:
            del self._last[rank]
        for book in (self._roles, self._up_s, self._seen):
            book.pop(worker_id, None)

    def take(self, event: ForwardPass) -> str | None:
        """Take in one pass; why it was dropped, or None."""
        why = self._why_dropped(event)
        if why is not None:
            self.dropped[why] = self.dropped.get(why, 0) + 1
            return why
        assert event.worker_id is not None
        worker_id = event.worker_id
        self._last[worker_id, event.dp_rank] = event
        if event.wall_time_s > 0:
            self._seen[worker_id] += 1
            old = event.at_s - self._up_s[worker_id] >= self._warmup_s and self._seen[worker_id] > self._warmup_passes
            if old:
                self._teach(event, self._roles[worker_id])
        return None

    def heard(self, view: ClusterView, role: Role, now_s: float) -> Heard:
        """The ranks of all workers of a role that take work, by id; and the workers that have not been heard of for too
        long, whose ranks are left out."""
        engines: list[Engine] = []
        stale: list[WorkerId] = []
        ranks: dict[WorkerId, list[ForwardPass]] = {}
        for (worker_id, _), last in sorted(self._last.items()):
            ranks.setdefault(worker_id, []).append(last)
        for worker in view.workers.values():
            if worker.up.role is not role or worker.draining:
                continue
            mine = ranks.get(worker.worker_id, [])
            if mine and all(now_s - last.at_s <= self._stale_s for last in mine):
                engines += [_engine(last) for last in mine]
            else:
                stale.append(worker.worker_id)
        engines.sort(key=lambda engine: (engine.worker_id, engine.dp_rank))
        return Heard(engines=tuple(engines), stale=tuple(sorted(stale)))

    def _why_dropped(self, event: ForwardPass) -> str | None:
        if event.worker_id is None:
            return "no_worker"
        if event.unreadable is not None:
            return "unreadable"
        values = (event.wall_time_s, *_VALUES(event.scheduled), *_VALUES(event.queued))
        if not all(map(math.isfinite, values)):
            return "not_finite"
        if min(values) < 0:
            return "negative"
        if event.worker_id not in self._roles:
            return "unknown_worker"
        last = self._last.get((event.worker_id, event.dp_rank))
        if last is not None and event.counter < last.counter:
            return "out_of_order"
        return None

    def _teach(self, event: ForwardPass, role: Role) -> None:
        """A prefill model learns from passes with prompts, a decode model from passes with decodes alone."""
        ran = event.scheduled
        prompt, kv = ran.sum_prefill_tokens, ran.sum_decode_kv_tokens
        if role is Role.PREFILL:
            sample = (prompt, 0.0) if prompt > 0 else None
        elif role is Role.DECODE:
            sample = (ran.num_decode_requests, kv) if ran.num_decode_requests > 0 and not prompt else None
        else:
            sample = (prompt, kv) if prompt > 0 or ran.num_decode_requests > 0 else None
        if sample is not None:
            taken = self._models[role].learn(
                Sample(x=sample[0], kv=sample[1], seconds=event.wall_time_s, at_s=event.at_s)
            )
            if not taken:
                self.dropped["outlier"] = self.dropped.get("outlier", 0) + 1


def _engine(last: ForwardPass) -> Engine:
    assert last.worker_id is not None
    ran, waits = last.scheduled, last.queued
    return Engine(
        worker_id=last.worker_id,
        dp_rank=last.dp_rank,
        queued_prefill_tokens=waits.sum_prefill_tokens,
        scheduled_prefill_tokens=ran.sum_prefill_tokens,
        running_kv_tokens=ran.sum_decode_kv_tokens,
        queued_kv_tokens=waits.sum_decode_kv_tokens,
        decode_requests=ran.num_decode_requests + waits.num_decode_requests,
    )
