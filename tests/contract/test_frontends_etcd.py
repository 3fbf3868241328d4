"""A host of workers and two frontends over a real etcd: workers are found, bookings shared, and all leave in order."""

from __future__ import annotations

import asyncio
import shutil
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_vllm_server import BLOCK, MODEL, checkpoint, interpreter
from test_discovery_contract import EtcdBench

from executors.assemble import Host, LiveCluster
from executors.backend import Ask
from executors.discovery.record import fingerprint_of
from executors.hosting import Self, Terms, WorkerHost
from executors.peering import Peering
from executors.starter import HostStarter, Model
from policies.cluster.ids import RequestId
from policies.router.replicas import Replica
from twin.config import Config, EngineConfig, RouterConfig, WorkerGroup

LIMIT_S = 60.0
GROUP = WorkerGroup(name="pool", count=1, engine=EngineConfig(block_size=BLOCK, prefix_caching=False))
CONFIG = Config(workers=(GROUP,), router=RouterConfig(mode="kv", use_kv_events=False))

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        shutil.which("etcd") is None,
        reason="SKIP frontends over etcd: no etcd on PATH; install with apt-get install -y etcd-server",
    ),
]


async def frontend(stack: AsyncExitStack, place: str, model: Path) -> tuple[LiveCluster, Replica]:
    told = Host(
        model=Model(checkpoint=str(model), served_as=MODEL), pythons={}, attached={}, discovery=place,
        fingerprint=fingerprint_of(model), peering=Peering(place=place),
    )  # fmt: skip
    made = LiveCluster(CONFIG, told)
    stack.push_async_callback(made.close)
    await made.start()
    (router,) = (one for one in made.world.controller._policies if isinstance(one, Replica))
    return made, router


async def holds(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_workers_are_found_and_bookings_shared(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)

    async def play(stack: AsyncExitStack) -> None:
        bench = EtcdBench(tmp_path)
        stack.push_async_callback(bench.close)
        await bench.start()
        loop = asyncio.get_running_loop()
        starter = HostStarter(
            {"pool": GROUP}, Model(checkpoint=str(model), served_as=MODEL), {"vllm": interpreter(tmp_path)}, loop.time,
            tmp_path / "logs", shared=True, gpus=(),
        )  # fmt: skip
        own = Self(prefix="h1", host=socket.gethostname(), fingerprint=fingerprint_of(model))
        host = WorkerHost(starter, "pool", bench.open(), own, Terms(grace_s=1.0))
        stack.push_async_callback(host.close)
        await host.start(1)
        (a, _), (b, router) = [await frontend(stack, bench.place, model) for _ in range(2)]
        assert [worker.name for worker in b.service.workers()] == ["h1-pool-0"]
        await holds(lambda: a.peers is not None and a.peers.others)
        stream = a.world.submit(Ask(request_id=RequestId("r"), token_ids=[1] * 70, max_tokens=5, model=MODEL))
        assert [token async for delta in stream for token in delta.token_ids][-1] == 504
        await holds(lambda: router.counters()["sync_heard"] and not router.peer_bookings)
        assert await host.stop() is True
        await holds(lambda: not (a.service.workers() or b.service.workers()))

    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            await play(stack)

    asyncio.run(test())
