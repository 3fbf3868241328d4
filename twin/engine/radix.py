"""The radix cache of one SGLang engine: a compressed tree over pages, kept in stretches instead of single pages.

There is one physical page per content. Nodes are locked along the path of whoever uses them; what nobody locks can be
evicted, from the tail of the unlocked leaf that was touched longest ago. Everything costs per node, not per page. The
cache decides nothing: schedulers ask for room before they take it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from policies.cluster.blocks import BlockRun, Branch, merged_runs
from policies.errors import InvariantError

Pieces = tuple[tuple[Branch, int], ...]
Stamp = tuple[int, int, int]
"""When a node was last touched: decode steps made by then, 0 for a token of that step or 1 for anything behind it,
and the order within. What a decode step touches need not be written at once, since its stamp can be told later."""

OLDEST: Stamp = (-1, 0, 0)


class Node:
    """Pages `lo..hi` below `parent`; `runs` lists the branches that they run through, and how far.

    Children start at page `hi` and are told apart by their first branch.
    """

    __slots__ = ("children", "hi", "lo", "locks", "parent", "runs", "stamp")

    def __init__(self, lo: int, runs: list[tuple[Branch, int]], parent: Node | None, stamp: Stamp, locks: int) -> None:
        self.lo = lo
        self.hi = runs[-1][1] if runs else lo
        self.runs = runs
        self.parent = parent
        self.stamp = stamp
        self.locks = locks
        self.children: dict[Branch, Node] = {}

    def __repr__(self) -> str:
        return f"Node({self.lo}..{self.hi}, locks={self.locks}, children={len(self.children)})"


class Added(NamedTuple):
    """Where a request's pages end in the tree after they were published, and how many were there already."""

    node: Node
    known: int


class RadixCache:
    """`capacity` pages: free, owned by requests alone, or in the tree; `inactive` ones are in the tree and unlocked.

    With `events` on, `stored` and `removed` collect what became findable and what was lost since they were last
    taken; content that only one request can use is left out of both. `on_evict` and `on_publish` hear of every run of
    pages that leaves the tree, or is new in it (a tier below listens). `version` changes with what can be found.
    """

    __slots__ = (
        "_leaves",
        "_nodes",
        "_pushed",
        "capacity",
        "events",
        "evictions",
        "free",
        "inactive",
        "on_evict",
        "on_publish",
        "removed",
        "root",
        "stored",
        "version",
    )

    def __init__(self, capacity: int, *, events: bool = False) -> None:
        self.capacity = capacity
        self.free = capacity
        self.inactive = 0
        self.evictions = 0
        self.version = 0
        self.events = events
        self.stored: list[BlockRun] = []
        self.removed: list[BlockRun] = []
        self.on_evict: Callable[[Branch, int, int], None] | None = None
        self.on_publish: Callable[[Branch, int, int], None] | None = None
        self.root = Node(0, [], None, OLDEST, 1)
        self._nodes = 0
        self._leaves: list[tuple[Stamp, int, Node]] = []  # unlocked leaves by stamp, and entries out of date
        self._pushed = 0

    @property
    def active(self) -> int:
        """Pages that somebody uses now."""
        return self.capacity - self.free - self.inactive

    @property
    def room(self) -> int:
        """Pages that are free or can be evicted."""
        return self.free + self.inactive

    # ------------------------------------------------------------ look-up

    def peek(self, pieces: Pieces, limit: int) -> int:
        """How many leading pages of `pieces`, at most `limit`, are in the tree. Touches nothing."""
        node, pos = self.root, 0
        at = 0
        while pos < limit and at < len(pieces):
            child = node.children.get(pieces[at][0])
            if child is None:
                break
            pos, at = _common(child, pieces, at, pos, limit)
            if pos < child.hi:
                break
            node = child
        return pos

    def lacking(self, branch: Branch, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those pages of the spans of a branch that are not in the tree: all behind the first that is not."""
        above: list[tuple[Branch, int]] = []
        end, at = max((hi for _, hi in spans), default=0), branch
        limit = end
        while True:
            if end > at.start:
                above.append((at, end))
            if at.parent is None:
                break
            end, at = min(end, at.start), at.parent
        there = self.peek(tuple(reversed(above)), limit)
        return [(max(lo, there), hi) for lo, hi in spans if hi > there]

    def match(self, pieces: Pieces, limit: int, stamp: Stamp) -> tuple[Node, int]:
        """The node at which the cached prefix ends, and its pages; nodes passed whole are touched."""
        return self._walk(self.root, pieces, 0, 0, limit, stamp)

    def _walk(self, node: Node, pieces: Pieces, at: int, pos: int, limit: int, stamp: Stamp) -> tuple[Node, int]:
        while pos < limit and at < len(pieces):
            child = node.children.get(pieces[at][0])
            if child is None:
                break
            pos, at = _common(child, pieces, at, pos, limit)
            if pos < child.hi:
                return self._split(child, pos), pos
            if stamp > child.stamp:
                child.stamp = stamp
            node = child
        return node, pos

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two at page `at`; the new front keeps the old stamp, `node` itself is the rest."""
        front_runs: list[tuple[Branch, int]] = []
        rest: list[tuple[Branch, int]] = []
        for branch, end in node.runs:
            if end <= at:
                front_runs.append((branch, end))
                continue
            if not rest and (front_runs[-1][1] if front_runs else node.lo) < at:
                front_runs.append((branch, at))
            rest.append((branch, end))
        parent = node.parent
        assert parent is not None
        front = Node(node.lo, front_runs, parent, node.stamp, node.locks)
        parent.children[front_runs[0][0]] = front
        front.children[rest[0][0]] = node
        node.lo, node.runs, node.parent = at, rest, front
        self._nodes += 1
        return front

    # ------------------------------------------------------------ locks

    def lock(self, node: Node) -> None:
        """Somebody uses everything from the root to the end of `node`."""
        at: Node | None = node
        while at is not None:
            if not at.locks:
                self.inactive -= at.hi - at.lo
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            if not at.locks:
                self.inactive += at.hi - at.lo
                if not at.children:
                    self._expose(at)
            at = at.parent

    # ------------------------------------------------------------ taking and giving back

    def take(self, pages: int) -> bool:
        """Take `pages`, evicting what free ones do not cover; False, and nothing happens, where that is too few."""
        free = self.free
        if pages <= free:
            self.free = free - pages
            return True
        if pages > free + self.inactive:
            return False
        self.free = 0
        self._evict(pages - free)
        return True

    def publish(self, node: Node, pieces: Pieces, lo: int, hi: int, stamp: Stamp) -> Added:
        """Pages `lo..hi` of a request that has `node` locked, which ends at `lo`, go into the tree; its lock moves on.

        Those that are there already count as `known`: the request's own ones are no longer needed.
        """
        above: Node | None = node
        while above is not None:
            if above.stamp < stamp:
                above.stamp = stamp
            above = above.parent
        at = 0
        while pieces[at][1] <= lo:
            at += 1
        end, pos = self._walk(node, pieces, at, lo, hi, stamp)
        if pos < hi:
            runs, shared = _cut(pieces, pos, hi)
            if end is node and node.locks == 1 and not node.children and node is not self.root:
                if node.runs[-1][0] is runs[0][0]:
                    node.runs.pop()
                node.runs += runs
                node.hi = hi
            else:
                child = Node(pos, runs, end, stamp, 0)
                end.children[runs[0][0]] = child
                self._nodes += 1
                self.inactive += hi - pos  # until it is locked, below
                end = child
            if shared:
                self.version += 1
                if self.events:
                    self._note(self.stored, runs, pos)
            if self.on_publish is not None:
                for run in _as_runs(runs, pos):
                    self.on_publish(*run)
        if end is not node:
            self._move_lock(node, end)
        return Added(end, pos - lo)

    def _move_lock(self, start: Node, end: Node) -> None:
        """A lock on `start` becomes one on `end`, which is below."""
        at: Node | None = end
        while at is not None and at is not start:
            if not at.locks:
                self.inactive -= at.hi - at.lo
            at.locks += 1
            at = at.parent

    # ------------------------------------------------------------ eviction

    def _expose(self, node: Node) -> None:
        """An unlocked leaf can be evicted from now on."""
        if node is self.root:
            return
        self._pushed += 1
        heappush(self._leaves, (node.stamp, self._pushed, node))
        if len(self._leaves) > 2 * self._nodes + 64:
            seen: dict[Node, tuple[Stamp, int, Node]] = {e[2]: e for e in self._leaves if self._current(e)}
            self._leaves = list(seen.values())
            heapify(self._leaves)

    @staticmethod
    def _current(entry: tuple[Stamp, int, Node]) -> bool:
        stamp, _, node = entry
        return not node.locks and not node.children and node.stamp == stamp and node.hi > node.lo

    def _evict(self, pages: int) -> None:
        self.inactive -= pages
        self.evictions += pages
        self.version += 1
        leaves = self._leaves
        while pages:
            if not leaves:
                raise InvariantError("radix cache: nothing left to evict although pages are counted as evictable")
            if not self._current(leaves[0]):
                heappop(leaves)
                continue
            leaf = leaves[0][2]
            gone = min(leaf.hi - leaf.lo, pages)
            pages -= gone
            first = leaf.runs[0][0]
            leaf.hi -= gone
            kept, lost = _cut_tail(leaf.runs, leaf.lo, leaf.hi)
            if self.events:
                self._note(self.removed, lost, leaf.hi)
            if self.on_evict is not None:
                for run in reversed(_as_runs(lost, leaf.hi)):
                    self.on_evict(*run)
            leaf.runs = kept
            if not kept:
                heappop(leaves)
                self._nodes -= 1
                parent = leaf.parent
                assert parent is not None
                del parent.children[first]
                if not parent.locks and not parent.children:
                    self._expose(parent)
                    leaves = self._leaves

    @staticmethod
    def _note(notes: list[BlockRun], runs: list[tuple[Branch, int]], lo: int) -> None:
        notes.extend(run for run in _as_runs(runs, lo) if run.branch.keys is not None)

    def unsay(self, run: BlockRun) -> None:
        """A run of pages has just been evicted: of those that came since anybody took notice, nobody hears that they
        came, or went."""
        fresh = [BlockRun(run.branch, max(new.lo, run.lo), min(new.hi, run.hi)) for new in self.stored
                 if new.branch is run.branch and new.lo < run.hi and run.lo < new.hi]  # fmt: skip
        for part in fresh:
            self.stored = [left for new in self.stored for left in _without(new, part)]
            gone = [n for n, old in enumerate(self.removed) if old.branch is run.branch and old.lo <= part.lo < old.hi]
            at = gone[-1]
            self.removed[at : at + 1] = _without(self.removed[at], part)

    def findable(self) -> list[BlockRun]:
        """What can be found and others can share, parents before children, each page once. Touches nothing."""
        found: list[BlockRun] = []
        todo = [self.root]
        while todo:
            node = todo.pop()
            self._note(found, node.runs, node.lo)
            todo += node.children.values()
        return merged_runs(found)

    # ------------------------------------------------------------ for reports and tests

    @property
    def private(self) -> int:
        """Pages that are taken and not in the tree. Costs per node."""
        in_use, todo = 0, [self.root]
        while todo:
            for child in todo.pop().children.values():
                in_use += child.hi - child.lo if child.locks else 0
                todo.append(child)
        return self.active - in_use

    def clear(self) -> None:
        """Forget every page that nobody uses."""
        if self.inactive:
            self.free += self.inactive
            self._evict(self.inactive)

    def audit(self) -> None:
        """Recount everything; raises InvariantError where a count is off. Costs per node."""
        unlocked = pages = nodes = 0
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            nodes += 1
            todo.extend(node.children.values())
            size = node.hi - node.lo
            pages += size
            unlocked += 0 if node.locks else size
            parent = node.parent
            assert parent is not None
            if size <= 0 or node.lo != parent.hi or node.runs[-1][1] != node.hi:
                raise InvariantError(f"radix cache: {node!r} does not follow {parent!r}")
            if node.locks < sum(child.locks for child in node.children.values()):
                raise InvariantError(f"radix cache: {node!r} has fewer locks than its children")
        if unlocked != self.inactive or nodes != self._nodes:
            raise InvariantError(
                f"radix cache: {self.inactive} evictable pages in {self._nodes} nodes counted, "
                f"{unlocked} in {nodes} found"
            )
        if not 0 <= self.free <= self.capacity or pages - unlocked > self.active or self.active < 0:
            raise InvariantError(f"radix cache: free {self.free}, in the tree {pages}, evictable {unlocked}")


def _common(node: Node, pieces: Pieces, at: int, pos: int, limit: int) -> tuple[int, int]:
    """How far `pieces` (from piece `at`, page `pos` = the node's first) and a node agree: page, piece."""
    for branch, end in node.runs:
        if at == len(pieces) or pieces[at][0] is not branch:
            break
        theirs = pieces[at][1]
        pos = end if end < theirs else theirs
        if pos >= limit:
            return limit, at
        if theirs == pos:
            at += 1
        if pos < end:
            break
    return pos, at


def _cut(pieces: Pieces, lo: int, hi: int) -> tuple[list[tuple[Branch, int]], bool]:
    """The runs of pages `lo..hi`, and whether anybody else can use some of them."""
    runs: list[tuple[Branch, int]] = []
    shared = False
    for branch, end in pieces:
        if end > lo:
            shared = shared or branch.keys is not None
            runs.append((branch, end if end < hi else hi))
            if end >= hi:
                break
    return runs, shared


def _as_runs(runs: list[tuple[Branch, int]], lo: int) -> list[BlockRun]:
    """Runs that start at page `lo`, each with its own start."""
    spelt = []
    for branch, end in runs:
        spelt.append(BlockRun(branch, lo, end))
        lo = end
    return spelt


def _without(run: BlockRun, other: BlockRun) -> list[BlockRun]:
    """The parts of a run that are not in another one."""
    branch, lo, hi = run
    if other.branch is not branch or other.hi <= lo or hi <= other.lo:
        return [run]
    return [BlockRun(branch, a, b) for a, b in ((lo, other.lo), (other.hi, hi)) if a < b]


def _cut_tail(
    runs: list[tuple[Branch, int]], lo: int, hi: int
) -> tuple[list[tuple[Branch, int]], list[tuple[Branch, int]]]:
    """The runs of a node that starts at `lo`, before and behind page `hi`."""
    kept: list[tuple[Branch, int]] = []
    lost: list[tuple[Branch, int]] = []
    for branch, end in runs:
        if lo < hi:
            kept.append((branch, end if end < hi else hi))
        if end > hi:
            lost.append((branch, end))
        lo = end
    return kept, lost
