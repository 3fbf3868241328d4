"""SGLang's queue: who waits, in what order, and who may begin or go on with a prompt now.

Whoever is at its head is let in while what running requests may still need, weighed with the new-token ratio, leaves
room. A look that lets nobody in leaves no trace in the cache, and says for how many decode steps nobody can follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from twin.engine.batch import DecodeBatch
from twin.engine.radix import Pieces
from twin.engine.radix_ledger import RadixLedger
from twin.engine.sequence import Phase, Sequence
from twin.engine.settings import SglangSettings
from twin.engine.token_ratio import TokenRatio
from twin.perf.protocol import PrefillChunk

LPM_LIMIT = 128
"""With more waiting than this, they are not sorted."""
SHORT_HIT_TOKENS = 32
"""Prompts with at most this much in the cache are compared with each other: of equals, the first goes ahead."""

Work = list[tuple[Sequence, PrefillChunk]]


class PrefillQueue:
    """`waiting` is shared with the scheduler, which adds and removes through here. `certain`: decode steps for which
    whoever waits surely stays out, as of the last look; 0: no such bound.
    """

    __slots__ = ("_batch", "_changes", "_ledger", "_ratio", "_running", "_settings", "_sorted", "certain", "waiting")

    def __init__(
        self,
        settings: SglangSettings,
        ledger: RadixLedger,
        ratio: TokenRatio,
        batch: DecodeBatch,
        waiting: deque[Sequence],
        running: Collection[Sequence],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._ratio = ratio
        self._batch = batch
        self._running = running
        self.waiting = waiting
        self.certain = 0
        self._changes = 0
        self._sorted: tuple[int, int] | None = None  # cache version and changes of the queue at the last sort

    # ------------------------------------------------------------ who waits

    def append(self, seq: Sequence) -> None:
        self.waiting.append(seq)
        self._changes += 1

    def put_first(self, *seqs: Sequence) -> None:
        self.waiting.extendleft(reversed(seqs))
        self._changes += 1

    def remove(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self._changes += 1

    @property
    def is_sorted(self) -> bool:
        """Whether the order follows the cache now."""
        return self._settings.schedule_policy == "lpm" and len(self.waiting) <= LPM_LIMIT

    def begun(self) -> list[Sequence]:
        """Those whose prompts are computed in part: they hold pages."""
        return [seq for seq in self.waiting if seq in self._ledger.ends]

    # ------------------------------------------------------------ who enters

    def admit(self, now_s: float) -> Work:
        """Let in who may enter, with what they compute in this step; their pages are taken."""
        settings, ledger, waiting = self._settings, self._ledger, self.waiting
        size = settings.block_size
        if self.is_sorted:
            self._sort()
        work: Work = []
        slots = settings.max_num_seqs - len(self._running)
        if slots <= 0:
            return work
        left_tokens = self._outputs_left()
        total = ledger.pool.room * size - left_tokens * self._ratio.value
        budget, room = settings.max_prefill_tokens, settings.chunked_prefill_size
        while waiting and slots > 0:
            seq = waiting[0]
            taken = self._take_up(seq, total, slots)
            if taken is not None:
                total -= taken * size
                continue
            if room <= 0 or self.certain:
                break
            length = seq.prompt + seq.outputs
            start, below = seq.computed, 0
            if seq not in ledger.ends:
                cached, below = ledger.found(seq, length - 1)
                start = (cached + below) * size
            ext = length - start
            take = ext if ledger.whole(ext) <= room else room // size * size
            charge = ledger.whole(take)
            reserve = min(seq.outputs_limit - seq.outputs, settings.clip_max_new_tokens) if take == ext else 0
            more = below * size  # comes up from a tier below: room for it, but no work
            if not take or charge + more + reserve >= total or charge > budget or charge > room:
                if not work and take:
                    least = charge + reserve + (more if take == ext else 0)  # what is below can be lost
                    self._keep_out(seq, least - total, left_tokens, length, ext)
                break
            if not self._enter(seq, length, charge // size, below, now_s):
                break
            waiting.popleft()
            self._changes += 1
            slots -= 1
            total -= charge + more + reserve
            budget -= charge
            room -= charge
            seq.computed = start + take
            work.append((seq, PrefillChunk(take, start, 0, start < seq.prompt <= start + take)))
        return work

    def _take_up(self, seq: Sequence, total: float, slots: int) -> int | None:
        """Take the head out of the queue where it must wait beside it, and say how many pages that took; None where it
        need not, or cannot now (`certain`). `total` tokens are left for whoever enters, and `slots` places."""
        return None

    def _enter(self, seq: Sequence, length: int, pages: int, below: int, now_s: float) -> bool:
        """Begin or go on with a prompt; False where its pages cannot be had."""
        ledger = self._ledger
        if seq in ledger.ends:
            if not ledger.pool.take(pages):
                return False
            seq.owned += pages
        else:
            if not ledger.begin(seq, length - 1, pages, below):
                return False
            seq.let_in(now_s, seq.published * self._settings.block_size)
        seq.phase = Phase.PREFILL
        return True

    def _keep_out(self, seq: Sequence, short: float, left_tokens: int, length: int, ext: int) -> None:
        """Bound the decode steps for which the head of waiting, `short` of tokens now, surely stays out.

        In a step the weighed outputs shrink by at most `rise`: each member makes a token, and the ratio falls. What the
        members take works against it. An eviction can shorten the head's cached prefix, so that it no longer ends
        within the step and needs no reserve: then the bound ends before anything is evicted.
        """
        settings, batch, ledger = self._settings, self._batch, self._ledger
        slack = short - 1e-6
        rise = self._ratio.fall * left_tokens + self._ratio.value * batch.size
        certain = int(slack / rise) if rise > 0.0 and slack > 0.0 else 0
        slack -= batch.size * (settings.block_size - 1)
        if slack > 0.0:
            rise -= batch.size
            certain = max(certain, int(slack / rise) if rise > 0.0 else 1 << 40)
        fits = ledger.whole(length) <= settings.chunked_prefill_size
        if seq not in ledger.ends and not fits and ledger.whole(ext) <= settings.chunked_prefill_size:
            certain = min(certain, batch.steps_within(certain + 1, ledger.pool.free) - 1)
        self.certain = max(certain, 0) + 1

    def _outputs_left(self) -> int:
        """Tokens that running requests still make, as far as they count for admission."""
        clip, batch = self._settings.clip_max_new_tokens, self._batch
        left = 0
        for seq in self._running:
            own = seq.outputs_limit + seq.prompt - batch.length(seq)
            left += own if own < clip else clip
        return left

    # ------------------------------------------------------------ longest prefix first

    def _sort(self) -> None:
        """Longest cached prefix first; of those with hardly any, one of each beginning goes before its likes."""
        ledger, waiting = self._ledger, self.waiting
        now = (ledger.pool.version, self._changes)
        if self._sorted == now:
            return
        self._sorted = now
        if len(waiting) < 2:
            return
        size = self._settings.block_size
        pages = SHORT_HIT_TOKENS // size
        seen: set[tuple[tuple[int, int], ...]] = set()
        ranked: list[tuple[bool, int, Sequence]] = []
        for seq in waiting:
            length = seq.prompt + seq.outputs
            cached = ledger.cached(seq, length) * size
            again = False
            if cached <= SHORT_HIT_TOKENS <= length:
                beginning = _beginning(ledger.pieces(seq, length // size), pages)
                again = beginning in seen
                seen.add(beginning)
            ranked.append((again, -cached, seq))
        ranked.sort(key=lambda r: r[:2])
        waiting.clear()
        waiting.extend(seq for _, _, seq in ranked)


def _beginning(pieces: Pieces, pages: int) -> tuple[tuple[int, int], ...]:
    """The content of the first `pages` pages, as something to compare."""
    runs = []
    for branch, end in pieces:
        runs.append((branch.uid, min(end, pages)))
        if end >= pages:
            break
    return tuple(runs)
