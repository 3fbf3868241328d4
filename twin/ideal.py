"""What an endless prefix cache for the whole cluster would have held of the prompts of a run, in order of arrival.

It only counts: no decision may depend on it. Prompts are kept as they come and counted many at a time, in columns.
Memory grows with the distinct hash ids, up to a limit from which on there is no figure.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_IDS: Final = 4_000_000
"""Distinct hash ids (counted once per prefix that they end), 16 bytes each."""

_BATCH_IDS: Final = 1 << 18
"""Hash ids that wait to be counted together."""

_MASK: Final = (1 << 64) - 1
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)  # what separates the places of a prompt
_MIX: Final = (  # SplitMix64's finalizer: shift, then multiply
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST: Final = np.uint64(31)

Names = npt.NDArray[np.uint64]
"""Names of prefixes: the sum of a 64-bit hash of each of their ids in its place. That any two of those that are kept
have the same name has a chance of less than one in a million."""

Tokens = npt.NDArray[np.int64]


class IdealCache:
    """Takes in prompts; `key_tokens` is how many tokens a hash id stands for, `block_size` the tokens of a KV block."""

    __slots__ = (
        "_block_size",
        "_full",
        "_hits",
        "_isl",
        "_key_tokens",
        "_keys",
        "_max_ids",
        "_names",
        "_prompts",
        "_reach",
        "_waiting",
    )

    def __init__(self, key_tokens: int, block_size: int, max_ids: int = MAX_IDS) -> None:
        self._key_tokens = key_tokens
        self._block_size = block_size
        self._max_ids = max_ids
        self._keys: list[list[int]] = []  # of the prompts that wait
        self._isl: list[int] = []
        self._waiting = 0
        self._names: Names = np.empty(0, np.uint64)  # of all prefixes that have come, ascending
        self._reach: Tokens = np.empty(0, np.int64)  # the tokens of each that some prompt had
        self._hits = self._prompts = 0
        self._full = False

    def add(self, keys: list[int] | None, isl: int) -> None:
        """A prompt arrives. Its last token is always computed, so a block that ends with it never counts as held."""
        self._prompts += isl // self._block_size
        if keys is None or not isl or self._full:
            return
        self._keys.append(keys)
        self._isl.append(isl)
        self._waiting += len(keys)
        if self._waiting >= _BATCH_IDS:
            self._count()

    @property
    def full(self) -> bool:
        """Whether there were more hash ids than are kept, so that there is no figure."""
        self._count()
        return self._full

    @property
    def blocks(self) -> dict[str, int]:
        """Full blocks of all prompts, and how many of them were held; empty when there is no figure."""
        return {} if self.full else {"prompt_blocks": self._prompts, "hit_blocks": self._hits}

    # ------------------------------------------------------------ in columns

    def _count(self) -> None:
        """Count the prompts that wait, in their order."""
        if not self._keys:
            return
        isl = np.array(self._isl, np.int64)
        names, tokens, starts = self._prefixes(self._keys, isl)
        self._keys, self._isl, self._waiting = [], [], 0
        held = np.maximum.reduceat(self._take_in(names, tokens), starts)
        self._hits += int(np.minimum(held // self._block_size, (isl - 1) // self._block_size).sum())
        if self._names.size > self._max_ids:
            self._full = True
            self._names, self._reach = self._names[:0], self._reach[:0]

    def _prefixes(self, keys: list[list[int]], isl: Tokens) -> tuple[Names, Tokens, Tokens]:
        """The prefixes of all prompts, in order: their names, their tokens, and where those of each prompt begin."""
        key_tokens = self._key_tokens
        used = -(-isl // key_tokens)
        starts = np.cumsum(used) - used
        ids = _column(keys, used.tolist())
        place = np.arange(ids.size) - np.repeat(starts, used)
        hashes = _mixed(ids + place.astype(np.uint64) * _STEP)
        sums = np.cumsum(hashes)
        names = sums - np.repeat((sums - hashes)[starts], used)
        return names, np.minimum((place + 1) * key_tokens, np.repeat(isl, used)), starts

    def _take_in(self, names: Names, tokens: Tokens) -> Tokens:
        """Hold these prefixes, with so many tokens each; returns how many of each were held when it came."""
        order = np.argsort(names)
        names = names[order]
        is_first = np.concatenate(([True], names[1:] != names[:-1]))
        first, which = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        behind = which * names.size
        order = np.sort(order + behind) - behind  # equal ones as they came; faster than a stable sort
        tokens = tokens[order]
        at, known = self._find(names[first])
        before = np.zeros(first.size, np.int64)
        before[known] = self._reach[at[known]]
        apart = which * (int(tokens.max()) + 1)  # so that one pass finds the farthest so far of each prefix
        farthest = np.maximum(np.maximum.accumulate(tokens + apart) - apart, before[which])
        held: Tokens = np.empty_like(farthest)
        held[order] = np.where(is_first, before[which], np.roll(farthest, 1))
        reach = farthest[np.append(first[1:], names.size) - 1]
        self._reach[at[known]] = reach[known]
        new = ~known
        self._reach = np.insert(self._reach, at[new], reach[new])
        self._names = np.insert(self._names, at[new], names[first][new])
        return held

    def _find(self, names: Names) -> tuple[Tokens, npt.NDArray[np.bool_]]:
        """Where in the table names are, or would be, and whether they are there."""
        at: Tokens = np.searchsorted(self._names, names)
        known = np.zeros(names.size, np.bool_)
        inside = at < self._names.size
        known[inside] = self._names[at[inside]] == names[inside]
        return at, known


def _column(lines: list[list[int]], counts: list[int]) -> Names:
    """The first so many ids of each line, modulo 2**64."""
    if list(map(len, lines)) != counts:
        lines = [line[:count] for line, count in zip(lines, counts, strict=True)]
    try:
        return np.fromiter(chain.from_iterable(lines), np.uint64, sum(counts))
    except OverflowError:  # negative ones
        return np.fromiter((key & _MASK for key in chain.from_iterable(lines)), np.uint64, sum(counts))


def _mixed(ids: Names) -> Names:
    """A hash of each, by SplitMix64's finalizer."""
    for shift, factor in _MIX:
        ids = (ids ^ (ids >> shift)) * factor
    mixed: Names = ids ^ (ids >> _LAST)
    return mixed
