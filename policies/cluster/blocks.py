"""KV-block content without the tokens: branches, runs and paths.

Two prompts share their first blocks exactly when they share their first keys (the hash ids of a trace, or the
block hashes of a live engine). So content is a tree, and a request is a path through it. A `Branch` is a stretch of
blocks that some request brought in first; a `BlockPath` lists the branches a prompt runs through and how far; a
`BlockRun` is a stretch of one branch. Work on paths and runs costs per branch, never per block or per token.

A branch lives as long as something holds it (a request, a block pool, an index); then the tree forgets it, so memory
is bounded by what is held and not by the length of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self, uid: int, parent: Branch | None = None, start: int = 0, from_key: int = 0, keys: list[int] | None = None
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
    """

    __slots__ = ("_children", "_uid", "block_size", "key_tokens")

    def __init__(self, key_tokens: int, block_size: int) -> None:
        self.key_tokens = key_tokens
        self.block_size = block_size
        self._uid = 0
        self._children: dict[tuple[int, int, int], ref[Branch]] = {}

    def __len__(self) -> int:
        """Number of shareable branches that something still holds."""
        return len(self._children)

    def private(self, start: int = 0, parent: Branch | None = None) -> Branch:
        """A new branch that no other request can share."""
        self._uid += 1
        return Branch(self._uid, parent, start)

    def path(self, keys: Sequence[int], tokens: int) -> BlockPath:
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
                child = self._grow(slot, node, pos, list(keys[pos:used]))
                pos = used
            else:
                pos += _common(child.keys or [], keys, pos, used)
            end = pos * key_tokens // block_size
            if end > blocks:
                end = blocks
            if end > lo:
                pieces.append((child, end))
                lo = end
            node, node_uid = child, child.uid
        return BlockPath(tuple(pieces), blocks)

    def _grow(self, slot: tuple[int, int, int], parent: Branch | None, pos: int, keys: list[int]) -> Branch:
        self._uid += 1
        child = Branch(self._uid, parent, pos * self.key_tokens // self.block_size, pos, keys)
        children = self._children

        def forget(gone: ref[Branch]) -> None:
            if children.get(slot) is gone:
                del children[slot]

        children[slot] = ref(child, forget)
        return child


def _common(have: list[int], keys: Sequence[int], pos: int, used: int) -> int:
    """How many of `have` equal `keys[pos:used]`, from the front."""
    length = min(len(have), used - pos)
    if have[:length] == keys[pos : pos + length]:
        return length
    lo, hi = 0, length  # the first lo agree, the first hi do not
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if have[lo:mid] == keys[pos + lo : pos + mid]:
            lo = mid
        else:
            hi = mid
    return lo
