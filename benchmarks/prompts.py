"""The prompts of the selection benchmark, for ours and for a peer that has another interpreter.

Nothing but the standard library, so that both draw the same ones; what they are used for is not known here.
"""

from __future__ import annotations

import random

SIZES_TOKENS = {"2k": 2048, "8k": 8192, "32k": 32768}
BLOCK_SIZES = (16, 64)
OPEN_REQUESTS = 512
VOCABULARY = 128_000


class Prompts:
    """Token lists of which half go on from an earlier one, as turns of sessions do."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._system = self._fresh(1024)
        self._earlier: list[list[int]] = []

    def of(self, tokens: int) -> list[int]:
        known = self._rng.random() < 0.5 and self._earlier
        head = self._rng.choice(self._earlier)[: tokens * 3 // 4] if known else self._system
        prompt = head + self._fresh(tokens - len(head))
        self._earlier.append(prompt)
        return prompt

    def _fresh(self, tokens: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(tokens)]


def percentiles(name: str, times_ns: list[int]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    times_ns = sorted(times_ns)
    picks = {"p50": 0.50, "p99": 0.99}
    return {f"{name}_{p}_ms": round(times_ns[int(len(times_ns) * q)] / 1e6, 3) for p, q in picks.items()}
