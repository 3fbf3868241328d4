"""Time inside an epoch: a stretch of decode steps of one unchanged batch.

The end of its k-th step is its start plus a closed sum of k step times, whether steps are computed one by one or leapt.
That is why leaping cannot change an instant (specs: engine 16.5).
"""

from __future__ import annotations

from twin.engine.ticks import beyond
from twin.perf.protocol import DecodePiece


class Epoch:
    """`done` steps of `piece` have been made since `start_s`. Without a piece there is no epoch."""

    __slots__ = ("done", "piece", "start_s")

    def __init__(self) -> None:
        self.piece: DecodePiece | None = None
        self.start_s = 0.0
        self.done = 0

    def begin(self, piece: DecodePiece, start_s: float) -> None:
        self.piece = piece
        self.start_s = start_s
        self.done = 0

    def end_s(self, steps: int) -> float:
        """When the `steps`-th step from here ends, in whole nanoseconds (`ticks.instant`, written out: hot)."""
        g0, g1, g2, _ = self.piece  # type: ignore[misc]
        n = self.done + steps
        end_s = self.start_s + n * (g0 + (n - 1) * (0.5 * g1 + g2 * (2 * n - 1) / 6.0))
        try:
            return int(end_s * 1e9 + 0.5) / 1e9
        except (OverflowError, ValueError):
            raise beyond(end_s) from None

    def steps_to(self, at_s: float, start_s: float, end_s: float, planned: int) -> int:
        """In which of the `planned` steps between `start_s` and `end_s` the instant `at_s` falls, from 1."""
        span_s = end_s - start_s
        steps = int(planned * (at_s - start_s) / span_s) + 1 if span_s > 0.0 else planned
        if steps > planned:
            steps = planned
        while steps > 1 and self.end_s(steps - 1) >= at_s:
            steps -= 1
        while steps < planned and self.end_s(steps) < at_s:
            steps += 1
        return steps

    def gaps(self, skip: int = 0) -> tuple[float, float, float]:
        """Step times from here on, as coefficients of 1, j and j*j; the first `skip` are passed over."""
        g0, g1, g2, _ = self.piece  # type: ignore[misc]
        n = self.done + skip
        return g0 + n * (g1 + n * g2), g1 + 2.0 * g2 * n, g2
