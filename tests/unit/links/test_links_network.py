"""Links on the virtual clock: the reference situations K1 to K8, contention on several links, faults and refusals.

Every figure is worked out by hand beside its test; times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.errors import ConfigError
from twin.mocker.clock import Clock, Order
from twin.mocker.links import Link, Network, Part, Transfer

GB = 10**9
BLOCK_BYTES = 8_388_608  # 64 tokens of 32 layers, 8 heads, 128 values, 2 bytes


class Bench:
    """A network whose starts are scripted in milliseconds; `ends` are noted by name."""

    def __init__(self, *links: Link) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, links)
        self.ends: dict[str, float] = {}
        self.order: list[str] = []
        self.transfers: dict[str, Transfer] = {}

    def at(self, at_ms: float, what: Callable[[], object], order: Order = Order.ARRIVAL) -> None:
        self.clock.at(at_ms / 1e3, int(order), (lambda _: what(),))

    def start(self, name: str, at_ms: float, gb: float, *links: str, **kwargs: float) -> None:
        def begin() -> None:
            self.transfers[name] = self.network.start(
                links or ("a",),
                round(gb * GB),
                on_done=lambda: self.end(name),
                **kwargs,  # type: ignore[arg-type]
            )

        self.at(at_ms, begin)

    def end(self, name: str) -> None:
        self.ends[name] = round(self.clock.now * 1e3, 9)
        self.order.append(name)

    def run(self) -> dict[str, float]:
        self.clock.run()
        self.network.audit()
        assert self.network.live == 0
        return self.ends


def link(name: str = "a", gb_per_s: float = 10.0, **kwargs: object) -> Link:
    return Link(name=name, bytes_per_s=gb_per_s * GB, **kwargs)  # type: ignore[arg-type]


# ---------------------------------------------------------------- one link

K = [
    ("K1", [(0, 1)], [100], [100]),
    ("K2", [(0, 1), (0, 1)], [200, 200], [100, 200]),
    ("K3", [(0, 1), (50, 1)], [150, 200], [100, 200]),
    ("K4", [(0, 1), (0, 1), (0, 2)], [300, 300, 400], [100, 200, 400]),
    ("K5", [(0, 10), (100, 0.1)], [1010, 120], [1000, 1010]),
]


@pytest.mark.parametrize(("name", "jobs", "fair", "fifo"), K, ids=[row[0] for row in K])
@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_jobs_on_one_link(name: str, jobs: list, fair: list, fifo: list, discipline: str) -> None:
    bench = Bench(link(discipline=discipline))
    for number, (start_ms, gb) in enumerate(jobs):
        bench.start(str(number), start_ms, gb)
    assert [bench.run()[str(n)] for n in range(len(jobs))] == (fair if discipline == "fair" else fifo)


@pytest.mark.parametrize(("discipline", "ends"), [("fair", [201, 201]), ("fifo", [101, 202]), ("private", [101, 101])])
def test_k6_latency_delays_a_fair_job_and_occupies_a_fifo_lane(discipline: str, ends: list[float]) -> None:
    bench = Bench(link(discipline=discipline, latency_s=1e-3))
    bench.start("x", 0, 1)
    bench.start("y", 0, 1)
    assert list(bench.run().values()) == ends


@pytest.mark.parametrize("discipline", ["fair", "fifo", "private"])
def test_k7_descriptors_cost_their_time(discipline: str) -> None:
    bench = Bench(link(gb_per_s=32, discipline=discipline, desc_cost_s=2e-6))
    bench.start("block", 0, BLOCK_BYTES / GB, descriptors=64)
    assert bench.run() == {"block": 0.390144}


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_k8_a_cancelled_job_frees_its_share_at_once(discipline: str) -> None:
    bench = Bench(link(discipline=discipline))
    bench.start("x", 0, 1)
    bench.start("y", 50, 1)
    bench.at(50, lambda: bench.transfers["x"].cancel(), Order.LATE)
    assert bench.run() == {"y": 150}


def test_a_private_link_never_contends() -> None:
    bench = Bench(link(discipline="private", gb_per_s=50))
    for name in "xyz":
        bench.start(name, 0, 0.131072)
    assert set(bench.run().values()) == {2.62144}


def test_the_hand_over_of_c16_is_its_bytes_and_its_set_up() -> None:
    bench = Bench(link(gb_per_s=50))
    bench.start("kv", 50, 0.131072, setup_s=1e-3)
    assert bench.run() == {"kv": 53.62144}


def test_who_waits_in_a_fifo_lane_can_leave_it() -> None:
    bench = Bench(link(discipline="fifo"))
    for name in "xyz":
        bench.start(name, 0, 1)
    bench.at(150, lambda: bench.transfers["y"].cancel())  # in service since 100
    bench.at(20, lambda: bench.start("w", 30, 1))
    bench.at(40, lambda: bench.transfers["w"].cancel())  # last in the line
    assert bench.run() == {"x": 100, "z": 250}


# ---------------------------------------------------------------- several links


def test_both_ends_of_a_transfer_count() -> None:
    """p0 sends to d0 and d1, p1 sends to d0: d0's card and p0's card carry two each, so all three run at half speed
    until 200; nobody is left then."""
    bench = Bench(link("p0"), link("p1"), link("d0"), link("d1"))
    bench.start("p0-d0", 0, 1, "p0", "d0")
    bench.start("p0-d1", 0, 1, "p0", "d1")
    bench.start("p1-d0", 0, 1, "p1", "d0")
    assert bench.run() == {"p0-d0": 200, "p0-d1": 200, "p1-d0": 200}


def test_what_a_bottleneck_elsewhere_leaves_free_is_used() -> None:
    """Two jobs share the slow card (2.5 each), so the third has 7.5 of the fast one. 0.75 GB are over at 100; the
    others have moved 0.25 of 0.5 GB by then, and the slow card stays theirs: 200."""
    bench = Bench(link("fast"), link("slow", 5))
    bench.start("x", 0, 0.5, "slow")
    bench.start("y", 0, 0.5, "fast", "slow")
    bench.start("z", 0, 0.75, "fast")
    assert bench.run() == {"x": 200, "y": 200, "z": 100}


def test_a_spine_below_the_sum_of_its_cards_is_shared_by_all() -> None:
    """Four pairs of cards of 10 GB/s behind a spine of 20: 5 each, 1 GB in 200 ms."""
    bench = Bench(*(link(f"{end}{i}") for end in "pd" for i in range(4)), link("spine", 20))
    for i in range(4):
        bench.start(str(i), 0, 1, f"p{i}", "spine", f"d{i}")
    assert set(bench.run().values()) == {200}


def test_latencies_of_a_path_add_up_and_descriptors_are_posted_once() -> None:
    bench = Bench(link("x", latency_s=1e-3, desc_cost_s=1e-5), link("y", latency_s=2e-3, desc_cost_s=2e-5))
    bench.start("job", 0, 1, "x", "y", descriptors=100)
    assert bench.run() == {"job": 105}


def test_a_fifo_lane_is_held_while_the_other_end_is_slow() -> None:
    """x holds the lane at 5 GB/s until 200; y is served after it, alone, and does 1 GB in 100."""
    bench = Bench(link("lane", discipline="fifo"), link("slow", 5))
    bench.start("x", 0, 1, "lane", "slow")
    bench.start("y", 0, 1, "lane")
    assert bench.run() == {"x": 200, "y": 300}


def test_jobs_that_need_the_same_fifo_lanes_in_either_order_both_end() -> None:
    bench = Bench(link("m", discipline="fifo"), link("n", discipline="fifo"))
    bench.start("x", 0, 1, "m", "n")
    bench.start("y", 0, 1, "n", "m")
    assert bench.run() == {"x": 100, "y": 200}


def test_a_private_lane_caps_a_job_and_leaves_the_rest_to_others() -> None:
    """x gets 2 of the shared 10; y has the other 8: 0.8 GB in 100 ms, then x goes on at its cap: 0.4 GB in 200."""
    bench = Bench(link("nic"), link("own", 2, discipline="private"))
    bench.start("x", 0, 0.4, "nic", "own")
    bench.start("y", 0, 0.8, "nic")
    assert bench.run() == {"x": 200, "y": 100}


def test_duplex_links_carry_both_ways_at_full_speed() -> None:
    bench = Bench(link(duplex=True))
    bench.start("out", 0, 1, "a/tx")
    bench.start("in", 0, 1, "a/rx")
    assert bench.run() == {"out": 100, "in": 100}


def test_parts_are_over_with_the_last_of_them() -> None:
    """C15 b: two prefill ranks send 32,768,000 bytes each to two of four decode ranks: 1.31072 ms at 50 GB/s each."""
    bench = Bench(link("p0", 50), link("p1", 50))
    parts = [Part((f"p{rank % 2}",), 32_768_000) for rank in range(4)]
    bench.at(0, lambda: bench.network.start_all(parts, on_done=lambda: bench.end("kv")))
    assert bench.run() == {"kv": 1.31072}


def test_cancelling_several_parts_frees_every_lane() -> None:
    bench = Bench(link("p0"), link("p1"))
    parts = [Part(("p0",), GB), Part(("p1",), GB // 10)]

    def begin() -> None:
        bench.transfers["kv"] = bench.network.start_all(parts, on_done=lambda: bench.end("kv"))

    bench.at(0, begin)
    bench.start("x", 50, 1, "p0")
    bench.at(50, lambda: bench.transfers["kv"].cancel(), Order.LATE)
    assert bench.run() == {"x": 150}
    assert bench.network.moved_bytes("p0") == pytest.approx(1.5 * GB)
    assert bench.network.moved_bytes("p1") == pytest.approx(0.1 * GB)


# ---------------------------------------------------------------- faults


def test_a_slowed_link_moves_what_is_left_at_its_new_speed() -> None:
    """0.5 GB by 50 ms, then 2 GB/s: 250 ms more."""
    bench = Bench(link())
    bench.start("x", 0, 1)
    bench.at(50, lambda: bench.network.slow("a", 0.2), Order.FAULT)
    assert bench.run() == {"x": 300}


def test_a_link_that_comes_back_goes_on_where_it_stopped() -> None:
    bench = Bench(link())
    bench.start("x", 0, 1)
    bench.start("y", 60, 1)
    bench.at(50, lambda: bench.network.slow("a", 0), Order.FAULT)
    bench.at(150, lambda: bench.network.slow("a", 1), Order.FAULT)
    assert bench.run() == {"x": 250, "y": 300}  # 0.5 and 1 GB left at 150, sharing 10 GB/s


def test_tcp_instead_of_rdma_is_350_times_slower() -> None:
    bench = Bench(link("nic:w0:0"), link("nic:w0:1", duplex=True), link("nic:w01"))
    bench.at(0, lambda: bench.network.slow("nic:w0", 1 / 350), Order.FAULT)
    bench.start("x", 0, 1, "nic:w0:0")
    bench.start("y", 0, 1, "nic:w0:1/rx")
    bench.start("z", 0, 1, "nic:w01")
    assert bench.run() == {"x": 35_000, "y": 35_000, "z": 100}


@pytest.mark.parametrize("discipline", ["fifo", "private"])
def test_a_slowed_lane_of_any_kind_is_slow(discipline: str) -> None:
    bench = Bench(link(discipline=discipline))
    bench.start("x", 0, 1)
    bench.at(50, lambda: bench.network.slow("a", 0.5))
    assert bench.run() == {"x": 150}


# ---------------------------------------------------------------- estimates


def test_an_estimate_alone_is_what_happens() -> None:
    bench = Bench(link(latency_s=1e-3, desc_cost_s=1e-6))
    assert bench.network.estimate_s(("a",), GB, setup_s=1e-3, descriptors=1000) == pytest.approx(0.103)
    bench.start("x", 0, 1, setup_s=1e-3, descriptors=1000)
    assert bench.run() == {"x": 103}


def test_an_estimate_counts_those_who_share_and_those_ahead() -> None:
    bench = Bench(link("fair"), link("fifo", discipline="fifo"))
    seen = []
    bench.start("x", 0, 1, "fair")
    bench.start("y", 0, 1, "fifo")
    bench.start("z", 0, 1, "fifo")
    bench.at(50, lambda: seen.append(bench.network.estimate_s(("fair",), GB)))
    bench.at(50, lambda: seen.append(bench.network.estimate_s(("fifo",), GB)))
    bench.at(60, lambda: (bench.network.slow("fair", 0), seen.append(bench.network.estimate_s(("fair",), GB))))
    bench.at(70, lambda: bench.network.slow("fair", 1))
    bench.run()
    assert seen == pytest.approx([0.2, 0.25, float("inf")])


# ---------------------------------------------------------------- when it is told


def test_ends_of_one_instant_are_told_in_order_of_start() -> None:
    bench = Bench(link("a"), link("b", 20))
    bench.start("second", 50, 1, "b")  # both end at 100
    bench.start("first", 0, 1, "a")
    bench.run()
    assert bench.order == ["first", "second"]


def test_nothing_is_told_from_inside_a_call() -> None:
    bench = Bench(link())
    told: list[str] = []
    bench.at(0, lambda: (bench.network.start((), 0, on_done=lambda: told.append("end")), told.append("started")))
    bench.run()
    assert told == ["started", "end"]


def test_a_transfer_started_by_the_end_of_another_begins_then() -> None:
    bench = Bench(link())
    bench.at(0, lambda: bench.network.start(("a",), GB, on_done=lambda: bench.start("next", 100, 1)))
    assert bench.run() == {"next": 200}


def test_a_cancel_at_the_very_end_still_counts() -> None:
    bench = Bench(link())
    bench.start("x", 0, 1)
    said = []
    bench.at(100, lambda: said.append(bench.transfers["x"].cancel()), Order.FAULT)
    assert bench.run() == {}
    said.append(bench.transfers["x"].cancel())
    assert said == [True, False]


def test_one_end_may_cancel_another_of_the_same_instant() -> None:
    bench = Bench(link("a"), link("b"))
    bench.at(0, lambda: bench.network.start(("a",), GB, on_done=lambda: bench.transfers["x"].cancel()))
    bench.start("x", 0, 1, "b")
    assert bench.run() == {}


def test_ends_are_instants() -> None:
    """A third of a second has no end in nanoseconds: the end is told at the nearest one."""
    bench = Bench(link(gb_per_s=3))
    bench.start("x", 0, 1)
    bench.run()
    assert bench.clock.now == 0.333333333


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: link(gb_per_s=0), "link a: 0 bytes/s"),
        (lambda: link(discipline="lifo"), "discipline 'lifo'; it is fair, fifo, private"),
        (lambda: link(latency_s=-1.0), "latency_s = -1"),
        (lambda: Bench(link(), link()), "two links are named a"),
        (lambda: Bench(link()).network.start(("b",), 1, on_done=print), "link b: no such lane; there are a"),
        (lambda: Bench(link(duplex=True)).network.start(("a",), 1, on_done=print), "name a/tx or a/rx"),
        (lambda: Bench(link()).network.slow("b", 1), "link b: no such lane"),
        (lambda: Bench(link()).network.slow("a", -1), "factor -1"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
