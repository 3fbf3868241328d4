"""Prompts that are computed layer by layer behind the blocks that come up for them: how much of a load's time is won.

A request enters when all of its load has landed, and the step that computes its first chunk is shorter by the layers
that could have been computed by then: those that had come while the engine had nothing else to do. No decode waits for
a layer, and no idle second is given away twice. Whoever finds the engine busy wins nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Row
from typing import NamedTuple, TypeVar

from twin.engine.plan import StepPlan
from twin.engine.sequence import Sequence
from twin.engine.settings import Layers
from twin.engine.ticks import instant

Span = tuple[float, float]
"""From when to when, in seconds."""
T = TypeVar("T")


class Arrival(NamedTuple):
    """Layers of one load come evenly: from the first byte that reaches the device to the last one."""

    since_s: float
    landed_s: float


def ahead_s(arrival: Arrival, idle: Row[Span], layer_s: float, layers: int) -> float:
    """How long an engine that may compute in `idle` spans alone can have computed when the last of `layers` lands, if a
    layer takes it `layer_s` and can begin when it has come.

    Work cannot run ahead of the layers: whatever had come before layer k, and all idle time from then on, bounds it.
    Idle throughout it is (n - 1)/n of the shorter of loading and computing: `policies.kvbm.onboard.intra_layer_s`.
    """
    since_s, landed_s = arrival
    each_s = (landed_s - since_s) / layers
    inside = [(max(lo, since_s), min(hi, landed_s)) for lo, hi in idle if hi > since_s and lo < landed_s]
    least = (layers - 1) * layer_s
    for k in range(1, layers):
        come_s = since_s + k * each_s
        left_s = sum(hi - max(lo, come_s) for lo, hi in inside if hi > come_s)
        least = min(least, (k - 1) * layer_s + left_s)
    return least


def without_last(idle: Row[Span], seconds: float, before_s: float) -> list[Span]:
    """Idle spans less the last `seconds` of them before `before_s`: computing as late as that is always possible."""
    left: list[Span] = []
    for lo, hi in reversed(idle):
        if hi > before_s:
            left.append((max(lo, before_s), hi))
        end = min(hi, before_s)
        if end > lo:
            taken = min(seconds, end - lo)
            seconds -= taken
            if end - taken > lo:
                left.append((lo, end - taken))
    left.reverse()
    return left


class Overlap:
    """The ledger of one engine, whose model has such `layers`: `saved_s` off the steps of `loads` requests, out of
    `idle_s`."""

    def __init__(self, layers: Layers) -> None:
        self.loads = 0
        self.saved_s = 0.0
        self.idle_s = 0.0  # up to the step that runs
        self._layers = layers
        self._idle: list[Span] = []
        self._idle_from_s: float | None = 0.0
        self._landed: dict[Sequence, Arrival] = {}
        self._entering: dict[Sequence, Arrival] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether nobody whose load has landed waits to be computed."""
        return not (self._landed or self._entering)

    # ------------------------------------------------------------ requests

    def landed(self, seq: Sequence, arrival: Arrival) -> None:
        """All blocks of a load are there, and good."""
        self._landed[seq] = arrival

    def forget(self, seq: Sequence) -> None:
        """A request gives back what came up for it, or is gone."""
        self._landed.pop(seq, None)

    def enters(self, seq: Sequence) -> None:
        """A request is let in: its first chunk is in the step that is being planned."""
        arrival = self._landed.pop(seq, None)
        if arrival is not None:
            self._entering[seq] = arrival

    # ------------------------------------------------------------ steps

    def begun(self, start_s: float, *, loading: bool) -> None:
        """A step begins. Idle time is remembered while anything comes up, or has and waits."""
        self._close(start_s)
        self._idle_from_s = None
        if not loading and self.is_quiet:
            self._idle.clear()

    def over(self, end_s: float) -> None:
        """A step, or a leap, is over."""
        self._idle_from_s = end_s

    def shorten(
        self, step: StepPlan, work: Row[tuple[Sequence, T]], end_s: Callable[[list[tuple[Sequence, T]]], float]
    ) -> None:
        """Cut what was won off a step whose work has been priced; `end_s` says when it would end with less work.

        Of several that were loaded each has its share: what the step lasts longer for it than without it and those
        before it.
        """
        if not self._entering:
            return
        self._close(step.start_s)
        rest, upto_s, saved_s = list(work), step.end_s, 0.0
        for seq, _ in work:
            arrival = self._entering.pop(seq, None)
            if arrival is not None:
                rest = [other for other in rest if other[0] is not seq]
                without_s = min(end_s(rest), upto_s)
                saved_s += self._won(arrival, upto_s - without_s)
                upto_s = without_s
        self._entering.clear()
        self.saved_s += saved_s
        step.end_s = instant(max(step.start_s, step.end_s - saved_s))

    def _won(self, arrival: Arrival, compute_s: float) -> float:
        """Seconds of idle time in which a chunk that takes `compute_s` was computed; they are gone then."""
        if self._idle and self._idle[-1][1] > arrival.landed_s:
            return 0.0  # something kept it from going on although nothing ran: that was in the way before, too
        won_s = ahead_s(arrival, self._idle, compute_s / self._layers.model, self._layers.stage)
        if won_s <= 0.0:
            return 0.0
        self._idle = without_last(self._idle, won_s, arrival.landed_s)
        self.loads += 1
        return won_s

    def _close(self, now_s: float) -> None:
        """Idle time up to now is a span."""
        if self._idle_from_s is not None and now_s > self._idle_from_s:
            self._idle.append((self._idle_from_s, now_s))
            self.idle_s += now_s - self._idle_from_s
            self._idle_from_s = now_s
