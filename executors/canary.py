"""A canary: one token past all queues of a worker that has said nothing for a while. It never counts as a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from executors.engines.protocol import GREEDY, LegFailed, LegRequest
from executors.live_worker import LiveWorker
from policies.cluster.actions import Probe
from policies.cluster.events import ProbeEnded, WorkerHeard
from policies.cluster.ids import Leg, LossCause, ProbeResult, RequestId

if TYPE_CHECKING:
    from executors.world import LiveWorld


async def canary(world: LiveWorld, worker: LiveWorker, action: Probe) -> None:
    """Ask for one token, unless the worker has said something meanwhile; what came of it is posted."""
    now_s = world.clock.now()
    if now_s - worker.heard_s < action.idle_s:
        world.post(WorkerHeard(at_s=now_s, worker_id=worker.worker_id, epoch=action.epoch, last_s=worker.heard_s))
        return
    asked = LegRequest(
        leg_id=f"canary-{worker.worker_id}-{action.epoch}-{now_s:.6f}",
        request_id=RequestId(f"canary-{worker.worker_id}"),
        leg=Leg.AGG,
        token_ids=(1,) * 4,
        max_tokens=1,
        sampling=GREEDY,
    )
    result = ProbeResult.OK
    try:
        async with asyncio.timeout(action.timeout_s):
            async for _ in worker.engine.generate(asked):
                pass
    except TimeoutError:
        result = ProbeResult.SILENT
    except LegFailed as failed:
        result = ProbeResult.OVERLOADED if failed.cause is LossCause.OVERLOAD else ProbeResult.SILENT
    if not worker.lost:
        at_s = world.clock.now()
        if result is ProbeResult.OK:
            worker.heard_s, worker.unanswered_s = at_s, None
        world.post(ProbeEnded(at_s=at_s, worker_id=worker.worker_id, epoch=action.epoch, result=result))
