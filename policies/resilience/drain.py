"""How a worker stops in three phases: leave, drain, tear down.

    leave   it has deregistered, and still serves those who have not heard of that (`grace_s`)
    drain   it refuses what is new (another worker may take it) and finishes what it has (`timeout_s`)
    stop    what is left is sent again elsewhere, or fails; it is gone

A second signal stops it at once; a recall before that makes it what it was. Nothing here reads a clock, and nothing is
cut before its time.
"""

from __future__ import annotations

from enum import Enum

from policies.errors import ConfigError
from policies.frozen import frozen


class Phase(Enum):
    """Where a worker that stops stands."""

    LEAVING = "leaving"
    DRAINING = "draining"
    STOPPING = "stopping"


@frozen
class DrainRules:
    """How long the phases take: `grace_s` and `timeout_s` (None: as long as it takes)."""

    grace_s: float
    timeout_s: float | None

    def __post_init__(self) -> None:
        if self.grace_s < 0:
            raise ConfigError(f"grace_s is {self.grace_s}, it must be 0 or more")
        if self.timeout_s is not None and self.timeout_s < 0:
            raise ConfigError(f"drain_timeout_s is {self.timeout_s}, it must be 0 or more")

    @property
    def longest_s(self) -> float | None:
        """From the signal to the end of the drain; what kills the process must wait longer (None: no bound)."""
        return None if self.timeout_s is None else self.grace_s + self.timeout_s


class Drain:
    """One worker's way out: until when it serves all, and when what is left is cut (None: never). Build it with `of`,
    or with instants of a clock that has ticks.
    """

    __slots__ = ("cut_s", "grace_ends_s")

    def __init__(self, grace_ends_s: float, cut_s: float | None) -> None:
        self.grace_ends_s = grace_ends_s
        self.cut_s = cut_s

    @classmethod
    def of(cls, rules: DrainRules, began_s: float) -> Drain:
        """By its rules, from the signal on."""
        longest_s = rules.longest_s
        return cls(began_s + rules.grace_s, None if longest_s is None else began_s + longest_s)

    def hurry(self, now_s: float) -> None:
        """A second signal: no grace any more, and no time."""
        self.grace_ends_s = min(self.grace_ends_s, now_s)
        self.cut_s = now_s if self.cut_s is None else min(self.cut_s, now_s)

    def phase(self, now_s: float) -> Phase:
        if self.cut_s is not None and now_s >= self.cut_s:
            return Phase.STOPPING
        return Phase.LEAVING if now_s < self.grace_ends_s else Phase.DRAINING

    def accepts(self, now_s: float) -> bool:
        """Whether it still takes a request from somebody who has not heard; else it refuses, for another to take."""
        return self.phase(now_s) is Phase.LEAVING

    def may_go(self, now_s: float, *, idle: bool) -> bool:
        """Whether it stops now: there is nothing left and nobody it should wait for, or its time is over."""
        phase = self.phase(now_s)
        return phase is Phase.STOPPING or (idle and phase is Phase.DRAINING)


def grace_too_short(rules: DrainRules, kill_after_s: float) -> str | None:
    """A warning where whoever kills the process (Kubernetes: terminationGracePeriodSeconds) would cut streams short."""
    longest_s = rules.longest_s
    if longest_s is None:
        return f"a drain has no bound, and the process is killed after {kill_after_s:g} s: streams will be cut"
    if kill_after_s > longest_s:
        return None
    return (
        f"the process is killed after {kill_after_s:g} s, grace and drain take up to {longest_s:g} s: streams will be "
        f"cut; let it live longer than that"
    )
