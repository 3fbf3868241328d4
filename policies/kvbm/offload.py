"""Which blocks move down: filters that pass a block on to the tier below, or do not.

A filter sees the block's content and what the target holds. It moves nothing, and is asked once per run of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

from policies.cluster.blocks import BlockRun, Branch
from policies.errors import ConfigError
from policies.kvbm.sketch import Sketch, chain_of
from policies.kvbm.spans import Span


class Target(Protocol):
    """The tier that a block would move to, as a filter sees it."""

    def absent(self, branch: Branch, lo: int, hi: int) -> Iterable[Span]:
        """The blocks of [lo, hi) that are neither there nor on their way there."""
        ...

    def blocks_of(self, tenant: str) -> int:
        """Blocks of one tenant that are there."""
        ...


class Candidate(NamedTuple):
    """Blocks that may move down. A lower `priority` goes first; `tenant` is whose they are, where that is known."""

    run: BlockRun
    priority: int = 0
    tenant: str | None = None


class OffloadFilter(Protocol):
    """Decides which blocks of a candidate pass."""

    name: ClassVar[str]

    def passes(self, candidate: Candidate, target: Target, now_s: float) -> Iterable[Span]:
        """The blocks that may move, ascending."""
        ...

    def used(self, branch: Branch, lo: int, hi: int, now_s: float) -> None:
        """These blocks were completed, or found again."""
        ...


class _Indifferent:
    """A filter to which it is all one how often a block is used."""

    def used(self, branch: Branch, lo: int, hi: int, now_s: float) -> None:
        pass


class PassAll(_Indifferent):
    """Every block, also one that is there already: it is written again."""

    name: ClassVar[str] = "pass_all"

    def passes(self, candidate: Candidate, target: Target, now_s: float) -> Iterable[Span]:
        _, lo, hi = candidate.run
        return [(lo, hi)]


class Presence(_Indifferent):
    """Blocks that are not in the target, nor on their way there."""

    name: ClassVar[str] = "presence"

    def passes(self, candidate: Candidate, target: Target, now_s: float) -> Iterable[Span]:
        return target.absent(*candidate.run)


class MinCount(_Indifferent):
    """Blocks that were used more than `min_count` times, as far as a sketch tells; whoever owns it keeps it."""

    name: ClassVar[str] = "min_count"

    def __init__(self, sketch: Sketch, min_count: int) -> None:
        self._sketch = sketch
        self._min_count = min_count

    def passes(self, candidate: Candidate, target: Target, now_s: float) -> Iterable[Span]:
        branch, lo, hi = candidate.run
        return joined(b for b in range(lo, hi) if self._sketch.count(chain_of(branch, b)) > self._min_count)


class FrequencyFilter:
    """Blocks whose frequency is at least `least`. It is 1 at first, doubles at each use, and loses 1 each `decay_s`."""

    name: ClassVar[str] = "frequency_filter"

    def __init__(self, *, least: int = 2, decay_s: float = 60.0) -> None:
        if decay_s <= 0:
            raise ConfigError(f"frequency_filter: a decay period of {decay_s} s; it must be above 0")
        self._least = least
        self._decay_s = decay_s
        self._frequencies: dict[tuple[Branch, int], int] = {}
        self._decays = 0

    def passes(self, candidate: Candidate, target: Target, now_s: float) -> Iterable[Span]:
        self._decay(now_s)
        branch, lo, hi = candidate.run
        return joined(b for b in range(lo, hi) if self._frequencies.get((branch, b), 0) >= self._least)

    def used(self, branch: Branch, lo: int, hi: int, now_s: float) -> None:
        self._decay(now_s)
        frequencies = self._frequencies
        for block in range(lo, hi):
            frequencies[branch, block] = 2 * frequencies.get((branch, block), 0) or 1

    def _decay(self, now_s: float) -> None:
        periods = int(now_s / self._decay_s) - self._decays
        if periods > 0:
            self._decays += periods
            self._frequencies = {key: left for key, n in self._frequencies.items() if (left := n - periods) > 0}


class Priority(Presence):
    """Like presence; the lane goes by the priorities that callers set, and drops the lowest when its queue is full."""

    name: ClassVar[str] = "priority"


class TenantQuota(_Indifferent):
    """Blocks of a tenant that has fewer than `quota_blocks` in the target; those of nobody in particular pass."""

    name: ClassVar[str] = "tenant_quota"

    def __init__(self, quota_blocks: int) -> None:
        self._quota_blocks = quota_blocks

    def passes(self, candidate: Candidate, target: Target, now_s: float) -> Iterable[Span]:
        _, lo, hi = candidate.run
        if candidate.tenant is None:
            return [(lo, hi)]
        left = self._quota_blocks - target.blocks_of(candidate.tenant)
        return [(lo, min(hi, lo + left))] if left > 0 else []


class Chained:
    """What every one of several filters passes, part by part: a part is looked at when those before it have been taken,
    so that a quota counts them."""

    name: ClassVar[str] = "chained"

    def __init__(self, filters: Sequence[OffloadFilter]) -> None:
        self._filters = tuple(filters)

    def passes(self, candidate: Candidate, target: Target, now_s: float) -> Iterable[Span]:
        return self._through(0, candidate, target, now_s)

    def _through(self, n: int, candidate: Candidate, target: Target, now_s: float) -> Iterator[Span]:
        branch, lo, hi = candidate.run
        if n == len(self._filters):
            yield lo, hi
            return
        for a, b in self._filters[n].passes(candidate, target, now_s):
            yield from self._through(n + 1, candidate._replace(run=BlockRun(branch, a, b)), target, now_s)

    def used(self, branch: Branch, lo: int, hi: int, now_s: float) -> None:
        for each in self._filters:
            each.used(branch, lo, hi, now_s)


def joined(blocks: Iterable[int]) -> list[Span]:
    """Ascending blocks as spans."""
    spans: list[Span] = []
    for block in blocks:
        if spans and spans[-1][1] == block:
            spans[-1] = (spans[-1][0], block + 1)
        else:
            spans.append((block, block + 1))
    return spans
