"""Shared links against the naive reference, and the laws of sharing: random jobs, paths, faults and cancels."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_links import Change, Job, run

from twin.mocker.clock import Clock, Order
from twin.mocker.links import Link, Network
from twin.perf.links import Fluid

NAMES = ("a", "b", "c", "d")
MS = Fraction(1, 1000)


@st.composite
def programs(draw: st.DrawFn, disciplines: tuple[str, ...] = ("fair", "fair", "fifo", "private")):
    """(links, jobs in order of start, changes of bandwidth that end with everything restored)."""
    links = [
        Link(
            name=name,
            bytes_per_s=draw(st.sampled_from([1000, 3000, 7000, 10_000])),
            latency_s=draw(st.sampled_from([0.0, 0.0, 0.25])),
            discipline=draw(st.sampled_from(disciplines)),
        )
        for name in NAMES
    ]
    jobs = []
    for _ in range(draw(st.integers(1, 9))):
        start_ms = draw(st.integers(0, 3000))
        stays_ms = draw(st.none() | st.integers(1, 3000))
        jobs.append(
            Job(
                start_s=start_ms * MS,
                bytes=draw(st.integers(0, 9000)),
                links=tuple(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))),
                setup_s=draw(st.sampled_from([Fraction(0), Fraction(1, 8)])),
                cancel_s=None if stays_ms is None else (start_ms + stays_ms) * MS,
            )
        )
    jobs.sort(key=lambda job: job.start_s)
    slowed = draw(st.lists(st.tuples(st.integers(1, 4000), st.sampled_from(NAMES), st.sampled_from([0, 500, 20_000]))))
    changes = [Change(ms * MS, name, speed) for ms, name, speed in slowed]
    changes = list({(change.at_s, change.link): change for change in changes}.values())
    changes += [Change(5000 * MS, link.name, int(link.bytes_per_s)) for link in links]
    return links, jobs, changes


def simulate(links: list[Link], jobs: list[Job], changes: list[Change]) -> tuple[list[float | None], Network]:
    clock = Clock()
    network = Network(clock, links)
    ends: list[float | None] = [None] * len(jobs)
    speeds = {link.name: link.bytes_per_s for link in links}
    transfers = {}

    def begin(number: int) -> None:
        job = jobs[number]

        def note() -> None:
            ends[number] = clock.now

        transfers[number] = network.start(job.links, job.bytes, setup_s=float(job.setup_s), on_done=note)

    def at(at_s: Fraction, order: Order, what) -> None:
        clock.at(float(at_s), int(order), (lambda _: what(),))

    for number, job in enumerate(jobs):
        at(job.start_s, Order.ARRIVAL, lambda number=number: begin(number))
        if job.cancel_s is not None:
            at(job.cancel_s, Order.COMMAND, lambda number=number: transfers[number].cancel())
    for change in changes:
        factor = change.bytes_per_s / speeds[change.link]
        at(change.at_s, Order.FAULT, lambda change=change, factor=factor: network.slow(change.link, factor))
    clock.run()
    network.audit()
    assert network.live == 0
    return ends, network


@given(programs())
def test_ends_are_those_of_the_exact_reference(program) -> None:
    links, jobs, changes = program
    ends, _ = simulate(links, jobs, changes)
    for mine, exact, job in zip(ends, run(jobs, links, changes), jobs, strict=True):
        if job.cancel_s is not None and (mine is None or exact is None):
            never = exact if mine is None else Fraction(mine)  # only an end at the cancel's own instant may differ
            assert never is None or abs(never - job.cancel_s) < Fraction(3, 10**9)
        else:
            assert mine == pytest.approx(float(exact), rel=1e-9, abs=2e-9)


@given(programs(("fair",)))
def test_fair_sharing_is_work_conserving_and_max_min_fair(program) -> None:
    """At any time every flow has a lane that is full and on which nobody is faster: the certificate of max-min."""
    links, jobs, _ = program
    fluid = Fluid(links)
    for job in jobs:
        fluid.start(float(job.start_s), job.links, job.bytes + 1)
        for lane in fluid.lanes.values():
            total = sum(flow.rate_bytes_per_s for flow in lane.flowing.values())
            assert total <= lane.bytes_per_s * (1 + 1e-12)
        for flow in {flow.seq: flow for lane in fluid.lanes.values() for flow in lane.flowing.values()}.values():
            assert any(
                sum(f.rate_bytes_per_s for f in lane.flowing.values()) >= lane.bytes_per_s * (1 - 1e-12)
                and all(f.rate_bytes_per_s <= flow.rate_bytes_per_s * (1 + 1e-12) for f in lane.flowing.values())
                for lane in flow.lanes
            )


@given(programs())
def test_every_byte_is_moved_once(program) -> None:
    """Without cancels and with the links restored, each lane moved exactly the bytes of the jobs on it."""
    links, jobs, changes = program
    for job in jobs:
        job.cancel_s = None
    ends, network = simulate(links, jobs, changes)
    assert None not in ends
    for name in NAMES:
        assert network.moved_bytes(name) == pytest.approx(sum(job.bytes for job in jobs if name in job.links), abs=1e-2)


@given(programs(("fair",)), st.integers(0, 8))
def test_on_one_fair_link_fewer_jobs_are_never_later(program, left_out: int) -> None:
    """On one link; on several a job less can slow others (max-min sharing is not monotone there)."""
    links, jobs, _ = program
    links = [Link(name="a", bytes_per_s=links[0].bytes_per_s)]
    for job in jobs:
        job.links, job.cancel_s = ("a",), None
    all_ends, _ = simulate(links, jobs, [])
    keep = [i for i in range(len(jobs)) if i != left_out]
    fewer, _ = simulate(links, [jobs[i] for i in keep], [])
    for end, i in zip(fewer, keep, strict=True):
        assert end is not None
        assert end <= (all_ends[i] or 0.0) + 2e-9


@given(programs(("fifo",)), st.sampled_from(NAMES))
def test_on_one_fifo_lane_ends_come_in_order_of_start(program, name: str) -> None:
    links, jobs, _ = program
    for job in jobs:
        job.links, job.cancel_s = (name,), None
    ends, _ = simulate(links, jobs, [])
    assert ends == sorted(ends, key=lambda end: end or 0.0)


@given(programs(("private",)))
def test_private_links_do_not_notice_anybody(program) -> None:
    links, jobs, _ = program
    for job in jobs:
        job.cancel_s = None
    together, _ = simulate(links, jobs, [])
    alone = [simulate(links, [job], [])[0][0] for job in jobs]
    assert together == alone
