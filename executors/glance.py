"""The live world as people and gauges see it: plain values, nothing that a policy decides by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from executors.backend import WorkerGlance
from policies.cluster.actions import Action, Dispatch, Enqueue, Reject

if TYPE_CHECKING:
    from executors.fleet import Fleet
    from executors.live_worker import LiveWorker
    from policies.cluster.state import ClusterView


def decision(at_s: float, action: Action, fleet: Fleet) -> Mapping[str, object]:
    """One order about a request."""
    shown: dict[str, object] = {"at_s": at_s, "reason": action.reason}
    match action:
        case Dispatch():
            shown |= {
                "request_id": action.request_id,
                "order": f"dispatch {action.leg.value}",
                "worker": fleet.name_of(action.worker_id),
                "rule": action.rule,
                "overlap_blocks": action.overlap_blocks,
            }
        case Reject():
            shown |= {"request_id": action.request_id, "order": "reject", "code": action.code}
        case Enqueue():
            shown |= {"request_id": action.request_id, "order": "enqueue", "class": action.policy_class}
    return shown


def worker_glance(worker: LiveWorker, view: ClusterView) -> WorkerGlance:
    """One worker that is up or on its way out."""
    seen = view.workers.get(worker.worker_id)
    load = worker.load
    total = worker.up.total_blocks
    return WorkerGlance(
        worker_id=worker.worker_id,
        name=worker.up.name,
        role=worker.up.role.value,
        state="draining" if worker.draining else "fenced" if seen is not None and seen.fences else "ready",
        in_flight=seen.in_flight if seen is not None else 0,
        running=load.running if load is not None else None,
        waiting=load.waiting if load is not None else None,
        kv_share=load.active_blocks / total if load is not None and total else None,
        cached_blocks=load.cached_blocks if load is not None else None,
    )
