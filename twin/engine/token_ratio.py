"""The new-token ratio of SGLang: which share of the outputs still to come admission keeps free.

It starts high, falls with every step without prompt work, and rises to what experience says after a retraction. It
decides nothing: admission weighs with it.
"""

from __future__ import annotations

FIRST_RATIO = 0.7
"""Share of the outputs still to come that is kept free at first, times the conservativeness (SGLang's default)."""
LOWEST_SHARE = 0.14
"""The ratio falls to this share of the first one ..."""
DECAY_STEPS = 600
"""... in so many steps."""
RETRACT_AHEAD_TOKENS = 20
"""After a retraction, the ratio leaves every survivor room for so many tokens."""


class TokenRatio:
    """`fall` is by how much a step without prompt work lowers the ratio at most."""

    __slots__ = ("_base", "_decays", "_lowest", "fall")

    def __init__(self, conservativeness: float) -> None:
        first = FIRST_RATIO * conservativeness
        self._lowest = first * LOWEST_SHARE
        self.fall = (first - self._lowest) / DECAY_STEPS
        self._base = first
        self._decays = 0

    @property
    def value(self) -> float:
        fallen = self._base - self._decays * self.fall
        return max(fallen, min(self._lowest, self._base))

    def decay(self, steps: int) -> None:
        """So many steps without prompt work are over."""
        self._decays += steps

    def sink(self) -> None:
        """Nothing runs: steps without work lower it too, as far as it goes."""
        self._base, self._decays = min(self._base, self._lowest), 0

    def retracted(self, made: int, most: int, survivors: int) -> None:
        """Requests were sent back; those who stay have made `made` of at most `most` outputs."""
        self._base = min(1.0, (made + RETRACT_AHEAD_TOKENS * survivors) / (most + 1))
        self._decays = 0
