"""Draft tokens: who has some to verify, how much room they may need, and how many of them hold.

Whether a draft token holds is a draw by counter: a function of the seed, the request and the position, never of the
batch it is in or of how often it was preempted.
"""

from __future__ import annotations

from policies.cluster.draws import draw
from policies.cluster.ids import Leg
from twin.engine.sequence import Sequence
from twin.engine.settings import Speculation

_STRIDE = 8  # draws set aside for each position, more than there can be drafts


class Drafts:
    """The drafts of one engine whose pool holds `room_tokens`.

    A request has drafts once it has emitted a token and not lost its blocks since; with `in_prefill` always, unless
    its prompt came from elsewhere: room was reserved for that alone.
    """

    __slots__ = ("_drafts", "_in_prefill", "_rates", "_ready", "_room_tokens", "_seed")

    def __init__(self, speculation: Speculation, room_tokens: int) -> None:
        self._rates = speculation.accept_rates
        self._drafts = len(speculation.accept_rates)
        self._seed = speculation.seed
        self._in_prefill = speculation.in_prefill
        self._room_tokens = room_tokens
        self._ready: set[Sequence] = set()

    def ahead(self, seq: Sequence, want: int) -> int:
        """Tokens beyond its newest for which a request needs room if it computes `want` more: its largest burst."""
        length = seq.prompt + seq.outputs
        if seq.computed + want < length or not (seq in self._ready or (self._in_prefill and seq.leg is not Leg.DECODE)):
            return 0
        most = self._drafts
        for limit in (seq.outputs_limit - seq.outputs - 1, self._room_tokens - length):
            if limit < most:
                most = limit
        return most if most > 0 else 0

    def burst(self, seq: Sequence, ahead: int | None = None) -> int:
        """Tokens that a request emits now: one, and as many drafts as hold one after the other.

        It has room for `ahead` of them; without that, for as many as `ahead` would say.
        """
        made = 1
        for k in range(self.ahead(seq, 0) if ahead is None else ahead):
            rate, at = self._rates[k], seq.outputs * _STRIDE + k
            if rate < 1.0 and not (rate and draw(self._seed, "drafts", seq.request_id, at) < rate):
                break
            made += 1
        self._ready.add(seq)
        return made

    def emitted(self, seq: Sequence) -> None:
        """A request has made a token without a burst: its next step has drafts to verify."""
        self._ready.add(seq)

    def forget(self, seq: Sequence) -> None:
        """A request has lost its blocks."""
        self._ready.discard(seq)
