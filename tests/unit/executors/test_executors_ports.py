"""Ports of a worker come together or not at all, and nobody else gets them meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from executors.ports import LOOPBACK, PortAllocator, PortNeed
from policies.errors import CapabilityError, ConfigError

NEEDS = [PortNeed(name="http"), PortNeed(name="kv events", span=3), PortNeed(name="replay", span=3)]


@pytest.fixture
def allocator() -> Iterator[PortAllocator]:
    made = PortAllocator()
    yield made
    made.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen(1)
        yield taken


def everything(found: dict[str, int]) -> set[int]:
    return {found[need.name] + n for need in NEEDS for n in range(need.span)}


def test_all_ports_of_all_workers_are_different_and_can_be_listened_on(allocator: PortAllocator) -> None:
    first, second = (everything(dict(allocator.take(name, NEEDS))) for name in ("a", "b"))
    assert len(first) == len(second) == 7
    assert not first & second
    for port in first | second:
        with socket.socket() as server:
            server.bind((LOOPBACK, port))
            server.listen(1)


def test_another_allocator_of_this_user_gets_other_ports_until_they_are_released(allocator: PortAllocator) -> None:
    mine = allocator.take("a", [PortNeed(name="http")])["http"]
    other = PortAllocator()
    asked = [PortNeed(name="http", port=mine)]
    with pytest.raises(ConfigError, match=f"worker b: port {mine} for http on .* .another worker of ours has it"):
        other.take("b", asked)
    allocator.release("a")
    assert other.take("b", asked) == {"http": mine}
    other.close()


def test_a_taken_port_fails_by_name_and_nothing_is_kept(allocator: PortAllocator, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    needs = [PortNeed(name="http"), PortNeed(name="side channel", port=port)]
    with pytest.raises(ConfigError, match=f"worker p0: port {port} for side channel .*already in use"):
        allocator.take("p0", needs)
    listener.close()
    assert allocator.take("p0", needs)["side channel"] == port, "the first failure left no half of it behind"


def test_a_row_of_ports_goes_around_one_that_is_taken() -> None:
    finder = PortAllocator(lowest=14_000, highest=16_999)  # where no other test looks
    first = finder.take("row", [PortNeed(name="row", span=6)])["row"]
    finder.close()
    narrow = PortAllocator(lowest=first, highest=first + 5)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, first + 1))
        taken.listen(1)
        assert narrow.take("a", [PortNeed(name="ranks", span=3)]) == {"ranks": first + 2}
        with pytest.raises(CapabilityError, match="worker b: no 3 free ports in a row for ranks between"):
            narrow.take("b", [PortNeed(name="ranks", span=3)])
        assert narrow.take("b", [PortNeed(name="http")]) == {"http": first + 5}
        assert narrow.take("c", [PortNeed(name="http")]) == {"http": first}
    narrow.close()


def test_a_port_of_a_connection_that_just_ended_is_not_chosen_and_may_be_asked_for() -> None:
    finder = PortAllocator(lowest=17_000, highest=19_999)
    port = finder.take("a", [PortNeed(name="http")])["http"]
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        server.bind((LOOPBACK, port))
        server.listen(1)
        with socket.create_connection((LOOPBACK, port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # whoever closes first keeps the address for a minute
            assert client.recv(1) == b""
    finder.close()
    narrow = PortAllocator(lowest=port, highest=port)
    with pytest.raises(CapabilityError):
        narrow.take("a", [PortNeed(name="http")])
    assert narrow.take("a", [PortNeed(name="http", port=port)]) == {"http": port}
    narrow.close()


def test_a_worker_takes_ports_once(allocator: PortAllocator) -> None:
    allocator.take("a", NEEDS)
    with pytest.raises(ConfigError, match="worker a has ports already"):
        allocator.take("a", NEEDS)
