"""Who holds which blocks: the moves of a sequence's blocks that every scheduler shares.

It looks up cached prefixes, extends sequences, publishes what is complete and gives everything back. It decides
nothing: schedulers ask whether something fits before they let it happen.
"""

from __future__ import annotations

from policies.cluster.blocks import Branch
from twin.engine.drafts import Drafts
from twin.engine.pool import NO_MATCH, BlockPool, Match
from twin.engine.sequence import Sequence
from twin.perf.protocol import PrefillChunk


class Ledger:
    """The pool as sequences see it: counts in tokens, content by path."""

    __slots__ = ("block_size", "caching", "drafts", "pool")

    def __init__(self, pool: BlockPool, block_size: int, *, caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.caching = caching
        self.drafts: Drafts | None = None  # tokens that a step may make beyond the ones computed

    def prefix(self, seq: Sequence) -> Match:
        """The cached prefix of a sequence's known tokens; the last token is always computed. Touches nothing."""
        limit = (seq.prompt + seq.outputs - 1) // self.block_size
        if not self.caching or limit <= 0:
            return NO_MATCH
        return self.pool.match(seq.pieces(self.block_size), limit)

    def usable(self, seq: Sequence) -> int:
        """Complete blocks of the known tokens that need not be computed, wherever they lie."""
        return (seq.prompt + seq.outputs - 1) // self.block_size

    def fits(self, seq: Sequence, match: Match) -> bool:
        """Whether all known tokens fit now; hits that nobody holds count as needed, since they become active."""
        pool = self.pool
        length = seq.prompt + seq.outputs
        if self.drafts is not None:
            length += self.drafts.ahead(seq, length)
        needed = -(-length // self.block_size) - match.blocks + match.inactive
        return needed <= pool.free + pool.inactive

    def start(self, seq: Sequence, match: Match) -> int:
        """Give a sequence its cached prefix as first blocks; returns the tokens in it."""
        if match.blocks:
            seq.holds = self.pool.pin(match)
        seq.owned = seq.published = match.blocks
        seq.computed = tokens = match.blocks * self.block_size
        return tokens

    def reserve(self, seq: Sequence) -> bool:
        """Take room for a whole prompt (and the outputs expected with it) that will come from elsewhere: cached blocks
        are reused, the rest is fresh.

        Every complete prompt block may be reused, the last one too: the prompt's last token is computed elsewhere.
        """
        pool = self.pool
        match = NO_MATCH
        if self.caching and seq.path.blocks:
            match = pool.match(seq.path.pieces, seq.path.blocks)
        blocks = -(-(seq.prompt + seq.expected) // self.block_size)
        if blocks - match.blocks > pool.free + pool.inactive - match.inactive:
            return False
        self.start(seq, match)
        pool.take(blocks - match.blocks)
        seq.owned = blocks
        return True

    def arrived(self, seq: Sequence) -> None:
        """The reserved prompt is here: its complete blocks can be found from now on."""
        seq.computed = seq.prompt
        if self.caching:
            self._publish_prompt(seq)

    def came_up(self, seq: Sequence, blocks: int) -> None:
        """`blocks` more of a sequence's prefix are here, loaded from a lower tier."""
        upto = seq.published + blocks
        seq.computed = upto * self.block_size
        self._publish(seq, seq.pieces(self.block_size), upto)

    def needed(self, seq: Sequence, want: int) -> int:
        """Fresh blocks that `want` more computed tokens take."""
        upto = seq.computed + want
        if self.drafts is not None:
            upto += self.drafts.ahead(seq, want)
        return -(-upto // self.block_size) - seq.owned

    def extend(self, seq: Sequence, want: int) -> PrefillChunk:
        """Take the blocks for `want` more tokens of a sequence, and publish the prompt blocks that become complete."""
        past = seq.computed
        upto = past + want
        ahead = 0 if self.drafts is None else self.drafts.ahead(seq, want)
        blocks = -(-(upto + ahead) // self.block_size)
        if blocks > seq.owned:
            self.pool.take(blocks - seq.owned)
            seq.owned = blocks
        seq.computed = upto
        prompt = seq.prompt
        if self.caching and seq.path.pieces and seq.path.pieces[0][0] is not seq.own:
            self._publish_prompt(seq)
        new = (upto if upto < prompt else prompt) - past
        if new < 0:
            new = 0
        return PrefillChunk(new, past, want - new, past < prompt <= upto)

    def release(self, seq: Sequence) -> None:
        """Give all blocks back; complete ones stay findable, generated ones too: a preempted request returns."""
        if self.caching:
            complete = seq.computed // self.block_size
            if complete > seq.published:
                path = seq.path
                if complete <= path.blocks:
                    pieces = path.pieces
                else:
                    pieces = seq.pieces_to(complete) if path.pieces else ((seq.own, complete),)
                self._publish(seq, pieces, complete)
        if self.drafts is not None:
            self.drafts.forget(seq)
        self.pool.release(seq.holds, seq.owned - seq.published)
        seq.holds = []
        seq.owned = seq.published = seq.computed = 0

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks beyond the computed tokens."""
        over = seq.owned - -(-seq.computed // self.block_size)
        if over > 0:
            seq.owned -= over
            self.pool.free += over

    def _publish_prompt(self, seq: Sequence) -> None:
        """Publish complete prompt blocks; content that this sequence alone can use waits until its release."""
        path = seq.path
        if path.pieces and path.pieces[0][0] is not seq.own:
            complete = seq.computed // self.block_size
            if complete > path.blocks:
                complete = path.blocks
            if complete > seq.published:
                self._publish(seq, path.pieces, complete)

    def _publish(self, seq: Sequence, pieces: tuple[tuple[Branch, int], ...], upto: int) -> None:
        lo = seq.published
        for branch, end in pieces:
            if end > lo:
                hi = end if end < upto else upto
                self.pool.publish(seq.holds, branch, lo, hi)
                lo = hi
                if lo == upto:
                    break
        seq.published = lo
