"""Weights, loads from host memory and other transfers on the same links: the naive reference says when each has come,
and leaping through the decode steps of the workers changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from builders import router_settings
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from naive_links import Change, Job, run
from simulate import RowsDemand, engine_settings, trace_row
from test_engine_against_naive import KEY_TOKENS, engines

from policies.cluster.controller import Controller
from policies.cluster.ids import WorkerId
from policies.cluster.invariants import Invariants
from policies.resilience.migration import Migration, MigrationSettings
from policies.router.build import build
from twin.engine.settings import EngineSettings, HostTierSettings
from twin.mocker.clock import Clock, Order
from twin.mocker.demand import Row
from twin.mocker.links import Link, Network, Way
from twin.mocker.sinks import MemorySinks
from twin.mocker.starts import Starts, WeightLoad
from twin.mocker.world import MockWorld
from twin.perf.fixed import FixedLatency
from twin.worker_spec import WorkerSpec

MS = Fraction(1, 1000)
LATENCY = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)


# ---------------------------------------------------------------- starts against the reference


@st.composite
def start_programs(draw: st.DrawFn):
    """(links, starts, hand-offs, changes): a start is (ordered, boot, bytes by rank, dies), all but bytes in ms."""
    store = draw(st.sampled_from(["fair", "fair", "fifo"]))
    links = [Link(name="store", bytes_per_s=draw(st.sampled_from([3000, 10_000])), discipline=store)]
    starts = []
    for worker in range(draw(st.integers(1, 4))):
        ranks = draw(st.integers(1, 3))
        links += [Link(name=f"pcie:{worker}:{rank}", bytes_per_s=4000) for rank in range(ranks)]
        sizes = tuple(draw(st.lists(st.integers(1, 9000), min_size=ranks, max_size=ranks)))
        dies_ms = draw(st.none() | st.integers(1, 3000))
        starts.append((draw(st.integers(0, 2000)), draw(st.sampled_from([0, 125, 500])), sizes, dies_ms))
    handed = draw(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 9000)), max_size=4))
    changes = draw(st.lists(st.tuples(st.integers(1, 4000), st.sampled_from([0, 500, 20_000])), max_size=3))
    return links, starts, sorted(handed), list(dict(changes).items())


@examples(300)
@given(start_programs())
def test_weights_are_there_when_the_exact_reference_says(program) -> None:
    links, starts, handed, changes = program
    clock = Clock()
    network = Network(clock, links)
    loads = {}
    for worker, (_, boot_ms, sizes, _) in enumerate(starts):
        lanes = tuple((f"pcie:{worker}:{rank}", "store") for rank in range(len(sizes)))
        way = Way(out=lanes, into=lanes)
        loads[WorkerId(worker)] = WeightLoad(rank_bytes=sizes, way=way, boot_s=boot_ms / 1e3, warmup_s=0.25)
    up: dict[int, float] = {}
    bench = Starts(clock, network, loads, is_up=lambda _: False)

    def at(ms: int, order: Order, what) -> None:
        clock.at(ms / 1e3, int(order), (lambda _: what(),))

    def dies(worker: int) -> None:
        if WorkerId(worker) in bench:
            bench.break_off(WorkerId(worker))

    usual = links[0].bytes_per_s
    jobs: list[tuple[Fraction, int, int, Job]] = []
    for worker, (ordered_ms, boot_ms, sizes, dies_ms) in enumerate(starts):
        at(
            ordered_ms,
            Order.FAULT,
            lambda worker=worker: bench.begin(WorkerId(worker), 0.0, lambda: up.update({worker: clock.now})),
        )
        if dies_ms is not None:
            at(ordered_ms + boot_ms + dies_ms, Order.COMMAND, lambda worker=worker: dies(worker))
        start_s = (ordered_ms + boot_ms) * MS
        cancel_s = None if dies_ms is None else start_s + dies_ms * MS
        for rank, size in enumerate(sizes):
            path = (f"pcie:{worker}:{rank}", "store")
            jobs.append((start_s, worker, rank, Job(start_s=start_s, bytes=size, links=path, cancel_s=cancel_s)))
    for number, (at_ms, size) in enumerate(handed):
        at(at_ms, Order.ARRIVAL, lambda size=size: network.start(("store",), size, on_done=lambda: None))
        jobs.append((at_ms * MS, 99, number, Job(start_s=at_ms * MS, bytes=size, links=("store",))))
    for at_ms, speed in changes:
        at(at_ms, Order.FAULT, lambda speed=speed: network.slow("store", speed / usual))
    at(20_000, Order.FAULT, lambda: network.slow("store", 1.0))
    clock.run()
    network.audit()
    assert network.live == 0
    assert bench.events == 0

    # of starts that have booted at one instant, the one that was ordered first is first at the links
    order = sorted(range(len(starts)), key=lambda worker: (sum(starts[worker][:2]), starts[worker][0], worker))
    place = {worker: order.index(worker) for worker in order} | {99: 99}
    jobs.sort(key=lambda job: (job[0], place[job[1]], job[2]))
    speeds = [Change(ms * MS, "store", speed) for ms, speed in changes]
    ends = run([job for *_, job in jobs], links, [*speeds, Change(20_000 * MS, "store", int(usual))])
    for worker, (ordered_ms, boot_ms, _, dies_ms) in enumerate(starts):
        mine = [end for (_, whose, _, _), end in zip(jobs, ends, strict=True) if whose == worker]
        exact = None if None in mine else max(float(end) for end in mine)  # type: ignore[arg-type]
        if dies_ms is not None:
            died_s = (ordered_ms + boot_ms + dies_ms) / 1e3
            if exact is None or exact + 0.25 >= died_s - 3e-9:
                # dead before its warm-up was over; only at the very instant is either right
                assert worker not in up or abs(up[worker] - died_s) < 3e-9
                continue
        assert exact is not None
        assert up[worker] == pytest.approx(exact + 0.25, rel=1e-9, abs=3e-9)


# ---------------------------------------------------------------- leaping


@st.composite
def returning(draw: st.DrawFn) -> list[Row]:
    """Prompts of 30 to 54 tokens out of three families that come back, so that small pools find them in the host."""
    rows = []
    at_ms = 0
    for n in range(draw(st.integers(4, 20))):
        at_ms += draw(st.sampled_from([0, 5, 60, 100, 100]))
        keys = [100 * draw(st.integers(0, 2)) + i for i in range(9)]
        rows.append(trace_row(n, at_ms / 1e3, draw(st.integers(30, 54)), draw(st.integers(1, 12)), keys))
    return rows


@st.composite
def clusters(draw: st.DrawFn):
    """Two workers with host tiers on one link, restarts whose weights cross it too, and other traffic there."""
    link = Link(
        name="pcie",
        bytes_per_s=1_000_000,
        discipline=draw(st.sampled_from(["fair", "fair", "fifo"])),
        latency_s=draw(st.sampled_from([0.0, 0.002])),
    )
    tier = HostTierSettings(
        blocks=draw(st.integers(4, 40)),
        block_bytes=draw(st.sampled_from([100, 4000, 30_000])),
        load_bytes_per_s=1e6,
        trigger=draw(st.sampled_from(["on_evict", "on_store"])),
    )
    options = draw(engines())
    room = -(-66 // options["block_size"]) + draw(st.integers(0, 8))
    settings = engine_settings(**options | {"prefix_caching": True, "blocks": room}, host=tier)
    restarts = draw(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 1)), max_size=2))
    others = draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 200_000)), max_size=3))
    slow = draw(st.none() | st.tuples(st.integers(1, 1000), st.sampled_from([0.0, 0.3])))
    cancels = draw(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 9)), max_size=3))
    return tuple(draw(returning())), settings, link, restarts, others, slow, cancels


class Watched:
    """Every invariant at every event."""

    def __init__(self) -> None:
        self.rules = Invariants()

    def note(self, event, actions) -> None:
        self.rules.observe(event, actions)


def carry_out(program, settings: EngineSettings, *, restored_s: float = 4.0) -> MockWorld:
    rows, _, link, restarts, others, slow, cancels = program
    network = Network(Clock(), [link])
    way = Way(out=(("pcie",),), into=(("pcie",),))
    weights = WeightLoad(rank_bytes=(50_000,), way=way, boot_s=0.01, warmup_s=0.02)
    router = build(router_settings("round-robin", block_size=settings.block_size))
    watched = Watched()
    world = MockWorld(
        controller=Controller([router, Migration(MigrationSettings(limit=3, max_seq_len=None))], watched),
        workers=[
            WorkerSpec(
                worker_id=WorkerId(i), name=f"w{i}", settings=settings, latency=LATENCY, weights=weights,
                host_lanes=(("pcie",),),
            )
            for i in range(2)
        ],
        demand=RowsDemand(rows),
        sinks=MemorySinks(),
        router="round-robin",
        key_tokens=KEY_TOKENS,
        network=network,
    )  # fmt: skip

    def restart(worker: int) -> None:
        worker_id = WorkerId(worker)
        if world.workers[worker_id].down:
            if worker_id in world.starts:
                world.starts.break_off(worker_id)
        else:
            world.churn.lose(worker_id, "disconnected")
        world.starts.begin(worker_id, 0.0, lambda: world.churn.restore(worker_id))

    for at_ms, worker in restarts:
        world.call(at_ms / 1e3, Order.FAULT, lambda worker=worker: restart(worker))
    for at_ms, size in others:
        world.call(
            at_ms / 1e3, Order.ARRIVAL, lambda size=size: network.start(("pcie",), size, on_done=lambda: None)
        )  # fmt: skip
    for at_ms, row in cancels:
        world.call(
            at_ms / 1e3,
            Order.FAULT,
            lambda row=row: world.churn.cancel(next((r for r in world.open if r == str(row)), "none")),
        )
    if slow is not None:
        world.call(slow[0] / 1e3, Order.FAULT, lambda: network.slow("pcie", slow[1]))
        world.call(restored_s, Order.FAULT, lambda: network.slow("pcie", 1.0))
    world.run()
    world.audit()
    watched.rules.finish()
    assert network.live == 0
    return world


@examples(300)
@given(clusters())
def test_leaping_changes_nothing_with_loads_and_weights_on_links(program) -> None:
    settings = program[1]
    leapt, stepped = (carry_out(program, replace(settings, leap=leap)) for leap in (True, False))
    assert leapt._sinks.requests == stepped._sinks.requests
    assert sorted(leapt._sinks.requests) == [row.row for row in program[0]]
    assert leapt.network is not None
    assert stepped.network is not None
    assert leapt.network.carried_bytes == stepped.network.carried_bytes
    for worker in leapt.workers.values():
        if not worker.down:
            worker.engine.audit()
            assert not worker.engine._loads, "a load was begun and never taken up"  # type: ignore[attr-defined]


def test_a_client_that_leaves_while_its_blocks_come_up_lets_the_next_one_in() -> None:
    """One place on each worker. At 4 s the first prompt is back on worker 0 and asks for its blocks over a link that is
    down; another one waits behind it. The client leaves at 4.5 s: the other one starts then."""
    tier = HostTierSettings(blocks=8, block_bytes=1000, load_bytes_per_s=1e9, trigger="on_evict")
    settings = engine_settings(block_size=16, blocks=6, max_num_seqs=1, host=tier)

    def prompt(row: int, at_s: float, key: int) -> Row:
        return trace_row(row, at_s, 66, 1, [key + i for i in range(66 // KEY_TOKENS + 1)])

    rows = [prompt(n, float(n // 2), 100 * (n // 2)) for n in range(4)]
    rows += [prompt(4, 4.0, 0), prompt(5, 4.0, 500), prompt(6, 4.0, 600)]
    link = Link(name="pcie", bytes_per_s=1e6)
    world = carry_out((tuple(rows), settings, link, [], [], (3999, 0.0), [(4500, 4)]), settings, restored_s=100.0)
    assert world._sinks.requests[4][6] == "cancelled"
    assert world._sinks.requests[6][11] == 4.5


def test_loads_of_two_workers_share_their_host_link() -> None:
    """A second prompt of five blocks evicts three of the first one's four complete ones from a pool of six. At 4 s the
    first prompt is back on workers 0 and 1: three blocks of 1000 bytes each, at 1000 bytes/s together, are there at 10.
    """
    tier = HostTierSettings(blocks=8, block_bytes=1000, load_bytes_per_s=1e9, trigger="on_evict")
    settings = engine_settings(block_size=16, blocks=6, host=tier)

    def prompt(row: int, at_s: float, key: int) -> Row:
        return trace_row(row, at_s, 66, 1, [key + i for i in range(66 // KEY_TOKENS + 1)])

    rows = [prompt(n, float(n // 2), 100 * (n // 2)) for n in range(4)]
    rows += [prompt(4, 4.0, 0), prompt(5, 4.0, 0)]
    link = Link(name="pcie", bytes_per_s=1000)
    world = carry_out((tuple(rows), settings, link, [], [], None, []), settings)
    assert world.network is not None
    assert world.network.carried_bytes == {"host": 6000}
    admitted_s = [world._sinks.requests[row][11] for row in (4, 5)]
    assert admitted_s == [10.0, 10.0]
