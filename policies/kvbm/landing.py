"""Stores that are running, and what a prompt may wait for instead of computing it: blocks that will be found as soon as
their batch has landed.

A prompt waits only for blocks that nobody has yet; where a load or computing is done sooner, a rule that compares times
says so. A wait is no promise: the store may fail, and the look-up after it says what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import Tier
from policies.kvbm.look_up import Costs, Holding, Miss, Pieces, Rule, TierRun


class Landing:
    """A batch that is on its way into a tier, its blocks held for nobody yet. `ends_s` is when it is there if nothing
    else moves; `is_over` once it is, or has come to nothing."""

    __slots__ = ("ends_s", "is_over", "runs", "tier")

    def __init__(self, tier: Tier, runs: tuple[BlockRun, ...], ends_s: float) -> None:
        self.tier = tier
        self.runs = runs
        self.ends_s = ends_s
        self.is_over = False

    def reach(self, branch: Branch, at: int) -> int:
        """How far it goes on without a gap from block `at`; `at` itself when that is not part of it."""
        for run in sorted((run for run in self.runs if run.branch is branch), key=_by_lo):
            if run.lo <= at < run.hi:
                at = run.hi
        return at


def continued(
    pieces: Pieces,
    start: int,
    limit: int,
    landings: Sequence[Landing],
    stores: Sequence[tuple[Tier, Holding]],
) -> list[tuple[TierRun, Landing | None]]:
    """How a prompt goes on from block `start`, which nobody has: by stores that are running, and between them by what
    tiers hold. Ends with a running store, or is empty."""
    found: list[tuple[TierRun, Landing | None]] = []
    at = start
    for branch, end in pieces:
        end = min(end, limit)
        while at < end:
            landing = next((each for each in landings if each.reach(branch, at) > at), None)
            tier, hi = _held(branch, at, end, stores) if landing is None else (landing.tier, landing.reach(branch, at))
            if tier is None:
                return _up_to_landing(found)
            found.append((TierRun(tier, at, min(hi, end), ()), landing))
            at = min(hi, end)
    return _up_to_landing(found)


def worth_waiting(
    runs: Sequence[TierRun],
    more: Sequence[tuple[TierRun, Landing | None]],
    rule: Rule,
    costs: Costs | None,
    now_s: float,
) -> tuple[Landing, ...]:
    """The running stores that bring what a prompt lacks after `runs`, if the rule has it wait for them."""
    landings = tuple(dict.fromkeys(landing for _, landing in more if landing is not None))
    if not landings or rule.name == "always" or costs is None:
        return landings
    wait_s = max(0.0, max(landing.ends_s for landing in landings) - now_s)
    load_s = wait_s + costs.load_s([*runs, *(run for run, _ in more)])
    if rule.name == "deadline":
        return landings if rule.deadline_s is not None and load_s <= rule.deadline_s else ()
    lo, hi = more[0][0].lo, more[-1][0].hi
    return landings if load_s < costs.load_s(runs) + costs.compute_s(lo, hi) else ()


def goes_on(misses: Iterable[Miss]) -> bool:
    """Whether a plan ends where nobody has the next block, and not because what is there is not to be loaded."""
    return not {Miss.SLOWER, Miss.FAILED, Miss.NO_ROOM} & set(misses)


def _held(branch: Branch, at: int, end: int, stores: Sequence[tuple[Tier, Holding]]) -> tuple[Tier | None, int]:
    for tier, store in stores:
        found = store.find(branch, at, end)
        if found:
            return tier, found[-1].hi
    return None, at


def _up_to_landing(found: list[tuple[TierRun, Landing | None]]) -> list[tuple[TierRun, Landing | None]]:
    while found and found[-1][1] is None:
        found.pop()
    return found


def _by_lo(run: BlockRun) -> int:
    return run.lo
