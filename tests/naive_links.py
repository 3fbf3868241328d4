"""The slowest way to share links: every rate of every job from nothing at every event, in exact fractions.

The reference for `twin.perf.links`; written without looking anything up but the rules. It never rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from twin.perf.links import Link


@dataclass
class Job:
    """A transfer of the program: when, how much, over which links, and when it is called off."""

    start_s: Fraction
    bytes: int
    links: tuple[str, ...]
    setup_s: Fraction = Fraction(0)
    cancel_s: Fraction | None = None
    left: Fraction = field(default=Fraction(0), init=False)
    fixed_left_s: Fraction = field(default=Fraction(0), init=False)
    end_s: Fraction | None = field(default=None, init=False)


@dataclass(frozen=True)
class Change:
    """A link carries `bytes_per_s` from then on."""

    at_s: Fraction
    link: str
    bytes_per_s: int


def rates(jobs: Sequence[Job], links: dict[str, Link], speed: dict[str, Fraction]) -> list[Fraction]:
    """Max-min fair: everybody's rate grows together until a link or a cap holds somebody."""
    rate = [Fraction(0)] * len(jobs)
    growing = set(range(len(jobs)))
    while growing:
        room = []
        for name, link in links.items():
            users = [i for i in range(len(jobs)) if name in jobs[i].links]
            free = [i for i in users if i in growing]
            if link.discipline == "private":
                room += [(speed[name] - rate[i], [i]) for i in free]
            elif free:
                room.append(((speed[name] - sum(rate[i] for i in users)) / len(free), free))
        step = min(r for r, _ in room)
        for i in growing:
            rate[i] += step
        for r, held in room:
            if r == step:
                growing -= set(held)
    return rate


def run(jobs: Sequence[Job], links: Sequence[Link], changes: Sequence[Change] = ()) -> list[Fraction | None]:
    """When each job ends; None where it never does."""
    by_name = {link.name: link for link in links}
    speed = {link.name: Fraction(link.bytes_per_s) for link in links}
    for job in jobs:
        job.left = Fraction(job.bytes)
        job.fixed_left_s = job.setup_s + sum((Fraction(by_name[n].latency_s) for n in job.links), Fraction(0))
    now_s = Fraction(0)
    while True:
        alive = [
            job
            for job in jobs
            if job.start_s <= now_s and job.end_s is None and (job.cancel_s is None or job.cancel_s > now_s)
        ]
        taken: set[str] = set()
        served = []
        for job in alive:  # in order of start: jobs are given in that order
            lanes = {name for name in job.links if by_name[name].discipline == "fifo"}
            if not lanes & taken:
                served.append(job)
            taken |= lanes
        flowing = [job for job in served if not job.fixed_left_s]
        over = [job for job in flowing if not job.left]
        if over:
            for job in over:
                job.end_s = now_s
            continue
        rate = rates(flowing, by_name, speed)
        nexts = [job.start_s for job in jobs if job.start_s > now_s]
        nexts += [job.cancel_s for job in alive if job.cancel_s is not None]
        nexts += [change.at_s for change in changes if change.at_s > now_s]
        nexts += [now_s + job.fixed_left_s for job in served if job.fixed_left_s]
        nexts += [now_s + job.left / r for job, r in zip(flowing, rate, strict=True) if r]
        if not nexts:
            return [job.end_s for job in jobs]
        until_s = min(nexts)
        for job, r in zip(flowing, rate, strict=True):
            job.left -= r * (until_s - now_s)
        for job in served:
            if job.fixed_left_s:
                job.fixed_left_s -= until_s - now_s
        now_s = until_s
        for change in changes:
            if change.at_s == now_s:
                speed[change.link] = Fraction(change.bytes_per_s)
