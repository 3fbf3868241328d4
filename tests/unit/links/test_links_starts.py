"""Workers that start load their weights over links: beside each other, beside hand-offs, over links that fail.

Every figure is worked out by hand beside its test. One gigabyte is 1e9 bytes, a store carries 10 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from policies.cluster.ids import WorkerId
from twin.mocker.clock import Clock, Order
from twin.mocker.links import Link, Network, Way
from twin.mocker.starts import Starts, WeightLoad
from twin.perf.cargo import WEIGHTS

GB = 10**9
STORE = Link(name="store", bytes_per_s=10 * GB)


def from_store(*rank_gb: float, boot_s: float = 0.0, warmup_s: float = 0.0) -> WeightLoad:
    """Weights of so many gigabytes on each rank, all out of the store."""
    lanes = tuple(("store",) for _ in rank_gb)
    return WeightLoad(
        rank_bytes=tuple(round(gb * GB) for gb in rank_gb),
        way=Way(out=lanes, into=lanes),
        boot_s=boot_s,
        warmup_s=warmup_s,
    )


def cards(*names: str) -> list[Link]:
    return [Link(name=f"nic:{name}", bytes_per_s=10 * GB, duplex=True) for name in names]


def from_peer(name: str, gb: float, peers: Sequence[int]) -> WeightLoad:
    """Weights of one rank, over the worker's own card from one of its peers."""
    way = Way(out=((f"nic:{name}/tx",),), into=((f"nic:{name}/rx",),))
    mates = tuple(WorkerId(peer) for peer in peers)
    return WeightLoad(rank_bytes=(round(gb * GB),), way=way, boot_s=0.0, warmup_s=0.0, peers=mates)


class Bench:
    """Starts on links, scripted in seconds; `up` has when each worker was there. Who is not in `down` can send."""

    def __init__(self, links: Sequence[Link], loads: Sequence[WeightLoad]) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, links)
        self.down: set[int] = set()
        self.up: dict[int, float] = {}
        self.moved: dict[str, float] = {}
        self.starts = Starts(
            self.clock,
            self.network,
            {WorkerId(i): load for i, load in enumerate(loads)},
            is_up=lambda worker_id: worker_id not in self.down,
        )

    def at(self, at_s: float, what: Callable[[], object], order: Order = Order.FAULT) -> None:
        self.clock.at(at_s, int(order), (lambda _: what(),))

    def start(self, at_s: float, worker: int) -> None:
        def up() -> None:
            self.up[worker] = self.clock.now
            self.down.discard(worker)

        self.down.add(worker)
        self.at(at_s, lambda: self.starts.begin(WorkerId(worker), 0.0, up))

    def transfer(self, name: str, at_s: float, gb: float, *lanes: str) -> None:
        def begin() -> None:
            self.network.start(lanes, round(gb * GB), on_done=lambda: self.moved.update({name: self.clock.now}))

        self.at(at_s, begin, Order.ARRIVAL)

    def run(self) -> dict[int, float]:
        self.clock.run()
        self.network.audit()
        assert self.starts.events == 0, "nothing of a start is left on the clock"
        return self.up


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_so_many_starts_from_one_store_load_so_many_times_as_long(workers: int) -> None:
    """20 GB each: 2 s alone, 2 N s together; boot and warm-up are added as they are."""
    bench = Bench([STORE], [from_store(20, boot_s=5, warmup_s=60)] * workers)
    for worker in range(workers):
        bench.start(1.0, worker)
    assert bench.run() == dict.fromkeys(range(workers), 1 + 5 + 2 * workers + 60)
    assert [(s.ordered_s, s.load_s, s.loaded_s, s.up_s) for s in bench.starts.log] == [
        (1, 6, 6 + 2 * workers, 66 + 2 * workers)
    ] * workers
    assert bench.network.carried_bytes == {WEIGHTS: workers * 20 * GB}


def test_two_starts_of_different_size_share_a_store() -> None:
    """20 and 30 GB. The second begins when the first has 10 left: half each, so these are there 2 s later, at 3; the
    second has 10 by then, and 20 left at full speed: 5."""
    bench = Bench([STORE], [from_store(20), from_store(30)])
    bench.start(0.0, 0)
    bench.start(1.0, 1)
    assert bench.run() == {0: 3.0, 1: 5.0}


def test_the_fixed_parts_of_one_start_leave_the_store_to_the_other() -> None:
    """Boot 2 s: the first has 20 of its 30 GB when the second begins; 10 left at half speed: 4. Warm-up takes no link:
    the second has 10 of its 20 then, and is there at 5."""
    bench = Bench([STORE], [from_store(30, warmup_s=7), from_store(20, boot_s=2)])
    bench.start(0.0, 0)
    bench.start(0.0, 1)
    assert bench.run() == {0: 4.0 + 7.0, 1: 5.0}


def test_ranks_load_side_by_side_and_the_largest_is_last() -> None:
    """Four ranks of 5 GB and four of 10: 60 GB at 10 GB/s, all of them busy to the end of the small ones at 4 s."""
    bench = Bench([STORE], [from_store(5, 5, 5, 5, 10, 10, 10, 10)])
    bench.start(0.0, 0)
    assert bench.run() == {0: 6.0}


def test_a_fifo_store_serves_one_start_after_another() -> None:
    bench = Bench([Link(name="store", bytes_per_s=10 * GB, discipline="fifo")], [from_store(20)] * 3)
    for worker in range(3):
        bench.start(0.0, worker)
    assert bench.run() == {0: 2.0, 1: 4.0, 2: 6.0}


# ---------------------------------------------------------------- beside hand-offs


def test_a_start_and_a_hand_off_share_the_senders_card() -> None:
    """Worker 0 sends 20 GB of weights from 0 on, and hands over 5 GB of KV to somebody else from 1 on: half each until
    the KV is there at 2, then 5 GB of weights are left: 2.5."""
    bench = Bench([*cards("a", "b", "c")], [from_peer("a", 20, [0, 1]), from_peer("b", 20, [0, 1])])
    bench.start(0.0, 1)
    bench.transfer("kv", 1.0, 5, "nic:a/tx", "nic:c/rx")
    assert bench.run() == {1: 2.5}
    assert bench.moved == {"kv": 2.0}
    assert bench.starts.log[0].peer == 0
    assert bench.network.carried_bytes == {"kv": 5 * GB, WEIGHTS: 20 * GB}


def test_what_enters_a_duplex_card_does_not_slow_what_leaves_it() -> None:
    bench = Bench([*cards("a", "b", "c")], [from_peer("a", 20, [0, 1]), from_peer("b", 20, [0, 1])])
    bench.start(0.0, 1)
    bench.transfer("kv", 0.0, 5, "nic:c/tx", "nic:a/rx")
    assert bench.run() == {1: 2.0}
    assert bench.moved == {"kv": 0.5}


# ---------------------------------------------------------------- who sends


def test_who_sends_least_is_asked_and_whoever_starts_cannot_send() -> None:
    """Workers 2 and 3 start beside 0 and 1: one sender each, 2 s. Alone, worker 0 sends to both: 4 s."""
    mates = [0, 1, 2, 3]
    loads = [from_peer(name, 20, mates) for name in "abcd"]
    bench = Bench(cards(*"abcd"), loads)
    bench.start(0.0, 2)
    bench.start(0.0, 3)
    assert bench.run() == {2: 2.0, 3: 2.0}
    assert [start.peer for start in bench.starts.log] == [0, 1]

    bench = Bench(cards(*"abcd"), loads)
    bench.down.add(1)
    bench.start(0.0, 2)
    bench.start(0.0, 3)
    assert bench.run() == {2: 4.0, 3: 4.0}
    assert [start.peer for start in bench.starts.log] == [0, 0]


def test_a_sender_that_goes_is_replaced_and_everything_is_sent_again() -> None:
    """Worker 0 is gone at 1.5, with 15 of 20 GB sent; worker 1 sends all of it: 3.5."""
    bench = Bench(cards(*"abc"), [from_peer(name, 20, [0, 1, 2]) for name in "abc"])
    bench.start(0.0, 2)

    def gone() -> None:
        bench.down.add(0)
        bench.starts.on_gone(WorkerId(0))

    bench.at(1.5, gone)
    assert bench.run() == {2: 3.5}
    assert bench.starts.log[0].peer == 1
    assert bench.network.carried_bytes == {WEIGHTS: 20 * GB}, "what was broken off does not count"


def test_without_anybody_to_send_the_worker_takes_them_from_outside_over_its_own_card() -> None:
    bench = Bench(cards("a", "b"), [from_peer("a", 20, [0, 1]), from_peer("b", 30, [0, 1])])
    bench.start(0.0, 0)
    bench.start(0.0, 1)
    assert bench.run() == {0: 2.0, 1: 3.0}
    assert [start.peer for start in bench.starts.log] == [None, None]


# ---------------------------------------------------------------- links and workers that fail


def test_a_store_that_slows_down_in_the_middle_of_a_load() -> None:
    """30 GB: 10 of them at 1 s, 10 more at half the speed until 3 s, the last 10 at 4 s."""
    bench = Bench([STORE], [from_store(30)])
    bench.start(0.0, 0)
    bench.at(1.0, lambda: bench.network.slow("store", 0.5))
    bench.at(3.0, lambda: bench.network.slow("store", 1.0))
    assert bench.run() == {0: 4.0}


def test_a_store_that_is_down_for_a_while_holds_a_load_up() -> None:
    bench = Bench([STORE], [from_store(20)])
    bench.start(0.0, 0)
    bench.at(1.0, lambda: bench.network.slow("store", 0.0))
    bench.at(5.0, lambda: bench.network.slow("store", 1.0))
    assert bench.run() == {0: 6.0}


def test_a_worker_that_dies_while_it_loads_leaves_the_link_to_the_others() -> None:
    """Two of 20 GB, 5 each at 1 s when one dies: 15 left at full speed, 2.5."""
    bench = Bench([STORE], [from_store(20)] * 2)
    bench.start(0.0, 0)
    bench.start(0.0, 1)
    bench.at(1.0, lambda: bench.starts.break_off(WorkerId(0)))
    assert bench.run() == {1: 2.5}
    assert bench.network.live == 0
    assert bench.starts.log[0].up_s is None
    assert WorkerId(0) not in bench.starts


@pytest.mark.parametrize("at_s", [0.5, 1.5, 3.5])
def test_a_worker_that_dies_at_any_stage_does_not_come_up_and_may_start_again(at_s: float) -> None:
    """Boot to 1, load to 3, warm-up to 4; started again at 10: 14."""
    bench = Bench([STORE], [from_store(20, boot_s=1, warmup_s=1)])
    bench.start(0.0, 0)
    bench.at(at_s, lambda: bench.starts.break_off(WorkerId(0)))
    bench.start(10.0, 0)
    assert bench.run() == {0: 14.0}
    assert [start.up_s for start in bench.starts.log] == [None, 14.0]


def test_without_links_a_start_takes_what_it_is_said_to_take() -> None:
    clock = Clock()
    up: list[float] = []
    starts = Starts(clock, None, {}, is_up=lambda _: True)
    starts.begin(WorkerId(0), 12.5, lambda: up.append(clock.now))
    assert starts.events == 1
    clock.run()
    assert up == [12.5]
    assert (starts.log[0].load, starts.log[0].load_s, starts.log[0].up_s) == (None, None, 12.5)
