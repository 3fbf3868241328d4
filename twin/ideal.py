"""What an endless prefix cache for the whole cluster would have held of the prompts of a run, in order of arrival.

It only counts: no decision may depend on it. Memory grows with the distinct hash ids, up to a limit from which on there
is no figure; time with the stretches of content that a prompt runs through, not with its ids.
"""

from __future__ import annotations

from typing import Final

from policies.cluster.blocks import Branch, ContentTree

MAX_IDS: Final = 4_000_000
"""Distinct hash ids, about 40 bytes each."""


class IdealCache:
    """Takes in prompts; `key_tokens` is how many tokens a hash id stands for, `block_size` the tokens of a KV block."""

    __slots__ = ("_block_size", "_filled", "_full", "_hits", "_ids", "_max_ids", "_prompts", "_tree")

    def __init__(self, key_tokens: int, block_size: int, max_ids: int = MAX_IDS) -> None:
        self._block_size = block_size
        self._max_ids = max_ids
        self._tree = ContentTree(key_tokens, block_size)
        self._filled: dict[Branch, int] = {}  # up to which block some prompt has filled it; this keeps the tree alive
        self._hits = self._prompts = self._ids = 0
        self._full = False

    def add(self, keys: list[int] | None, isl: int) -> None:
        """A prompt arrives. Its last token is always computed, so a block that ends with it never counts as held."""
        self._prompts += isl // self._block_size
        if keys is None or self._full:
            return
        filled, held, matching = self._filled, 0, True
        for branch, end in self._tree.path(keys, isl).pieces:
            before = filled.get(branch)
            if before is None:
                filled[branch] = end
                matching = False
                self._ids += len(branch.keys or ())
            else:
                if matching:
                    held = before if before < end else end
                    matching = held == end
                if before < end:
                    filled[branch] = end
        self._hits += min(held, (isl - 1) // self._block_size)
        if self._ids > self._max_ids:
            self._full = True
            self._filled = {}

    @property
    def full(self) -> bool:
        """Whether there were more hash ids than are kept, so that there is no figure."""
        return self._full

    @property
    def blocks(self) -> dict[str, int]:
        """Full blocks of all prompts, and how many of them were held; empty when there is no figure."""
        return {} if self._full else {"prompt_blocks": self._prompts, "hit_blocks": self._hits}
