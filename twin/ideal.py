"""What an endless prefix cache for the whole cluster would have held of the prompts of a run, in order of arrival.

It only counts: no decision may depend on it. Memory grows with the distinct hash ids, up to a limit from which on there
is no figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from traces.prefixes import PrefixTree

MAX_IDS: Final = 2_000_000
"""Distinct hash ids, about 150 bytes each."""


class IdealCache:
    """Takes in prompts; `key_tokens` is how many tokens a hash id stands for, `block_size` the tokens of a KV block."""

    __slots__ = ("_block_size", "_full", "_hits", "_max_ids", "_prompts", "_tree")

    def __init__(self, key_tokens: int, block_size: int, max_ids: int = MAX_IDS) -> None:
        self._block_size = block_size
        self._max_ids = max_ids
        self._tree: PrefixTree | None = PrefixTree(key_tokens)
        self._hits = self._prompts = 0
        self._full = False

    def add(self, keys: Sequence[int] | None, isl: int) -> None:
        """A prompt arrives. Its last token is always computed, so its last block never counts as held."""
        self._prompts += isl // self._block_size
        tree = self._tree
        if tree is None or keys is None:
            return
        self._hits += min(tree.add(keys, isl), isl - 1) // self._block_size
        if len(tree) > self._max_ids:
            self._tree, self._full = None, True

    @property
    def full(self) -> bool:
        """Whether there were more hash ids than are kept, so that there is no figure."""
        return self._full

    @property
    def blocks(self) -> dict[str, int]:
        """Full blocks of all prompts, and how many of them were held; empty when there is no figure."""
        return {} if self._full else {"prompt_blocks": self._prompts, "hit_blocks": self._hits}
