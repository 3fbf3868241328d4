"""How simulated engines name their KV blocks: by an id of their own, and by the local hash that routers compute too.

Both follow from the content that the trace names (hash ids), so that equal prompts have equal names on every worker and
no others do. Ids are chained and mean nothing to anybody else. Names are made once per branch of the content tree and
forgotten with it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple
from weakref import WeakKeyDictionary

import xxhash

from policies.cluster.blocks import BlockPath, Branch
from policies.cluster.hashing import trace_hashes
from policies.cluster.ids import BlockHash

_ID_SEED = 0x6B76
"""Ids are no chain hashes: nobody must be able to take them for these."""

_hash = xxhash.xxh3_64_intdigest
_pair = struct.Struct("<2Q").pack


class Names(NamedTuple):
    """Of the blocks of one branch, from its first on."""

    local_hashes: tuple[BlockHash, ...]
    exts: tuple[BlockHash, ...]


class BlockNames:
    """Names for the blocks of one content tree: `key_tokens` tokens a hash id, `block_size` a block."""

    def __init__(self, key_tokens: int, block_size: int) -> None:
        self._key_tokens = key_tokens
        self._block_size = block_size
        self._names: WeakKeyDictionary[Branch, Names] = WeakKeyDictionary()

    def of(self, branch: Branch, lo: int, hi: int) -> Names:
        """The names of blocks `lo` to `hi` of a branch that others can share."""
        names, start = self._all(branch), branch.start
        return Names(names.local_hashes[lo - start : hi - start], names.exts[lo - start : hi - start])

    def before(self, branch: Branch, lo: int) -> BlockHash | None:
        """The id of the block before block `lo` of a branch; None at the start of prompts."""
        if lo == 0:
            return None
        above: Branch | None = branch
        while above is not None and above.start >= lo:
            above = above.parent
        assert above is not None
        return self.of(above, lo - 1, lo).exts[0]

    def hashes_to(self, branch: Branch, end: int) -> tuple[BlockHash, ...]:
        """The local hashes of all blocks from the start of the prompt to block `end` of a branch."""
        parts = []
        above: Branch | None = branch
        while above is not None:
            if above.start < end:
                parts.append(self.of(above, above.start, end).local_hashes)
                end = above.start
            above = above.parent
        return tuple(name for part in reversed(parts) for name in part)

    def prompt(self, path: BlockPath) -> tuple[BlockHash, ...]:
        """The local hashes of a prompt. Blocks that nobody else can have are named after their branch."""
        found: list[BlockHash] = []
        lo = 0
        for branch, end in path.pieces:
            if branch.shareable:
                found += self.of(branch, lo, end).local_hashes
            else:
                found += (BlockHash(_hash(_pair(branch.hash, block), _ID_SEED)) for block in range(lo, end))
            lo = end
        return tuple(found)

    def _all(self, branch: Branch) -> Names:
        names = self._names.get(branch)
        if names is not None:
            return names
        line: list[Branch] = []
        above: Branch | None = branch
        while above is not None and above not in self._names:  # a loop: sessions can be thousands of turns deep
            line.append(above)
            above = above.parent
        for new in reversed(line):
            names = self._names[new] = self._make(new)
        assert names is not None
        return names

    def _make(self, branch: Branch) -> Names:
        assert branch.keys is not None
        start, size = branch.start, self._block_size
        end = (branch.from_key + len(branch.keys)) * self._key_tokens // size
        first_key = start * size // self._key_tokens
        keys = [*self._keys_above(branch, first_key), *branch.keys]
        local = trace_hashes(keys, first_key, self._key_tokens, size, start, end)
        exts = []
        last = self.before(branch, start) or 0
        for name in local:
            last = _hash(_pair(last, name), _ID_SEED)
            exts.append(BlockHash(last))
        return Names(tuple(map(BlockHash, local)), tuple(exts))

    @staticmethod
    def _keys_above(branch: Branch, first_key: int) -> list[int]:
        """The hash ids from the `first_key`-th of the prompt to where a branch begins: the start of its first block."""
        parts: list[list[int]] = []
        upto, above = branch.from_key, branch.parent
        while upto > first_key:
            assert above is not None
            assert above.keys is not None
            lo = max(first_key, above.from_key)
            parts.append(list(above.keys[lo - above.from_key : upto - above.from_key]))
            upto, above = lo, above.parent
        return [key for part in reversed(parts) for key in part]
