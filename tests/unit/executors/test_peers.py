"""Routers that share bookings over real sockets: what one sends out counts at the other until it or its router ends."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_engines import FakeVllm

from executors.backend import Ask
from executors.clock import WallClock
from executors.deadlines import Deadlines
from executors.engines.remote import Attached
from executors.engines.vllm import Vllm
from executors.frontend.glance import Glance
from executors.frontend.metrics import Metrics
from executors.peering import Peering, peering
from executors.peers import Peers
from executors.requests import Stream
from executors.service import Service
from executors.world import LiveWorld
from policies.cluster.actions import Action, PublishBooking
from policies.cluster.blocks import ContentTree
from policies.cluster.controller import Controller
from policies.cluster.events import Event, PeerBooking
from policies.cluster.ids import RequestId, WorkerId
from policies.cluster.journal import Header, Journal, replay
from policies.errors import ConfigError
from policies.router.replicas import Replica
from twin.config import Config, RouterConfig
from twin.deciding import build_policy

LIMIT_S = 15.0
AMPLE = Deadlines(connect_s=LIMIT_S, first_token_s=LIMIT_S, between_tokens_s=LIMIT_S, control_s=LIMIT_S)
CONFIG = Config(router=RouterConfig(mode="kv", use_kv_events=False, tie_break="lowest_id"))


class Router:
    """One frontend's world, with its router and its link to others."""

    def __init__(self, number: int, told: Peering) -> None:
        self.heard: asyncio.Queue[PeerBooking] = asyncio.Queue()
        self.noted: list[tuple[Event, tuple[Action, ...]]] = []
        policy = build_policy(CONFIG, 32, number=number)
        assert isinstance(policy, Replica)
        self.policy = policy
        self.world = LiveWorld(
            Controller([policy], self),
            WallClock(asyncio.get_running_loop()),
            ContentTree(32, 32),
            peers=lambda action: self.peers.publish(action),
        )
        self.world.fleet.looks_after = False
        self.peers = Peers(self.world, number, told, "tiny")

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        self.noted.append((event, tuple(actions)))
        if isinstance(event, PeerBooking):
            self.heard.put_nowait(event)

    async def bookings(self, count: int) -> None:
        """Until so many bookings of others are charged here."""
        while self.policy.peer_bookings != count:
            await self.heard.get()

    async def attach(self, servers: list[FakeVllm]) -> None:
        for n, server in enumerate(servers):
            at = Attached(name=f"w{n}", url=server.url, max_num_seqs=8)
            await self.world.fleet.attach(Vllm(at, AMPLE, self.world.clock.now), at.name, "pool")

    def ask(self, name: str) -> Stream:
        tokens = [zlib.crc32(f"{name} {n}".encode()) % 32_000 for n in range(100)]  # no two prompts are alike
        return self.world.submit(Ask(request_id=RequestId(name), token_ids=tokens, max_tokens=3, model="tiny"))

    async def close(self) -> None:
        await self.world.close()
        await self.peers.close()


@asynccontextmanager
async def pair(place: Path) -> AsyncIterator[tuple[Router, Router, list[FakeVllm]]]:
    """Two routers that know two workers in another order."""
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        servers = [FakeVllm() for _ in range(2)]
        for server in servers:
            await stack.enter_async_context(server)
        routers = [Router(number, Peering(place=str(place))) for number in (11, 22)]
        for router, known in zip(routers, (servers, servers[::-1]), strict=True):
            await router.attach(known)
            await router.peers.start()
            stack.push_async_callback(router.close)
        yield routers[0], routers[1], servers


def played(place: Path, play: Callable[[Router, Router, list[FakeVllm]], Any]) -> None:
    async def test() -> None:
        async with pair(place) as (a, b, servers):
            await play(a, b, servers)

    asyncio.run(test())


async def worker_of(stream: Stream) -> str | None:
    async for _ in stream:
        pass
    assert stream.end is not None
    assert stream.end.outcome == "length"
    return stream.end.worker


def test_what_one_router_sends_out_counts_at_the_other_until_it_ends(tmp_path: Path) -> None:
    async def play(a: Router, b: Router, servers: list[FakeVllm]) -> None:
        servers[0].does = servers[1].does = "hang"
        first, second = a.ask("a0"), a.ask("a1")  # one to each, server 0 first
        await b.bookings(2)
        first.cancel("enough")
        await b.bookings(1)
        servers[0].does = servers[1].does = "answer"
        assert await worker_of(b.ask("b1")) == "w1", "w0 of b is server 1, which has work of the other router"
        second.cancel("enough")
        await b.bookings(0)
        assert await worker_of(b.ask("b2")) == "w0", "equals go to the lowest number"
        assert a.peers.counts.unknown == b.peers.counts.unknown == 0

    played(tmp_path, play)


def test_a_router_that_comes_later_is_told_all_that_is_open(tmp_path: Path) -> None:
    async def play(a: Router, _: Router, servers: list[FakeVllm]) -> None:
        servers[0].does = servers[1].does = "hang"
        a.ask("a0"), a.ask("a1")
        await asyncio.gather(*(server.asked.wait() for server in servers))
        late = Router(33, Peering(place=str(tmp_path)))
        await late.attach(servers)
        await late.peers.start()
        await late.bookings(2)
        await late.close()

    played(tmp_path, play)


def test_bookings_of_a_router_that_leaves_end_with_it(tmp_path: Path) -> None:
    async def play(a: Router, b: Router, servers: list[FakeVllm]) -> None:
        servers[0].does = servers[1].does = "hang"
        a.ask("a0"), a.ask("a1")
        await b.bookings(2)
        await a.peers.close()
        await b.bookings(0)
        assert not b.peers.others

    played(tmp_path, play)


def test_a_message_that_was_lost_is_asked_for_again(tmp_path: Path) -> None:
    async def play(a: Router, b: Router, servers: list[FakeVllm]) -> None:
        servers[0].does = servers[1].does = "hang"
        a.ask("a0")
        await b.bookings(1)
        publish, lost = a.peers.publish, []
        a.peers.publish = lost.append  # type: ignore[method-assign]
        a.ask("a1")
        while not lost:
            await asyncio.sleep(0.001)
        a.peers.publish = publish  # type: ignore[method-assign]
        a.ask("a2")
        await b.bookings(3)
        assert b.policy.counters()["sync_gaps"] == 1

    played(tmp_path, play)


def test_garbage_is_counted_and_harms_nobody(tmp_path: Path) -> None:
    async def play(a: Router, b: Router, servers: list[FakeVllm]) -> None:
        stranger = zmq.Context.instance().socket(zmq.PUSH)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(b.peers.address)
        stranger.send(b"\xc1 nonsense")
        while not b.peers.counts.damaged:
            await asyncio.sleep(0.001)
        stranger.close()
        servers[0].does = "hang"
        a.ask("a0")
        await b.bookings(1)

    played(tmp_path, play)


def test_routers_that_know_each_others_addresses_need_no_store() -> None:
    async def play() -> None:
        async with asyncio.timeout(LIMIT_S), FakeVllm() as server:
            server.does = "hang"
            a = Router(1, Peering())
            await a.attach([server])  # type: ignore[list-item]
            await a.peers.start()
            b = Router(2, Peering(addresses=(a.peers.address,)))
            await b.attach([server])  # type: ignore[list-item]
            await b.peers.start()
            b.ask("b0")
            await a.bookings(1)
            await a.close()
            await b.close()

    asyncio.run(play())


def test_an_order_to_nobody_is_no_error(tmp_path: Path) -> None:
    async def play(a: Router, b: Router, _: list[FakeVllm]) -> None:
        from policies.cluster.bookings import SyncKind

        a.peers.publish(PublishBooking(origin=11, seq=0, kind=SyncKind.ASK, dest=99, reason="nobody has that number"))
        assert a.world.fleet.workers[WorkerId(0)].up.name == "w0"

    played(tmp_path, play)


def test_the_journal_of_one_router_of_several_gives_the_same_orders_again(tmp_path: Path) -> None:
    async def play(a: Router, b: Router, servers: list[FakeVllm]) -> None:
        servers[0].does = "hang"
        a.ask("a0")
        await b.bookings(1)
        assert await worker_of(b.ask("b0")) == "w0"
        journal = Journal(lines.append, Header(versions={}, config={}, seed=0, policies=()))
        for event, actions in b.noted:
            journal.note(event, actions)
        journal.flush()

    lines: list[str] = []
    played(tmp_path, play)
    text = "".join(lines).splitlines()
    assert sum('"type":"PeerBooking"' in line for line in text) >= 2
    assert replay(text, [build_policy(CONFIG, 32, number=22)]) is None
    assert replay(text, [build_policy(CONFIG, 32, number=33)]) is not None, "another router publishes under its number"


def test_a_worker_that_tells_nothing_of_its_blocks_does_not_join_a_router_that_goes_by_them() -> None:
    async def play() -> None:
        config = Config(router=RouterConfig(mode="kv", index="engine"))
        clock = WallClock(asyncio.get_running_loop())
        world = LiveWorld(Controller([build_policy(config, 32)]), clock, ContentTree(32, 32))
        async with FakeVllm() as server:
            engine = Vllm(Attached(name="w0", url=server.url, max_num_seqs=8), AMPLE, clock.now)
            with pytest.raises(ConfigError, match="worker w0 tells nothing of its KV blocks"):
                await world.fleet.attach(engine, "w0", "pool")
            assert not world.fleet.workers
            await engine.close()
            await world.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("who", "listen", "said"),
    [
        ("tcp://10.0.0.1", "127.0.0.1:7000", "write tcp://HOST:PORT"),
        ("/shared", "10.0.0.2:7000", "give all frontends one --peer-key FILE, or --peer-key none"),
        ("/shared", "router.example:7000", "give all frontends one --peer-key FILE"),
        ("tcp://10.0.0.1:7000", None, "give --peer-listen HOST:PORT"),
        ("/shared", "0.0.0.0:7000", "give the address of this host"),
        ("/shared", "here", "write HOST:PORT"),
        ("/shared", "here:many", "write HOST:PORT"),
    ],
)
def test_a_line_that_means_nothing_is_refused(who: str, listen: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        peering(who, listen)


# ---------------------------------------------------------------- with a key


KEY = b"0123456789abcdef"


async def sealed_pair(stack: AsyncExitStack, place: Path, *keys: bytes | None) -> tuple[Router, Router]:
    """Two routers with these keys, and one worker that both know and that never answers."""
    server = await stack.enter_async_context(FakeVllm())
    server.does = "hang"
    routers = [Router(n, Peering(place=str(place), key=key)) for n, key in zip((11, 22), keys, strict=True)]
    for router in routers:
        await router.attach([server])
        await router.peers.start()
        stack.push_async_callback(router.close)
    return routers[0], routers[1]


def test_routers_with_one_key_share_and_know_each_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            a, b = await sealed_pair(stack, tmp_path, KEY, KEY)
            a.ask("a0")
            await b.bookings(1)
            b.ask("b0")
            await a.bookings(1)
            assert (a.peers.counts.refused, b.peers.counts.refused) == (0, 0)

    asyncio.run(test())


@pytest.mark.parametrize("other", [None, b"fedcba9876543210"])
def test_who_has_another_key_or_none_is_refused_and_counted(tmp_path: Path, other: bytes | None) -> None:
    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            a, b = await sealed_pair(stack, tmp_path, KEY, other)
            while not (a.peers.counts.refused and b.peers.counts.refused):
                await asyncio.sleep(0.001)
            assert (a.peers.counts.heard, b.peers.counts.heard) == (0, 0)
            assert (a.heard.empty(), b.heard.empty()) == (True, True)

    asyncio.run(test())


def test_a_message_that_was_recorded_is_not_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            a, b = await sealed_pair(stack, tmp_path, KEY, KEY)
            recorded: list[bytes] = []
            close = a.peers._seal.close

            def record(text: bytes, to: int | None) -> bytes:
                recorded.append(close(text, to))
                return recorded[-1]

            monkeypatch.setattr(a.peers._seal, "close", record)
            stream = a.ask("a0")
            await b.bookings(1)
            stream.cancel("enough")
            await b.bookings(0)
            thief = zmq.Context.instance().socket(zmq.PUSH)
            thief.setsockopt(zmq.LINGER, 0)
            thief.connect(b.peers.address)
            for message in list(recorded):
                thief.send(message)
            while not b.peers.counts.refused:
                await asyncio.sleep(0.001)
            assert b.policy.peer_bookings == 0
            thief.close()

    asyncio.run(test())


def test_a_router_that_starts_again_at_its_address_is_known_by_its_new_number() -> None:
    async def test() -> None:
        async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
            server = await stack.enter_async_context(FakeVllm())
            server.does = "hang"
            b = Router(2, Peering(key=KEY))
            await b.attach([server])
            await b.peers.start()
            stack.push_async_callback(b.close)
            port = 0
            for number in (3, 4):
                a = Router(number, Peering(addresses=(b.peers.address,), listen=("127.0.0.1", port), key=KEY))
                await a.attach([server])
                await a.peers.start()
                b.peers._add(a.peers.address)
                port = int(a.peers.address.rpartition(":")[2])
                a.ask(f"of {number}")
                while b.peers._number_of(a.peers.address) != number:
                    await asyncio.sleep(0.001)
                await b.bookings(1)
                await a.close()

    asyncio.run(test())


def test_what_became_of_messages_is_counted_for_the_frontend(tmp_path: Path) -> None:
    async def play(a: Router, b: Router, servers: list[FakeVllm]) -> None:
        servers[0].does = "hang"
        a.ask("a0")
        await b.bookings(1)
        assert Service(b.world, []).peer_counts() == {}
        service = Service(b.world, [], peers=b.peers)
        told = service.peer_counts()
        assert told["others"] == 1
        assert told["heard"] >= 1
        pages = Metrics("x", fine=False, collectors=(Glance(service, "x", ()),)).exposition().decode()
        assert "dynatwin_frontend_peers 1.0" in pages
        assert f'dynatwin_frontend_peer_messages_total{{result="heard"}} {told["heard"]}.0' in pages
        assert 'dynatwin_frontend_peer_messages_total{result="refused"} 0.0' in pages
        assert "dynatwin_frontend_peer_unknown_steps_total 0.0" in pages

    played(tmp_path, play)
