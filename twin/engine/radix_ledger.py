"""Who holds which pages of a radix cache: the moves of a sequence's pages that the SGLang scheduler makes.

It looks up and locks cached prefixes, publishes what is complete and gives everything back. Tokens made while a batch
stands are not written into the tree one by one. It decides nothing: the scheduler asks whether something fits first.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.errors import InvariantError
from twin.engine.batch import DecodeBatch
from twin.engine.radix import Node, Pieces, RadixCache, Stamp
from twin.engine.sequence import Phase, Sequence


class RadixLedger:
    """The pages of sequences, those in `batch` among them: their lengths follow from its step counter.

    `ends` says where the pages of a sequence that are in the tree end; it has them locked.
    """

    __slots__ = ("_batch", "_size", "_tick", "_young", "caching", "ends", "pool")

    def __init__(self, pool: RadixCache, batch: DecodeBatch, *, caching: bool) -> None:
        self.pool = pool
        self.caching = caching
        self.ends: dict[Sequence, Node] = {}
        self._batch = batch
        self._size = batch.block_size
        self._young: list[Sequence] = []  # members that have no page of their own in the tree yet
        self._tick = 0

    # ------------------------------------------------------------ in tokens and pages

    def whole(self, tokens: int) -> int:
        """Tokens in whole pages."""
        size = self._size
        return -(-tokens // size) * size

    def pieces(self, seq: Sequence, pages: int) -> Pieces:
        """The content of the first `pages` pages of the known tokens, made ones included (and more, where known)."""
        return seq.path.pieces if pages <= seq.path.blocks else seq.pieces_to(pages)

    def length(self, seq: Sequence) -> int:
        return self._batch.length(seq) if seq.phase is Phase.DECODE else seq.prompt + seq.outputs

    def stamp(self) -> Stamp:
        """Now, behind everything that was touched before."""
        self._tick += 1
        return self._batch.step, 1, self._tick

    def last_page(self, seq: Sequence) -> Stamp:
        """When a member of the batch last completed a page."""
        return self._batch.step - self.length(seq) % self._size, 0, seq.order

    # ------------------------------------------------------------ taking

    def cached(self, seq: Sequence, tokens: int) -> int:
        """Pages of the first `tokens` tokens that are in the tree. Leaves no trace."""
        if not self.caching:
            return 0
        pages = tokens // self._size
        return self.pool.peek(self.pieces(seq, pages), pages)

    def found(self, seq: Sequence, tokens: int) -> tuple[int, int]:
        """Pages of the first `tokens` tokens that are in the tree, and how many more a tier below has. No trace."""
        return self.cached(seq, tokens), 0

    def begin(self, seq: Sequence, tokens: int, pages: int, below: int = 0) -> bool:
        """Lock what is cached of the first `tokens` tokens, and take `pages` beside it and room for `below` more that
        come up from a tier below; False, and nothing is taken, where they cannot be had."""
        if not self.lock(seq, tokens, pages + below):
            return False
        self._take(seq, pages, below)
        return True

    def lock(self, seq: Sequence, tokens: int, pages: int) -> bool:
        """Lock what is cached of the first `tokens` tokens, where `pages` can be had beside it, which are the
        sequence's own from now on; whoever asks takes them."""
        self.settle()
        pool = self.pool
        node, cached = pool.root, 0
        if self.caching:
            limit = tokens // self._size
            node, cached = pool.match(self.pieces(seq, limit), limit, self.stamp())
        pool.lock(node)
        if pages > pool.room:
            pool.unlock(node)
            return False
        self.ends[seq] = node
        seq.published = cached
        seq.owned = cached + pages
        return True

    def _take(self, seq: Sequence, pages: int, below: int) -> None:
        """Take pages that are known to be there."""
        self.pool.take(pages + below)

    # ------------------------------------------------------------ publishing

    def publish(self, seq: Sequence, pages: int, stamp: Stamp) -> None:
        """The first `pages` pages are complete: they go into the tree, and those that are there already come back."""
        if pages <= seq.published or not self.caching:
            return
        added = self.pool.publish(self.ends[seq], self.pieces(seq, pages), seq.published, pages, stamp)
        self.ends[seq] = added.node
        self.pool.free += added.known
        seq.published = pages

    def publish_computed(self, seq: Sequence) -> None:
        """All computed pages of a sequence that is not in the batch are complete."""
        self.publish(seq, seq.computed // self._size, self.stamp())

    def publish_made(self, seq: Sequence) -> None:
        """What a member has completed in the batch; before its first step there, that is nothing."""
        if self._batch.step > seq.join_step:
            self.publish(seq, self.length(seq) // self._size, self.last_page(seq))

    def settle(self, others: Iterable[Sequence] = ()) -> None:
        """Publish what decode steps have completed where that shapes the tree; what `others` have, too.

        The first own page of a member stays in one node with its prompt's last ones if nobody else uses those. Further
        ones only make that node longer, so they may wait until the member leaves.
        """
        if not self._young and not others:
            return
        for seq in sorted([*self._young, *others], key=self.last_page):
            self.publish_made(seq)
        self.grow_up()

    # ------------------------------------------------------------ members of the batch

    @property
    def young(self) -> list[Sequence]:
        return self._young

    def joined(self, seq: Sequence) -> None:
        """A sequence is in the batch."""
        if self._size > 1 and seq.published <= seq.prompt // self._size:
            self._young.append(seq)

    def left(self, seq: Sequence) -> None:
        """A sequence has left the batch before its end."""
        self.publish_made(seq)
        if seq in self._young:
            self._young.remove(seq)

    def grow_up(self) -> None:
        """Members with a page of their own in the tree, and those who have left, are no longer young."""
        if self._young:
            size, decodes = self._size, Phase.DECODE
            self._young = [s for s in self._young if s.phase is decodes and s.published <= s.prompt // size]

    # ------------------------------------------------------------ giving back

    def release(self, seq: Sequence) -> None:
        """Let go of all pages; those in the tree stay there until they are evicted."""
        node = self.ends.pop(seq, None)
        if node is None:
            return
        self.pool.free += seq.owned - seq.published
        self.pool.unlock(node)
        seq.owned = seq.published = seq.computed = 0

    def audit(self, planned: int = 0) -> None:
        """Recount the pages, of which a step under way has taken `planned`; raises InvariantError where one is off."""
        pool, size = self.pool, self._size
        pool.audit()
        own = sum((-(-self.length(s) // size) if s.phase is Phase.DECODE else s.owned) - s.published for s in self.ends)
        if own + planned != pool.private:
            raise InvariantError(
                f"radix cache: {pool.private} pages outside the tree are taken, requests have {own}, a step {planned}"
            )
