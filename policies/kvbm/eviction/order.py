"""What an eviction order is asked and told; the store of a tier does the rest.

A stretch is a run of equal blocks, so an order ranks stretches and says from which end they are eaten. It sees only
stretches that nobody uses: whatever it names may go.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from policies.cluster.blocks import Branch


class Stretch:
    """Blocks `lo..hi` of `branch` in one tier, all in the same state: used by `refs`, or inactive (`refs == 0`).

    `rest` is where the tail went when it was split. `tick` and `level` belong to the tier's eviction order, and say
    where its last block stands (its first, in an order that eats from the front). `born` is the registration of its
    first block, in blocks registered; `since_s` when it came in, `reuses` how often it was used since. A stretch that
    has gone never comes back: blocks of the same content that come in later are another one.
    """

    __slots__ = ("born", "branch", "hi", "level", "lo", "refs", "rest", "reuses", "since_s", "tick")

    def __init__(self, branch: Branch, lo: int, hi: int, *, born: int, since_s: float) -> None:
        self.branch = branch
        self.lo = lo
        self.hi = hi
        self.refs = 1
        self.rest: Stretch | None = None
        self.tick: int | None = None
        self.level = 0
        self.born = born
        self.since_s = since_s
        self.reuses = 0

    def __repr__(self) -> str:
        return f"Stretch({self.branch}, {self.lo}..{self.hi}, refs={self.refs})"


class Cut(NamedTuple):
    """Blocks `lo..hi` of an inactive stretch, at one end of it, that may go next."""

    stretch: Stretch
    lo: int
    hi: int


class EvictionOrder(Protocol):
    """Ranks the inactive stretches of one tier. Told of every change, asked for the next to go."""

    name: ClassVar[str]

    def seams(self, stretch: Stretch) -> list[int]:
        """Blocks at which a stretch that becomes inactive must be cut first, ascending: its parts rank differently."""
        ...

    def add(self, stretch: Stretch) -> None:
        """A stretch became inactive; its last block was released first."""
        ...

    def remove(self, stretch: Stretch) -> None:
        """A stretch that was inactive is used again."""
        ...

    def split(self, head: Stretch, tail: Stretch) -> None:
        """An inactive stretch became two; both stay where they were."""
        ...

    def next(self, most: int) -> Cut | None:
        """Up to `most` blocks that go next; None when nothing may go."""
        ...

    def evicted(self, cut: Cut) -> None:
        """What `next` named has gone; the stretch has shrunk by it."""
        ...

    def arrived(self, branch: Branch, lo: int, hi: int) -> None:
        """A copy of these blocks is resident in the tier now."""
        ...

    def left(self, branch: Branch, lo: int, hi: int) -> None:
        """A copy of these blocks is resident no longer."""
        ...


class OrderBase:
    """What most orders have in common: no seams, no interest in who is resident."""

    name: ClassVar[str] = ""

    def seams(self, stretch: Stretch) -> list[int]:
        return []

    def arrived(self, branch: Branch, lo: int, hi: int) -> None:
        pass

    def left(self, branch: Branch, lo: int, hi: int) -> None:
        pass
