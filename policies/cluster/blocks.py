"""KV-block content without the tokens: branches, runs and paths.

Two prompts share their first blocks exactly when they share their first keys (the hash ids of a trace, or the
block hashes of a live engine). So content is a tree, and a request is a path through it. A `Branch` is a stretch of
blocks that some request brought in first; a `BlockPath` lists the branches a prompt runs through and how far; a
`BlockRun` is a stretch of one branch. Work on paths and runs costs per branch, never per block or per token.

A branch lives as long as something holds it (a request, a block pool, an index); then the tree forgets it, so memory
is bounded by what is held and not by the length of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import NamedTuple
from weakref import ref

import xxhash

from policies.cluster.ids import BlockHash

_SEED = 1337


class Branch:
    """A chain of blocks that starts at block `start`, below `parent`.

    `uid` is unique within a run. `keys` is empty for content that nobody else can share (generated tokens, rows
    without hash ids).
    """

    __slots__ = ("__weakref__", "_hash", "from_key", "keys", "parent", "start", "uid")

    def __init__(
        self,
        uid: int,
        parent: Branch | None = None,
        start: int = 0,
        from_key: int = 0,
        keys: MutableSequence[int] | None = None,
    ) -> None:
        self.uid = uid
        self.parent = parent
        self.start = start
        self.from_key = from_key
        self.keys = keys
        self._hash: BlockHash | None = None

    @property
    def shareable(self) -> bool:
        """Whether another request can ever ask for these blocks."""
        return self.keys is not None

    @property
    def hash(self) -> BlockHash:
        """A 64-bit name from the content where there is one: chained over the parent and the first key."""
        line: list[Branch] = []
        above: Branch | None = self
        while above is not None and above._hash is None:  # a loop: sessions can be thousands of turns deep
            line.append(above)
            above = above.parent
        name = BlockHash(0) if above is None or above._hash is None else above._hash
        for branch in reversed(line):
            first = branch.keys[0] if branch.keys else branch.uid
            chain = f"{name}|{branch.from_key}|{first}|{int(branch.shareable)}"
            name = branch._hash = BlockHash(xxhash.xxh3_64_intdigest(chain.encode(), _SEED))
        return name

    def __repr__(self) -> str:
        return f"Branch({self.uid}, start={self.start})"


class BlockRun(NamedTuple):
    """Blocks `lo` (inclusive) to `hi` (exclusive) of a branch, counted from the start of the prompt."""

    branch: Branch
    lo: int
    hi: int


def merged_runs(runs: Iterable[BlockRun]) -> list[BlockRun]:
    """The same blocks, each once: runs that overlap or touch become one, parents come before their children."""
    merged: dict[Branch, list[BlockRun]] = {}
    for run in sorted(runs, key=lambda run: (run.branch.start, run.branch.uid, run.lo)):
        mine = merged.setdefault(run.branch, [])
        if mine and run.lo <= mine[-1].hi:
            mine[-1] = mine[-1]._replace(hi=max(mine[-1].hi, run.hi))
        else:
            mine.append(run)
    return [run for mine in merged.values() for run in mine]


class BlockPath(NamedTuple):
    """The complete blocks of one prompt: pieces (branch, end), each starting where the one before it ends."""

    pieces: tuple[tuple[Branch, int], ...]
    blocks: int

    def runs(self) -> tuple[BlockRun, ...]:
        """The pieces as runs, from block 0 to `blocks`."""
        runs = []
        lo = 0
        for branch, end in self.pieces:
            runs.append(BlockRun(branch, lo, end))
            lo = end
        return tuple(runs)


NO_BLOCKS = BlockPath((), 0)


class ContentTree:
    """Interns key sequences as paths. One tree per (tokens per key, block size).

    `key_tokens` is how many tokens one key stands for, `block_size` how many tokens a KV block holds; neither need
    divide the other. Two paths share exactly `min(shared keys * key_tokens, both lengths) // block_size` blocks.

    Keys come as lists, or as arrays of 64-bit hashes (8 bytes a key, compared at the speed of memory); one tree takes
    one of the two. `most_keys` bounds a branch: then nobody keeps more than that many keys alive beyond what he holds.
    """

    __slots__ = ("_children", "_most_keys", "_uid", "block_size", "key_tokens")

    def __init__(self, key_tokens: int, block_size: int, most_keys: int | None = None) -> None:
        self.key_tokens = key_tokens
        self.block_size = block_size
        self._most_keys = most_keys
        self._uid = 0
        self._children: dict[tuple[int, int, int], ref[Branch]] = {}

    def __len__(self) -> int:
        """Number of shareable branches that something still holds."""
        return len(self._children)

    def private(self, start: int = 0, parent: Branch | None = None) -> Branch:
        """A new branch that no other request can share."""
        self._uid += 1
        return Branch(self._uid, parent, start)

    def path(self, keys: MutableSequence[int], tokens: int) -> BlockPath:
        """The path of a prompt of `tokens` tokens; keys beyond those needed are ignored.

        `len(keys) * key_tokens` must reach `tokens`: the trace reader checks that.
        """
        key_tokens, block_size = self.key_tokens, self.block_size
        blocks = tokens // block_size
        used = -(-tokens // key_tokens)
        children = self._children
        pieces: list[tuple[Branch, int]] = []
        node: Branch | None = None
        node_uid = pos = lo = 0
        while pos < used:
            slot = (node_uid, pos, keys[pos])
            held = children.get(slot)
            child = held() if held is not None else None
            if child is None:
                child = self._grow(slot, node, pos, self._cut(keys, pos, used))
                pos += len(child.keys or ())
            else:
                pos += _common(child.keys or [], 0, keys, pos, used)
            end = pos * key_tokens // block_size
            if end > blocks:
                end = blocks
            if end > lo:
                pieces.append((child, end))
                lo = end
            node, node_uid = child, child.uid
        return BlockPath(tuple(pieces), blocks)

    def below(self, branch: Branch | None, end: int, keys: MutableSequence[int]) -> list[BlockRun]:
        """The runs of the blocks that stand behind block `end` - 1 of `branch` (None: at the start), one key a block.

        For trees whose keys are blocks. A branch that ends there grows while it may, so that what is learned piece by
        piece lies in as few branches as what is learned at once.
        """
        used = len(keys)
        runs: list[BlockRun] = []
        pos = 0
        if branch is not None:
            pos = self._along(branch, end - branch.start, keys, 0, runs)
        while pos < used:
            at = end + pos
            slot = (branch.uid if branch is not None else 0, at, keys[pos])
            held = self._children.get(slot)
            child = held() if held is not None else None
            if child is None:
                child = self._grow(slot, branch, at, self._cut(keys, pos, used))
            pos = self._along(child, 0, keys, pos, runs)
            branch = child
        return runs

    def goes_on(self, branch: Branch, end: int, key: int) -> bool:
        """Whether block `end`, with this key, lies in `branch` as the one before it does: it does already, or the
        branch ends there and has just grown by it. As `below` would have it, for one block.
        """
        have = branch.keys
        if have is None:
            return False
        offset = end - branch.start
        if offset < len(have):
            return have[offset] == key
        if (self._most_keys is not None and offset >= self._most_keys) or (branch.uid, end, key) in self._children:
            return False
        have.append(key)
        return True

    def _along(self, branch: Branch, offset: int, keys: MutableSequence[int], pos: int, runs: list[BlockRun]) -> int:
        """Follow a branch from one of its keys on, and let it grow at its end; where in `keys` that leads."""
        have = branch.keys
        if have is None:
            return pos
        used, first = len(keys), pos
        pos += _common(have, offset, keys, pos, used)
        at_end = offset + pos - first == len(have)
        if at_end and pos < used and (branch.uid, branch.start + len(have), keys[pos]) not in self._children:
            room = used - pos if self._most_keys is None else min(used - pos, self._most_keys - len(have))
            have.extend(keys[pos : pos + room])
            pos += room
        if pos > first:
            lo = branch.start + offset
            runs.append(BlockRun(branch, lo, lo + pos - first))
        return pos

    def _cut(self, keys: MutableSequence[int], pos: int, used: int) -> MutableSequence[int]:
        """As many keys as a new branch may have."""
        return keys[pos : used if self._most_keys is None else min(used, pos + self._most_keys)]

    def _grow(self, slot: tuple[int, int, int], parent: Branch | None, pos: int, keys: MutableSequence[int]) -> Branch:
        self._uid += 1
        child = Branch(self._uid, parent, pos * self.key_tokens // self.block_size, pos, keys)
        children = self._children

        def forget(gone: ref[Branch]) -> None:
            if children.get(slot) is gone:
                del children[slot]

        children[slot] = ref(child, forget)
        return child


def _common(have: MutableSequence[int], offset: int, keys: MutableSequence[int], pos: int, used: int) -> int:
    """How many of `have[offset:]` equal `keys[pos:used]`, from the front."""
    length = min(len(have) - offset, used - pos)
    if have[offset : offset + length] == keys[pos : pos + length]:
        return length
    lo, hi = 0, length  # the first lo agree, the first hi do not
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if have[offset + lo : offset + mid] == keys[pos + lo : pos + mid]:
            lo = mid
        else:
            hi = mid
    return lo
