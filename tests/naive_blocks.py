"""A rank's blocks, naively: a dictionary of ids with their whole content, searched from end to end each time.

What the index of engines' block events is held against; it shares no code and no structure with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.cluster.ids import Tier
from policies.cluster.kv_events import KvCleared, KvEvent, KvRemoved, KvStored

Content = tuple[int, ...]


@dataclass
class Node:
    content: Content
    parent: int | None
    tiers: set[Tier]


@dataclass
class Waiting:
    parent: int
    key: int
    tiers: set[Tier]


@dataclass
class NaiveRank:
    """The rules one by one, block by block. `counts` are kept under the names of the index."""

    cascade: bool = False
    nodes: dict[int, Node] = field(default_factory=dict)
    ghosts: list[int] = field(default_factory=list)
    orphans: dict[int, Waiting] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, KvStored):
            self.store(event.tier, event.parent_ext, event.exts, event.local_hashes)
        elif isinstance(event, KvRemoved):
            self.remove(event.tier, event.exts)
        elif isinstance(event, KvCleared):
            self.clear(event.tier)

    def store(self, tier: Tier, parent: int | None, exts: Sequence[int], keys: Sequence[int]) -> None:
        for ext, key in zip(exts, keys, strict=True):
            self._store_one(tier, parent, ext, key)
            parent = ext
        self._limit()

    def remove(self, tier: Tier, exts: Sequence[int]) -> None:
        if self.cascade:
            exts = self._with_descendants(tier, exts)
        for ext in exts:
            self._remove_one(tier, ext)
        self._limit()

    def clear(self, tier: Tier | None) -> None:
        if tier is None:
            self.nodes.clear()
            self.ghosts.clear()
            self.orphans.clear()
            return
        for ext, waiting in list(self.orphans.items()):
            if tier in waiting.tiers:
                self._remove_one(tier, ext)
        held = [ext for ext, node in self.nodes.items() if tier in node.tiers]
        for ext in sorted(held, key=lambda e: (-len(self.nodes[e].content), e)):
            self._remove_one(tier, ext)
        self._limit()

    def overlap(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Blocks of the prompt by tier: each tier goes on where the one above it ends."""
        at, found = 0, []
        for tier in Tier:
            held = {node.content for node in self.nodes.values() if tier in node.tiers}
            first = at
            while at < len(prompt) and tuple(prompt[: at + 1]) in held:
                at += 1
            found.append(at - first)
        return tuple(found)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return len(self.nodes) - len(self.ghosts), len(self.ghosts), len(self.orphans)

    # ------------------------------------------------------------ the rules

    def _count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n

    def _store_one(self, tier: Tier, parent: int | None, ext: int, key: int) -> None:
        known = parent is None or parent in self.nodes
        base = self.nodes[parent].content if parent in self.nodes else ()
        node = self.nodes.get(ext)
        if node is not None:
            same = node.content == (*base, key) if known else node.content[-1] == key
            if same:
                self._hold(ext, tier)
                return
            self._count("ext_conflicts")
            self._forget(ext)
        if not known:
            assert parent is not None
            self._store_orphan(tier, parent, ext, key)
            return
        tiers = {tier}
        waiting = self.orphans.pop(ext, None)
        if waiting is not None and waiting.key == key:
            tiers |= waiting.tiers
            self._count("adopted")
        elif waiting is not None:
            self._count("ext_conflicts")
        self.nodes[ext] = Node((*base, key), parent if parent in self.nodes else None, tiers)
        self._adopt(ext)

    def _hold(self, ext: int, tier: Tier) -> None:
        node = self.nodes[ext]
        if tier in node.tiers:
            self._count("duplicate_stores")
        node.tiers.add(tier)
        if ext in self.ghosts:
            self.ghosts.remove(ext)

    def _store_orphan(self, tier: Tier, parent: int, ext: int, key: int) -> None:
        if self.cascade:
            self._count("unknown_parents")
            return
        waiting = self.orphans.get(ext)
        if waiting is not None and (waiting.parent, waiting.key) != (parent, key):
            self._count("ext_conflicts")
            del self.orphans[ext]
            waiting = None
        if waiting is None:
            waiting = self.orphans[ext] = Waiting(parent, key, set())
        self._count("duplicate_stores" if tier in waiting.tiers else "orphans")
        waiting.tiers.add(tier)

    def _adopt(self, parent: int) -> None:
        for ext in [ext for ext, waiting in self.orphans.items() if waiting.parent == parent]:
            waiting = self.orphans.pop(ext)
            self.nodes[ext] = Node((*self.nodes[parent].content, waiting.key), parent, waiting.tiers)
            self._count("adopted")
            self._adopt(ext)

    def _remove_one(self, tier: Tier, ext: int) -> None:
        node, waiting = self.nodes.get(ext), self.orphans.get(ext)
        if node is not None and tier in node.tiers:
            node.tiers.remove(tier)
            if not node.tiers:
                self.ghosts.append(ext)
                self._prune(ext)
        elif waiting is not None and tier in waiting.tiers:
            waiting.tiers.remove(tier)
            if not waiting.tiers:
                del self.orphans[ext]
        else:
            self._count("unknown_removals")

    def _children(self, ext: int) -> list[int]:
        return [child for child, node in self.nodes.items() if node.parent == ext]

    def _prune(self, ext: int | None) -> None:
        while ext is not None and ext in self.ghosts and not self._children(ext):
            self.ghosts.remove(ext)
            ext = self.nodes.pop(ext).parent

    def _forget(self, ext: int) -> None:
        for child in self._children(ext):
            self.nodes[child].parent = None
        parent = self.nodes.pop(ext).parent
        if ext in self.ghosts:
            self.ghosts.remove(ext)
        self._prune(parent)

    def _limit(self) -> None:
        while len(self.ghosts) > len(self.nodes) - len(self.ghosts):
            self._count("ghosts_dropped")
            self._forget(self.ghosts[0])

    def _with_descendants(self, tier: Tier, exts: Sequence[int]) -> list[int]:
        found: list[int] = []
        for ext in exts:
            held = ext in self.nodes and tier in self.nodes[ext].tiers
            line = [ext]
            for one in line:
                found += [one] if one not in found else []
                line += self._children(one) if held else []
        return found
