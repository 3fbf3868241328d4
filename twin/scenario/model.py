"""A scenario as it was read: faults, when and to whom they happen, and what the run must come to all the same.

Plain values, in seconds. Nothing here reads a file, draws or acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from policies.cluster.events import Threshold
from policies.frozen import frozen

ANY = "any"
TIERS = ("g2", "g3", "g4")
"""Host memory, disk, remote store."""
ROLES = ("mixed", "prefill", "decode")
DETECTIONS = ("disconnect", "lease", "silent")
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "le": lambda value, limit: value <= limit,
    "lt": lambda value, limit: value < limit,
    "ge": lambda value, limit: value >= limit,
    "gt": lambda value, limit: value > limit,
    "eq": lambda value, limit: value == limit,
}

METRICS = (
    *(f"requests_{status}" for status in ("completed", "rejected", "cancelled", "failed")),
    "migrations",
    "longest_gap_ms",
    "recovery_ms",
)
"""What may be expected by a short name; anything else is the dotted path of a figure in report.json."""


@frozen
class Fault:
    """One entry. `index` is its place in the file (client_disconnects follow the faults), `name` says so, and `where`
    in which file.

    It happens at `at_s`, or every `every_s` (first then, give or take `jitter_s`, `count` times at most), or with a
    mean time of `mtbf_s` between failures. It is over after `for_s`, at `until_s`, or after a drawn time of mean
    `mttr_s`; with none of these it stays. `between`: two sets, each of names of workers and roles. `changes`: limits of
    `[router.busy]` from then on.
    """

    index: int
    name: str
    where: str
    kind: str
    at_s: float | None = None
    every_s: float | None = None
    jitter_s: float = 0.0
    count: int | None = None
    mtbf_s: float | None = None
    mttr_s: float | None = None
    for_s: float | None = None
    until_s: float | None = None
    worker: str | None = None
    role: str | None = None
    between: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    detect: str = "disconnect"
    detection_delay_s: float | None = None
    grace_s: float | None = None
    timeout_s: float | None = None
    known_after_s: float = 0.0
    factor: float = 1.0
    rate: float | None = None
    delay_s: float = 0.0
    row: int | None = None
    within_s: float = 0.0
    link: str | None = None
    tier: str | None = None
    changes: tuple[Threshold, ...] = ()
    extra_s: float = 0.0
    router: int = 0
    bytes_per_s: float | None = None

    @property
    def recurs(self) -> bool:
        return self.every_s is not None or self.mtbf_s is not None


class Occurrence(NamedTuple):
    """The n-th time of a fault, from 0: when, until when (None: for good), and the draw that picks its worker."""

    n: int
    at_s: float
    until_s: float | None
    u: float


@frozen
class Expectation:
    """A limit on a metric of the run, or (`metric` None) that every invariant is watched at each event."""

    metric: str | None
    comparison: str = "le"
    limit: float = 0.0

    @property
    def text(self) -> str:
        return "invariants" if self.metric is None else f"{self.metric} {self.comparison} {self.limit:g}"


@frozen
class Scenario:
    """A scenario file. What it says of the cluster is None where it says nothing."""

    path: Path
    seed: int | None
    workers: tuple[str, ...] | None
    policy: str | None
    first_worker: str | None
    migration_limit: int | None
    migration_max_seq_len: int | None
    detection_delay_s: float | None
    faults: tuple[Fault, ...]
    expect: tuple[Expectation, ...]

    @property
    def watches_invariants(self) -> bool:
        return any(expectation.metric is None for expectation in self.expect)
