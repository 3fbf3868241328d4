"""A real etcd of one member on loopback, for tests."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from executors.ports import LOOPBACK, PortAllocator, PortNeed
from executors.process import EngineProcess


class EtcdServer:
    """`place` is how discovery and connectors are told where it is. Its ports stay the same from start to start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = PortAllocator()
        ports = self._ports.take("etcd", [PortNeed(name="clients"), PortNeed(name="peers")])
        self.clients, self._peers = (f"http://{LOOPBACK}:{ports[name]}" for name in ("clients", "peers"))
        self.place = self.clients.replace("http", "etcd")
        self._server: EngineProcess | None = None

    async def start(self) -> None:
        command = ["etcd", "--data-dir", str(self._folder / "etcd"), "--name", "one", "--logger", "zap",
                   "--listen-client-urls", self.clients, "--advertise-client-urls", self.clients,
                   "--listen-peer-urls", self._peers, "--initial-advertise-peer-urls", self._peers,
                   "--initial-cluster", f"one={self._peers}", "--heartbeat-interval", "50",
                   "--election-timeout", "500"]  # fmt: skip
        self._server = await EngineProcess.start("etcd", command, self._folder / "etcd.log")
        async with aiohttp.ClientSession() as session:

            async def healthy() -> bool:
                async with session.get(f"{self.clients}/health", timeout=aiohttp.ClientTimeout(2)) as answer:
                    return (await answer.json(content_type=None)).get("health") == "true"

            await self._server.wait_ready(healthy, 60.0)

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(10.0)

    async def close(self) -> None:
        await self.stop()
        self._ports.close()
