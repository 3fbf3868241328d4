"""Builders for tests of policies: workers, requests, settings, and a scene that plays events into a policy.

A scene checks the invariants after every step, so that no test can pass on a history that could not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policies.cluster.actions import Action, Dispatch, Reject, SetTimer
from policies.cluster.blocks import BlockPath, ContentTree
from policies.cluster.controller import Controller, JournalSink, Policy
from policies.cluster.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    PrefillDone,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    TimerFired,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)
from policies.cluster.ids import RequestId, Role, Tier, WorkerId
from policies.cluster.invariants import Invariants
from policies.cluster.state import ClusterView
from policies.router.build import build
from policies.router.programs import ProgramSettings
from policies.router.settings import RouterSettings

BLOCK_SIZE = 64

SETTINGS = RouterSettings(
    mode="round-robin",
    seed=42,
    block_size=BLOCK_SIZE,
    explain=False,
    tie_break="seeded",
    overlap_score_credit=1.0,
    overlap_score_credit_decay=0.0,
    prefill_load_scale=1.0,
    overlap_score_weight=None,
    host_cache_hit_weight=0.75,
    disk_cache_hit_weight=0.25,
    shared_cache_multiplier=None,
    decode_active_request_weight=0.0,
    router_temperature=0.0,
    decode_basis="potential",
    track_active_blocks=True,
    track_prefill_tokens=True,
    track_output_blocks=False,
    assume_kv_reuse=True,
    use_kv_events=True,
    index_policy="ttl",
    approximate_ttl_s=120.0,
    device_ratio=8,
    programs=ProgramSettings(
        pause_at=0.95,
        pause_down_to=0.80,
        demote_at=0.80,
        demote_s=2.0,
        hysteresis=0.10,
        tick_s=5.0,
        force_resume_s=1800.0,
    ),
)


def router_settings(mode: str = "round-robin", **changes: object) -> RouterSettings:
    """The usual settings with some changed."""
    return replace(SETTINGS, mode=mode, **changes)  # type: ignore[arg-type]


def router(mode: str = "round-robin", **changes: object) -> Policy:
    return build(router_settings(mode, **changes))


def worker(worker_id: int, *, at_s: float = 0.0, **changes: object) -> WorkerUp:
    """A worker that comes up."""
    usual = WorkerUp(
        at_s=at_s,
        worker_id=WorkerId(worker_id),
        name=f"w{worker_id}",
        role=Role.MIXED,
        block_size=BLOCK_SIZE,
        total_blocks=1000,
        max_batched_tokens=8192,
        max_num_seqs=256,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def keys_path(tree: ContentTree, keys: Sequence[int]) -> BlockPath:
    """The path of a prompt that is exactly these keys long."""
    return tree.path(list(keys), len(keys) * tree.key_tokens)


class Scene:
    """A cluster of workers 0 to n - 1 under one policy. Every event comes `step_s` after the one before it.

    Content is given as lists of keys, one key per block.
    """

    def __init__(
        self,
        policy: Policy,
        workers: int | Sequence[WorkerUp] = 3,
        *,
        block_size: int = BLOCK_SIZE,
        journal: JournalSink | None = None,
        step_s: float = 0.001,
    ) -> None:
        self.policy = policy
        self.tree = ContentTree(block_size, block_size)
        self.invariants = Invariants()
        self._controller = Controller([policy], journal)
        self._now_s = 0.0
        self._step_s = step_s
        self._timers: dict[str, float] = {}
        self.where: dict[str, int] = {}
        for up in workers if not isinstance(workers, int) else [worker(i) for i in range(workers)]:
            self.post(replace(up, at_s=self._now_s))

    @property
    def view(self) -> ClusterView:
        return self._controller.view

    @property
    def now_s(self) -> float:
        return self._now_s

    @property
    def next_s(self) -> float:
        """The time of the next event; timers that are due by then fire first."""
        return self.wait(self._step_s)

    def wait(self, for_s: float) -> float:
        """Let time pass, and the timers fire that come due."""
        until_s = self._now_s + for_s
        self._fire(until_s)
        self._now_s = max(self._now_s, until_s)
        return self._now_s

    def _fire(self, until_s: float) -> None:
        while self._timers:
            due_s, name = min((due_s, name) for name, due_s in self._timers.items())
            if due_s > until_s:
                break
            del self._timers[name]
            self._now_s = max(self._now_s, due_s)
            self.post(TimerFired(at_s=self._now_s, name=name))

    def post(self, event: Event) -> list[Action]:
        """One step; also what the world owes for a Reject, and the timers that are due at once."""
        actions = list(self._controller.step(event))
        self.invariants.observe(event, actions)
        self.invariants.audit(self.view)
        for action in actions:
            if isinstance(action, Dispatch):
                self.where[action.request_id] = action.worker_id
            elif isinstance(action, Reject):
                self.post(RequestRejected(at_s=self._now_s, request_id=action.request_id, reason=action.code))
            elif isinstance(action, SetTimer):
                self._timers[action.name] = action.due_s
        self._fire(self._now_s)
        return actions

    def path(self, keys: Sequence[int]) -> BlockPath:
        return keys_path(self.tree, keys)

    def arrive(
        self,
        request_id: str,
        isl: int = 640,
        keys: Sequence[int] | None = None,
        hint: int | None = None,
        **more: object,
    ) -> Action:
        """A request arrives; the one action for it. With `keys`, the prompt's blocks are the first isl // size."""
        blocks = self.tree.path(list(keys), isl) if keys is not None else None
        arrived = RequestArrived(
            at_s=self.next_s,
            request_id=RequestId(request_id),
            isl=isl,
            blocks=blocks,
            worker_hint=WorkerId(hint) if hint is not None else None,
            **more,  # type: ignore[arg-type]
        )
        (action,) = [action for action in self.post(arrived) if not isinstance(action, SetTimer)]
        return action

    def send(
        self,
        request_id: str,
        isl: int = 640,
        keys: Sequence[int] | None = None,
        hint: int | None = None,
        **more: object,
    ) -> int:
        """A request arrives and must be dispatched; the worker that it goes to."""
        action = self.arrive(request_id, isl, keys, hint, **more)
        assert isinstance(action, Dispatch), action
        return action.worker_id

    def prefill_done(self, request_id: str) -> None:
        self.post(PrefillDone(at_s=self.next_s, request_id=RequestId(request_id), worker_id=self._at(request_id)))

    def first_token(self, request_id: str) -> None:
        self.post(FirstToken(at_s=self.next_s, request_id=RequestId(request_id), worker_id=self._at(request_id)))

    def finish(self, request_id: str, output_tokens: int = 1) -> None:
        self.post(
            RequestFinished(
                at_s=self.next_s,
                request_id=RequestId(request_id),
                worker_id=self._at(request_id),
                output_tokens=output_tokens,
            )
        )

    def fail(self, request_id: str) -> None:
        self.post(
            RequestFailed(
                at_s=self.next_s, request_id=RequestId(request_id), reason="test", worker_id=self._at(request_id)
            )
        )

    def cancel(self, request_id: str) -> None:
        self.post(RequestCancelled(at_s=self.next_s, request_id=RequestId(request_id), worker_id=self._at(request_id)))

    def cancel_waiting(self, request_id: str) -> None:
        """The client of a request that no worker has leaves."""
        self.post(RequestCancelled(at_s=self.next_s, request_id=RequestId(request_id)))

    def stored(self, worker_id: int, keys: Sequence[int], lo: int = 0, tier: Tier = Tier.G1_DEVICE) -> None:
        """Blocks lo .. len(keys) of that content are in a worker's cache from now on."""
        self.post(BlocksStored(at_s=self.next_s, worker_id=WorkerId(worker_id), runs=self._runs(keys, lo), tier=tier))

    def removed(self, worker_id: int, keys: Sequence[int], lo: int = 0, tier: Tier = Tier.G1_DEVICE) -> None:
        self.post(BlocksRemoved(at_s=self.next_s, worker_id=WorkerId(worker_id), runs=self._runs(keys, lo), tier=tier))

    def named(self, event: RequestArrived) -> RequestArrived:
        """A request as a router here is told of it."""
        return event

    def cleared(self, worker_id: int, tier: Tier | None = None) -> None:
        self.post(BlocksCleared(at_s=self.next_s, worker_id=WorkerId(worker_id), tier=tier))

    def up(self, worker_id: int, **changes: object) -> None:
        self.post(worker(worker_id, at_s=self.next_s, **changes))

    def draining(self, worker_id: int) -> None:
        self.post(WorkerDraining(at_s=self.next_s, worker_id=WorkerId(worker_id)))

    def lost(self, worker_id: int) -> None:
        self.post(WorkerLost(at_s=self.next_s, worker_id=WorkerId(worker_id)))

    def _at(self, request_id: str) -> WorkerId:
        return WorkerId(self.where[request_id])

    def _runs(self, keys: Sequence[int], lo: int) -> tuple:
        runs = self.path(keys).runs()
        return tuple(run._replace(lo=max(run.lo, lo)) for run in runs if run.hi > lo)
