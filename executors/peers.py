"""Bookings between the routers of several frontends: each takes in messages on one socket and sends to all others.

Messages may be lost, never reordered between two routers: the policies notice what is missing and ask
(`policies.router.replicas`). So nothing here waits for anybody. Whoever is heard can say where requests go: with a key
only those are who have it (`peer_seal`), without one the socket is on loopback unless somebody said to go without.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from executors.discovery import open_discovery
from executors.discovery.protocol import Discovery, Joined, Left, Registration, StoreError, Watch
from executors.discovery.record import FRONTEND, WorkerRecord
from executors.live_worker import LiveWorker
from executors.peer_seal import Refused, Seal
from executors.peer_wire import Damaged, Message, Sender, read, write
from executors.peering import Peering
from executors.ports import LOOPBACK, bracketed
from executors.world import LiveWorld
from policies.cluster.actions import PublishBooking
from policies.cluster.bookings import SyncKind
from policies.cluster.events import PeerBooking
from policies.cluster.ids import Role, WorkerId
from policies.errors import CapabilityError, ConfigError
from policies.router.replicas import SILENCE_S

log = logging.getLogger(__name__)

ASK_S: Final = SILENCE_S / 3
"""How often each router is asked for all that it has open: it hears of us by that, and what was lost comes again."""
WAITING: Final = 10_000
"""Messages that wait for a router which does not take them; more are lost."""
MESSAGE_BYTES: Final = 64 << 20


@dataclass(slots=True)
class PeerCounts:
    """Messages `sent` (one for each router), `heard`, `lost` (nobody took them), `damaged`, `refused` (not sealed with
    our key, for somebody else, or here before); `unknown`: steps about workers that are not known here."""

    sent: int = 0
    heard: int = 0
    lost: int = 0
    damaged: int = 0
    refused: int = 0
    unknown: int = 0

    def table(self) -> dict[str, int]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


class Peers:
    """The other routers of `world`, whose own number is `origin`; `model` is what is served."""

    def __init__(self, world: LiveWorld, origin: int, told: Peering, model: str) -> None:
        self._world = world
        self._origin = origin
        self._told = told
        self._seal = Seal(told.key, origin)
        self._said: set[str] = set()
        self._model = model
        self._context = zmq.asyncio.Context.instance()  # never ended, as with followers of KV events
        self._plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._addresses: dict[int, str] = {}
        """Of routers that were heard, by number."""
        self._known: dict[str, WorkerId] = {}
        self._hearing: zmq.asyncio.Socket | None = None
        self._store: Discovery | None = open_discovery(told.place) if told.place is not None else None
        self._watch: Watch | None = None
        self._entry: Registration | None = None
        self.address = ""
        self.counts = PeerCounts()

    @property
    def others(self) -> Sequence[str]:
        """Addresses of the other routers that are known now."""
        return sorted(self._sockets)

    async def start(self) -> None:
        """Listen, and look for the others. Raises ConfigError where the port is taken, CapabilityError where the store
        cannot be reached."""
        self._listen()
        for address in self._told.addresses:
            self._add(address)
        if self._store is not None:
            await self._register(self._store)
            self._watch = self._store.watch()
            await self._watch.listed()
            self._world.spawn(self._follow(self._watch))
        self._world.spawn(self._hear())
        self._world.spawn(self._ask())

    def _listen(self) -> None:
        host, port = self._told.listen
        self._hearing = self._context.socket(zmq.PULL)
        self._hearing.setsockopt(zmq.LINGER, 0)
        self._hearing.setsockopt(zmq.RCVHWM, WAITING)
        self._hearing.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        self._hearing.setsockopt(zmq.IPV6, ":" in host)
        try:
            self._hearing.bind(f"tcp://{bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(f"--peer-listen {host}:{port}: {error}; give another port") from error
        bound = self._hearing.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = f"tcp://{bracketed(host)}:{urlsplit(bound).port}"

    async def _register(self, store: Discovery) -> None:
        if self._told.place is not None and self._told.place.endswith(".toml"):
            return  # people list the frontends there
        here = socket.gethostname()
        record = WorkerRecord(
            name=f"frontend-{here}-{urlsplit(self.address).port}",
            incarnation=self._origin,
            engine=FRONTEND,
            url=self.address,
            role=Role.MIXED,
            models=(self._model,),
            host=here,
            pid=os.getpid(),
            block_size=self._world.tree.block_size,
        )
        try:
            self._entry = await store.register(record)
        except StoreError as error:
            raise CapabilityError(f"--peers: this frontend cannot be registered in {store.name}: {error}") from error

    async def close(self) -> None:
        """Leave, so that the others forget our bookings."""
        if self._watch is not None:
            await self._watch.close()
        if self._entry is not None:
            with contextlib.suppress(StoreError):
                await self._entry.deregister()
        if self._store is not None:
            await self._store.close()
        for one in self._sockets.values():
            one.close()
        self._sockets.clear()
        if self._hearing is not None:
            self._hearing.close()

    # ------------------------------------------------------------ who is there

    async def _follow(self, watch: Watch) -> None:
        async for seen in watch:
            match seen:
                case Joined(record=record) if record.engine == FRONTEND:
                    self._add(record.url)
                case Left(record=record) if record.engine == FRONTEND:
                    self._drop(record.url)

    def _add(self, address: str) -> None:
        if address in self._sockets or address == self.address:
            return
        made = self._plain.socket(zmq.PUSH)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, WAITING)
        made.setsockopt(zmq.IPV6, "[" in address)
        made.connect(address)
        self._sockets[address] = made
        self._send(address, self._asking())

    def _drop(self, address: str) -> None:
        """That router has left, and has nothing open any more."""
        gone = self._sockets.pop(address, None)
        if gone is not None:
            gone.close()
        for origin in [origin for origin, at in self._addresses.items() if at == address]:
            self._forget(origin)

    def _forget(self, origin: int) -> None:
        del self._addresses[origin]
        self._post(origin, 0, SyncKind.RESYNC)

    # ------------------------------------------------------------ out

    def publish(self, action: PublishBooking) -> None:
        """Tell whoever it is meant for; it is lost on those who do not listen."""
        known = self._addresses.get(action.dest) if action.dest is not None else None
        text = self._text(action)
        for address in self._sockets if known is None else (known,):
            if self._seal.is_on and self._number_of(address) is None:
                self.counts.lost += 1  # it would not be taken: we ask who that is
            else:
                self._send(address, text)

    def _number_of(self, address: str) -> int | None:
        return next((origin for origin, at in self._addresses.items() if at == address), None)

    def _send(self, address: str, text: bytes, to: int | None = None) -> None:
        sealed = self._seal.close(text, self._number_of(address) if to is None else to)
        try:
            self._sockets[address].send(sealed, zmq.NOBLOCK)
            self.counts.sent += 1
        except zmq.Again:
            self.counts.lost += 1

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            for address in self._sockets:
                self._send(address, self._asking())

    def _asking(self) -> bytes:
        return self._text(PublishBooking(origin=self._origin, seq=0, kind=SyncKind.ASK, reason="tell all"))

    def _text(self, action: PublishBooking) -> bytes:
        me = Sender(origin=self._origin, address=self.address, block_size=self._world.tree.block_size)
        return write(action, me, self._name_of)

    # ------------------------------------------------------------ in

    async def _hear(self) -> None:
        assert self._hearing is not None
        while True:
            told = await self._hearing.recv()
            try:
                opened = self._seal.open(told)
                message = read(opened.text, self._world.tree, self._worker_of)
                if opened.origin not in (None, message.sender.origin):
                    raise Refused("it speaks for another router than the one that sealed it")
            except Damaged as error:
                self.counts.damaged += 1
                log.warning("a message of another router is left out: %s", error)
            except Refused as error:
                self.counts.refused += 1
                self._say_refused(str(error))
            else:
                self._take(message) if opened.to_us else self._introduce(message)

    def _say_refused(self, why: str) -> None:
        """Once for each reason: whoever reaches the socket can send as much as it likes."""
        if why not in self._said:
            self._said.add(why)
            log.warning("a message to this router is refused: %s", why)

    def _introduce(self, message: Message) -> None:
        """A router that does not know our number asks. Nothing that it says counts, for it may have been said before we
        were here; told who we are, it says it again to us."""
        address = message.sender.address
        self.counts.heard += 1
        if address in self._sockets:
            self._send(address, self._asking(), to=message.sender.origin)

    def _take(self, message: Message) -> None:
        origin, address = message.sender.origin, message.sender.address
        if origin == self._origin or message.dest not in (None, self._origin):
            return
        self.counts.heard += 1
        self.counts.unknown += message.unknown
        if address in self._sockets and self._addresses.get(origin) != address:
            for before in [one for one, at in self._addresses.items() if at == address]:
                self._forget(before)  # another process listens there now
            self._addresses[origin] = address
            self._send(address, self._asking())  # it knows us by now: what we asked before may have gone nowhere
        self._world.post(
            PeerBooking(
                at_s=self._world.clock.now(),
                origin=origin,
                dest=self._origin,
                seq=message.seq,
                kind=message.kind,
                ops=message.ops,
            )
        )

    def _post(self, origin: int, seq: int, kind: SyncKind) -> None:
        at_s = self._world.clock.now()
        self._world.post(PeerBooking(at_s=at_s, origin=origin, dest=self._origin, seq=seq, kind=kind))

    # ------------------------------------------------------------ workers by name

    def _name_of(self, worker_id: WorkerId) -> str | None:
        worker = self._world.fleet.workers.get(worker_id)
        return None if worker is None else _name(worker)

    def _worker_of(self, name: str) -> WorkerId | None:
        workers = self._world.fleet.workers
        known = self._known.get(name)
        if known is None or workers[known].lost:
            self._known = {_name(worker): worker.worker_id for worker in workers.values() if not worker.lost}
            known = self._known.get(name)
        return known


def _name(worker: LiveWorker) -> str:
    """What all frontends know a worker by: its address, on which host where that is loopback, and which life."""
    parts = urlsplit(worker.url)
    here = f"@{socket.gethostname()}" if parts.hostname in (LOOPBACK, "localhost", "::1") else ""
    return f"{worker.url}{here}#{worker.incarnation}"
