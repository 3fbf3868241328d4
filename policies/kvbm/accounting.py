"""What became of look-ups: one definition of a hit, whatever tiers there are.

Every full block of a prompt is looked up once, at the first admission of its request, and lands in exactly one class. A
request that was preempted and comes back recomputes or reuses, and neither is a hit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from policies.cluster.ids import Tier
from policies.errors import InvariantError
from policies.kvbm.look_up import Miss

WINDOW = 1000
"""Look-ups of blocks that the windowed rate is over."""


class Looked(NamedTuple):
    """The look-up of one prompt: blocks by tier, and misses by reason."""

    hits: Mapping[Tier, int]
    misses: Mapping[Miss, int]

    @property
    def blocks(self) -> int:
        return sum(self.hits.values()) + sum(self.misses.values())


class HitCount:
    """Sums over the requests of a run. Rates: blocks found / blocks looked up, and tokens found / prompt tokens."""

    __slots__ = ("_window", "_window_blocks", "_window_hits", "cached_tokens", "hits", "misses", "prompt_tokens",
                 "recomputed_tokens", "reused_tokens")  # fmt: skip

    def __init__(self) -> None:
        self.hits = dict.fromkeys(Tier, 0)
        self.misses = dict.fromkeys(Miss, 0)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.recomputed_tokens = 0  # after preemption
        self.reused_tokens = 0  # after preemption
        self._window: deque[tuple[int, int]] = deque()
        self._window_blocks = 0
        self._window_hits = 0

    @property
    def lookups(self) -> int:
        """Blocks looked up."""
        return sum(self.hits.values()) + sum(self.misses.values())

    def first_admission(self, isl_tokens: int, block_size: int, looked: Looked) -> None:
        """A request was admitted for the first time. Raises InvariantError unless each of its full blocks is in one
        class."""
        if looked.blocks != isl_tokens // block_size:
            raise InvariantError(
                f"a prompt of {isl_tokens} tokens has {isl_tokens // block_size} full blocks of {block_size}, and "
                f"{looked.blocks} were looked up: {looked}"
            )
        found = 0
        for tier, blocks in looked.hits.items():
            self.hits[tier] += blocks
            found += blocks
        for why, blocks in looked.misses.items():
            self.misses[why] += blocks
        self.prompt_tokens += isl_tokens
        self.cached_tokens += found * block_size
        self._slide(looked.blocks, found)

    def readmission(self, reused_tokens: int, recomputed_tokens: int) -> None:
        """A request that was preempted is back."""
        self.reused_tokens += reused_tokens
        self.recomputed_tokens += recomputed_tokens

    @property
    def block_rate(self) -> float | None:
        """Blocks found of those looked up; None when none were."""
        lookups = self.lookups
        return sum(self.hits.values()) / lookups if lookups else None

    @property
    def token_rate(self) -> float | None:
        """Tokens found of those in prompts; None when there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def recent_rate(self) -> float | None:
        """Blocks found of those that the last requests looked up, at least 1000 blocks where there were so many."""
        return self._window_hits / self._window_blocks if self._window_blocks else None

    def _slide(self, blocks: int, found: int) -> None:
        window = self._window
        window.append((blocks, found))
        self._window_blocks += blocks
        self._window_hits += found
        while self._window_blocks - window[0][0] >= WINDOW:
            old_blocks, old_found = window.popleft()
            self._window_blocks -= old_blocks
            self._window_hits -= old_found
