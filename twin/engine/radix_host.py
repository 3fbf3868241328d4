"""A host tier below a radix cache (SGLang's hierarchical cache): what leaves the tree, or enters it, is kept in host
memory, and a prompt that goes on there takes it up again.

Pages come up in the step that admits their request, which waits for them, over a lane that nothing else uses: the
loads of a step end within it. Which pages are computed is decided by the queue; this only says what is there.
"""

from __future__ import annotations

from policies.cluster.blocks import BlockRun
from twin.engine.batch import DecodeBatch
from twin.engine.host import HostTier
from twin.engine.pool import Hold, Match
from twin.engine.radix import RadixCache
from twin.engine.radix_telling import TellingLedger
from twin.engine.sequence import Sequence
from twin.engine.settings import HostTierSettings
from twin.engine.ticks import instant

LEAST_LOAD_TOKENS = 10
"""Shorter stretches are computed again rather than loaded (SGLang's default)."""


class HostedLedger(TellingLedger):
    """A ledger with a host tier below its tree. With the trigger "on_store" goes down what a `TellingLedger` tells of;
    with "on_evict" whatever is evicted.
    """

    __slots__ = ("_bytes_per_s", "_due_blocks", "_overlap", "_up", "host")

    def __init__(self, pool: RadixCache, batch: DecodeBatch, tier: HostTierSettings) -> None:
        self.host = HostTier.of(tier)
        super().__init__(pool, batch, tell=self._store if tier.trigger == "on_store" else None)
        self._overlap = tier.overlap
        self._bytes_per_s = tier.load_bytes_per_s
        self._up: list[list[Hold]] = []  # what is loaded for the planned step
        self._due_blocks = 0  # how many blocks that are
        if tier.trigger != "on_store":
            pool.on_evict = self.host.put

    def found(self, seq: Sequence, tokens: int) -> tuple[int, int]:
        cached = self.cached(seq, tokens)
        return cached, self._match(seq, tokens // self._size, cached)[1]

    def _match(self, seq: Sequence, limit: int, cached: int) -> tuple[Match, int]:
        """What of a sequence's first `limit` pages is in the host behind the `cached` ones, and how many pages."""
        match = self.host.match(self.pieces(seq, limit), limit, cached)
        below = match.blocks - cached if match.parts else 0
        return match, below if below * self._size >= LEAST_LOAD_TOKENS else 0

    def _take(self, seq: Sequence, pages: int, below: int) -> None:
        """What comes up is in the tree at once: whoever is in the same step waits for it as well."""
        cached = seq.published
        if below:
            self._up.append(self.host.pin(self._match(seq, cached + below, cached)[0]))
            self._due_blocks += below
            if seq.admit_s is None:
                seq.host_blocks = below
        super()._take(seq, pages, below)
        if below:
            self.publish(seq, cached + below, self.stamp())
            self.nothing_new(seq)

    def ends_s(self, start_s: float, took_s: float) -> float:
        """When a step ends that computes for `took_s` and needs what comes up in it.

        Layer by layer it lasts as long as the longer of both, but for one layer of the other, which is left out.
        """
        if not self._due_blocks:
            return instant(start_s + took_s)
        self.host.loaded_blocks += self._due_blocks
        up_s = instant(start_s + self._due_blocks * self.host.block_bytes / self._bytes_per_s)
        return max(up_s, instant(start_s + took_s)) if self._overlap else instant(up_s + took_s)

    def came_up(self) -> None:
        """The step is over: what it loaded is here, and was used in the host last."""
        for holds in self._up:
            self.host.unpin(holds)
        self._up.clear()
        self._due_blocks = 0

    def _store(self, runs: list[BlockRun]) -> None:
        for run in reversed(runs):  # the last page is the first to go again
            self.host.put(*run)

    def audit(self, planned: int = 0) -> None:
        super().audit(planned)
        self.host.audit()
