"""How long who tries again waits: not at all at first, then 50 ms, 200 ms, and 1 s each time, a fifth more or less.

The jitter belongs to (seed, who, which time): trying more often, or another one that tries, shifts nobody's numbers.
"""

from __future__ import annotations

from policies.cluster.draws import draw
from policies.frozen import frozen

WAITS_S = (0.0, 0.05, 0.2, 1.0)
"""Before the first, second, third and every further try in a row."""
JITTER = 0.2
"""Up to so much of it more or less, drawn evenly."""


@frozen
class Backoff:
    """Waits of one run."""

    seed: int

    def wait_s(self, who: str, tries: int) -> float:
        """The wait before the `tries`-th try in a row, from 1."""
        usual_s = WAITS_S[min(tries, len(WAITS_S)) - 1]
        return usual_s * (1.0 + JITTER * (2.0 * draw(self.seed, "backoff", who, tries) - 1.0)) if usual_s else 0.0
