"""The frontend as a server: its listeners, its start, and its end in phases.

`Frontend.run` is for a process of its own (signals, exit code); `start` and `stop` are for whoever has a loop already.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import uvicorn

from executors.backend import Backend
from executors.frontend.application import application
from executors.frontend.gate import App
from executors.frontend.services import Services
from executors.frontend.settings import Settings
from executors.frontend.stopping import Stopping, shut_down
from executors.frontend.tokens import ServedTokenizer
from executors.frontend.wire import Doors, protocol
from policies.errors import ConfigError

log = logging.getLogger(__name__)

EXIT_CUT: Final = 4
"""Exit code where requests were not let finish."""
_ADMIN_HOST: Final = "127.0.0.1"
_BACKLOG: Final = 2048


class Frontend:
    """Serves `backend` to clients. `tokenizers`: those of the models, by name. `now`: the clock by which the backend
    stamps deltas; without one, that of the event loop (which is the monotonic clock)."""

    def __init__(
        self,
        backend: Backend,
        tokenizers: Mapping[str, ServedTokenizer],
        settings: Settings | None = None,
        stopping: Stopping | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or Settings()
        self.settings = settings
        self.stopping = stopping or Stopping()
        self.services = Services.build(backend, tokenizers, settings, self.stopping, now)
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self._kserve: Any = None
        self.ports: list[int] = []
        """Of the listeners: the public one, then that of administrators where there is one."""

    @property
    def port(self) -> int:
        return self.ports[0]

    async def start(self) -> None:
        """Listen; returns when connections are taken. Raises ConfigError where a port cannot be had."""
        settings = self.settings
        self._warn()
        own_admin = settings.admin_port is not None
        doors = Doors(settings, self.services.metrics)
        await self._listen(
            application(self.services, admin=not own_admin), settings.host, settings.port, doors, tls=True
        )
        if settings.admin_port is not None:
            admin = application(self.services, admin_only=True)
            await self._listen(admin, _ADMIN_HOST, settings.admin_port, doors, tls=False)
        if settings.kserve_port is not None:
            from executors.frontend.kserve.server import KserveServer  # gRPC is an extra

            self._kserve = KserveServer(self.services)
            self.ports.append(await self._kserve.start(settings.host, settings.kserve_port))

    async def stop(self) -> int:
        """Leave, drain, close. Returns the exit code: 0, or 4 where requests were cut."""
        deadlines = self.settings.deadlines
        await self.stopping.go(deadlines.grace_s, deadlines.drain_s, self.services.open.idle, self._cut)
        if self._kserve is not None:
            await self._kserve.stop()
        await self._close()
        self.services.pool.shutdown(wait=False, cancel_futures=True)
        return EXIT_CUT if self.stopping.cut else 0

    async def run(self) -> int:
        """Start, serve until a signal, stop. A second signal ends all waiting."""
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if asked.is_set():
                self.stopping.hurry()
            asked.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            await self.start()
            await asked.wait()
            return await self.stop()
        finally:
            await self._close()  # where the start failed half-way
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _close(self) -> None:
        for server, _ in self._servers:
            server.asked.set()
        await asyncio.gather(*(task for _, task in self._servers))

    def _cut(self) -> int:
        return sum(run.cut(shut_down()) for run in list(self.services.runs))

    async def _listen(self, app: App, host: str, port: int, doors: Doors, *, tls: bool) -> None:
        options = self._tls() if tls else {}
        bound = _bind(host, port)
        self.ports.append(bound.getsockname()[1])
        config = uvicorn.Config(
            app,
            http=protocol(doors),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(self.settings.deadlines.idle_s),
            timeout_graceful_shutdown=1,
            **options,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[bound]))
        self._servers.append((server, task))
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait((up, task), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if task.done():
            await task

    def _tls(self) -> dict[str, Any]:
        tls = self.settings.tls
        if tls is None:
            return {}
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key)
        except OSError as error:
            why = error.strerror if error.filename else error.args[-1]
            raise ConfigError(f"{tls.cert} with key {tls.key} cannot be used ({why}); both are files in PEM") from None
        options: dict[str, Any] = {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
        if tls.client_ca is not None:
            options.update(ssl_ca_certs=str(tls.client_ca), ssl_cert_reqs=ssl.CERT_REQUIRED)
        return options

    def _warn(self) -> None:
        if not self.settings.on_loopback and not self.services.keys:
            log.warning("listening on %s without API keys: everybody who can connect may use it", self.settings.host)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.asked = asyncio.Event()
        """To end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.asked.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends at once only where it is named
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(f"{host}:{port} cannot be listened on ({error.strerror}); take another port") from None
    except OverflowError:
        made.close()
        raise ConfigError(f"{host}:{port} cannot be listened on: ports go up to 65535") from None
    made.listen(_BACKLOG)
    made.setblocking(False)
    return made
