"""Where the blocks of a prompt lie, and which of them to load: the longest run without a gap, each block from the best
tier that holds it.

A plan holds weak references only. It says for every full block of the prompt why it is, or is not, among those loaded;
it moves nothing and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from policies.cluster.blocks import BlockRun, Branch
from policies.cluster.ids import Tier, WorkerId
from policies.errors import ConfigError
from policies.frozen import frozen
from policies.kvbm.spans import Span, along
from policies.kvbm.store import Found

if TYPE_CHECKING:
    from policies.kvbm.landing import Landing
    from policies.kvbm.registry import Ask

Pieces: TypeAlias = Sequence[tuple[Branch, int]]
"""The content of a prompt: branches, each from where the one before it ends to its own end, in blocks."""
Lacking: TypeAlias = Callable[[Branch, int, int], list[Span]]
"""Which blocks [lo, hi) of a branch somebody does not have."""


class Miss(Enum):
    """Why a block that was looked up is computed."""

    ABSENT = "absent"  # nobody has it
    HOLE = "hole"  # somebody has it, and not what stands before it
    NO_ROOM = "no_room"  # the device has no room for it
    SLOWER = "slower"  # computing it is faster, or it would come too late
    FAILED = "failed"  # it was read, and what came was no good
    LAST_TOKEN = "last_token"  # the last token of a prompt is always computed


class TierRun(NamedTuple):
    """Blocks `lo..hi` of a prompt that one tier holds: of another worker, `owner`, where there is one."""

    tier: Tier
    lo: int
    hi: int
    found: tuple[Found, ...]
    owner: WorkerId | None = None


class Holding(Protocol):
    """What some place holds, as far as whoever looks knows: a store, or what was told of one."""

    def find(self, branch: Branch, lo: int, hi: int) -> list[Found]: ...
    def lacking(self, branch: Branch, lo: int, hi: int) -> list[Span]: ...


class _Holder(NamedTuple):
    tier: Tier
    store: Holding
    owner: WorkerId | None = None


@frozen
class Plan:
    """`device_blocks` are on the device; `runs` are to be loaded, and go on from there without a gap.

    `misses` counts the full blocks of the prompt that are neither, by reason. `awaits` are running stores that
    bring more of them, or a question to the registry: a prompt that has any waits, and is looked up again.
    """

    device_blocks: int
    runs: tuple[TierRun, ...]
    misses: Mapping[Miss, int]
    awaits: tuple[Landing | Ask, ...] = ()

    @property
    def end(self) -> int:
        """Blocks of the prompt that will be there when all has been loaded."""
        return self.runs[-1].hi if self.runs else self.device_blocks

    @property
    def load_blocks(self) -> int:
        return self.end - self.device_blocks


class Costs(NamedTuple):
    """What the rule compares, in seconds: loading the first runs of a plan, and computing blocks `lo..hi` of a prompt
    of which everything before is there."""

    load_s: Callable[[Sequence[TierRun]], float]
    compute_s: Callable[[int, int], float]


class Rule(NamedTuple):
    """Which of the runs that could be loaded are: `name` is always, faster or deadline."""

    name: str = "always"
    deadline_s: float | None = None

    def kept(self, runs: Sequence[TierRun], costs: Costs | None) -> int:
        """How many of the runs, from the first on, are worth loading. Raises ConfigError without what it needs."""
        if self.name == "always" or not runs:
            return len(runs)
        if costs is None:
            raise ConfigError(f"onboard rule {self.name!r} compares times, and none are known here; use 'always'")
        if self.name == "faster":
            end = runs[-1].hi
            times = [
                (costs.load_s(runs[:n]) if n else 0.0) + costs.compute_s(runs[n].lo if n < len(runs) else end, end)
                for n in range(len(runs) + 1)
            ]
            return times.index(min(times))
        if self.name == "deadline":
            if self.deadline_s is None:
                raise ConfigError("onboard rule 'deadline' needs a deadline in seconds")
            fitting = [n for n in range(1, len(runs) + 1) if costs.load_s(runs[:n]) <= self.deadline_s]
            return max(fitting, default=0)
        raise ConfigError(f"onboard rule {self.name!r} is not known; known are always, faster, deadline")


RULES = ("always", "faster", "deadline")
ALWAYS = Rule()


def usable_blocks(isl_tokens: int, block_size: int) -> int:
    """Blocks of a prompt that can be reused at most: its last token is always computed."""
    return max(0, (isl_tokens - 1) // block_size)


def look_up(
    pieces: Pieces,
    *,
    blocks: int,
    usable: int,
    device_blocks: int,
    stores: Sequence[tuple[Tier, Holding]],
    peers: Sequence[tuple[WorkerId, Holding]] = (),
    told: Callable[[Branch, int], int] | None = None,
    device_lacking: Lacking | None = None,
    room_blocks: int | None = None,
    rule: Rule = ALWAYS,
    costs: Costs | None = None,
) -> Plan:
    """Plan for a prompt of `blocks` full blocks, the first `usable` of which may be reused.

    The device holds the first `device_blocks`, and of others what `device_lacking` does not name; `stores` are the
    tiers below, fastest first; host memory of `peers` comes next to one's own. `told` says how far a registry said
    that somebody has a branch: what was told of and is there no longer was read in vain. `room_blocks` is how many
    blocks the device can take (None: no limit).
    """
    holders = [_Holder(tier, store) for tier, store in stores]
    if peers:
        own_host = sum(tier is Tier.G2_HOST for tier, _ in stores)
        holders[own_host:own_host] = [_Holder(Tier.G2_HOST, store, owner) for owner, store in peers]
    runs = _contiguous(pieces, device_blocks, usable, holders)
    end = reached = runs[-1].hi if runs else device_blocks
    misses = dict.fromkeys(Miss, 0)
    everywhere: list[Lacking] = [holder.store.lacking for holder in holders]
    if device_lacking is not None:
        everywhere.append(device_lacking)
    if end >= usable:
        reached = _first_gap(pieces, end, blocks, everywhere)
        misses[Miss.LAST_TOKEN] = reached - end
    elif told is not None:
        reached = along(pieces, end, usable, told)
        misses[Miss.FAILED] = reached - end
    if room_blocks is not None and end - device_blocks > room_blocks:
        runs = _cut(runs, device_blocks + room_blocks)
        misses[Miss.NO_ROOM] = end - device_blocks - room_blocks
        end = device_blocks + room_blocks
    worth = rule.kept(runs, costs)
    if worth < len(runs):
        misses[Miss.SLOWER] = end - runs[worth].lo
        runs = runs[:worth]
    held = _held_beyond(pieces, reached, blocks, everywhere)
    misses[Miss.HOLE] = held
    misses[Miss.ABSENT] = blocks - reached - held
    return Plan(device_blocks=device_blocks, runs=tuple(runs), misses={why: n for why, n in misses.items() if n})


def first_lacking(pieces: Pieces, start: int, limit: int, stores: Sequence[tuple[Tier, Holding]]) -> BlockRun | None:
    """The first block from `start` on that none of these stores has; None if they have all up to `limit`."""
    runs = _contiguous(pieces, start, limit, [_Holder(tier, store) for tier, store in stores])
    at = runs[-1].hi if runs else start
    branch = next((branch for branch, end in pieces if end > at), None)
    return BlockRun(branch, at, at + 1) if at < limit and branch is not None else None


def blocks_of(pieces: Pieces, limit: int) -> list[BlockRun]:
    """The first blocks of a prompt, up to `limit`, as runs."""
    runs, at = [], 0
    for branch, end in pieces:
        end = min(end, limit)
        if end > at:
            runs.append(BlockRun(branch, at, end))
            at = end
    return runs


def _contiguous(pieces: Pieces, start: int, limit: int, holders: Sequence[_Holder]) -> list[TierRun]:
    """Runs from block `start` on, each block from the first holder that has it, up to the first that nobody has."""
    runs: list[TierRun] = []
    at = start
    for branch, end in pieces:
        end = min(end, limit)
        while at < end:
            holder, found = _holder(branch, at, end, holders)
            if holder is None:
                return runs
            hi = min([found[-1].hi, *_better_from(branch, at, found[-1].hi, holder, holders)])
            found = [part for part in found if part.lo < hi]
            found[-1] = found[-1]._replace(hi=min(found[-1].hi, hi))
            if runs and runs[-1].tier is holder.tier and runs[-1].owner == holder.owner:
                runs[-1] = runs[-1]._replace(hi=hi, found=(*runs[-1].found, *found))
            else:
                runs.append(TierRun(holder.tier, at, hi, tuple(found), holder.owner))
            at = hi
    return runs


def _holder(branch: Branch, lo: int, hi: int, holders: Sequence[_Holder]) -> tuple[_Holder | None, list[Found]]:
    """The first that has block `lo`, and what it has from there on without a gap."""
    for holder in holders:
        found = holder.store.find(branch, lo, hi)
        if found:
            return holder, found
    return None, []


def _better_from(branch: Branch, lo: int, hi: int, holder: _Holder, holders: Sequence[_Holder]) -> list[int]:
    """Where, behind `lo`, somebody who stands before `holder` begins to have the blocks."""
    starts = []
    for other in holders:
        if other is holder:
            break
        gaps = other.store.lacking(branch, lo, hi)  # it does not have `lo` itself
        if gaps and gaps[0][1] < hi:
            starts.append(gaps[0][1])
    return starts


def _cut(runs: list[TierRun], end: int) -> list[TierRun]:
    """The runs up to block `end`."""
    kept = []
    for run in runs:
        if run.lo >= end:
            break
        if run.hi > end:
            found = tuple(part._replace(hi=min(part.hi, end)) for part in run.found if part.lo < end)
            run = run._replace(hi=end, found=found)
        kept.append(run)
    return kept


def _first_gap(pieces: Pieces, start: int, limit: int, everywhere: Sequence[Lacking]) -> int:
    """The first block from `start` on that nobody has."""
    at = start
    for branch, end in pieces:
        end = min(end, limit)
        if end > at:
            gaps = _gaps(branch, at, end, everywhere)
            if gaps:
                return gaps[0][0]
            at = end
    return at


def _held_beyond(pieces: Pieces, start: int, limit: int, everywhere: Sequence[Lacking]) -> int:
    """Blocks from `start` on that somebody has."""
    held = 0
    at = start
    for branch, end in pieces:
        end = min(end, limit)
        if end > at:
            held += end - at - sum(hi - lo for lo, hi in _gaps(branch, at, end, everywhere))
            at = end
    return held


def _gaps(branch: Branch, lo: int, hi: int, everywhere: Sequence[Lacking]) -> list[Span]:
    """What nobody has of blocks [lo, hi)."""
    spans = [(lo, hi)]
    for lacking in everywhere:
        spans = [gap for a, b in spans for gap in lacking(branch, a, b)]
    return spans


def without(plan: Plan, failed: Callable[[TierRun, BlockRun], int | None]) -> Plan:
    """The plan up to the first block of which `failed` says that its tier lately could not read it; it and what comes
    after it is computed. `failed` gives the first such block of a part of a run."""
    for n, run in enumerate(plan.runs):
        for part in run.found:
            at = failed(run, BlockRun(part.stretch.branch, part.lo, part.hi))
            if at is not None:
                misses = dict(plan.misses)
                misses[Miss.FAILED] = misses.get(Miss.FAILED, 0) + plan.end - at
                runs = tuple(_cut(list(plan.runs[: n + 1]), at))
                return Plan(device_blocks=plan.device_blocks, runs=runs, misses=misses)
    return plan
