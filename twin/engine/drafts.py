"""Draft tokens: who has some to verify, how much room they may need, and how many of them hold.

Whether a draft token holds is a draw by counter: a function of the seed, the request and the position, never of the
batch it is in or of how often it was preempted.
"""

from __future__ import annotations

from policies.cluster.draws import draw
from twin.engine.sequence import Sequence
from twin.engine.settings import Speculation

_STRIDE = 8  # draws set aside for each position, more than there can be drafts


class Drafts:
    """The drafts of one engine whose pool holds `room_tokens`.

    A request has drafts once it has emitted a token and not lost its blocks since; with `in_prefill` always.
    """

    __slots__ = ("_ready", "_room_tokens", "_speculation")

    def __init__(self, speculation: Speculation, room_tokens: int) -> None:
        self._speculation = speculation
        self._room_tokens = room_tokens
        self._ready: set[Sequence] = set()

    def ahead(self, seq: Sequence, want: int) -> int:
        """Tokens beyond its newest for which a request needs room if it computes `want` more: its largest burst."""
        length = seq.prompt + seq.outputs
        if seq.computed + want < length or not self._has_drafts(seq):
            return 0
        most = min(len(self._speculation.accept_rates), seq.outputs_limit - seq.outputs - 1, self._room_tokens - length)
        return max(0, most)

    def burst(self, seq: Sequence) -> int:
        """Tokens that a request emits now: one, and as many drafts as hold one after the other."""
        made = 1
        most = 1 + self.ahead(seq, 0)
        for k, rate in enumerate(self._speculation.accept_rates[: most - 1]):
            at = seq.outputs * _STRIDE + k
            if rate < 1.0 and not (rate and draw(self._speculation.seed, "drafts", seq.request_id, at) < rate):
                break
            made += 1
        self._ready.add(seq)
        return made

    def forget(self, seq: Sequence) -> None:
        """A request has lost its blocks."""
        self._ready.discard(seq)

    def _has_drafts(self, seq: Sequence) -> bool:
        return self._speculation.in_prefill or seq in self._ready
