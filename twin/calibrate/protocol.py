"""How a row was measured, as far as it decides what the engine did: how many requests of which lengths, in which order.

All users send at once in the beginning, and every answer triggers the next prompt: the opening burst and the drain are
part of the mean. Warm-up prompts before them leave an empty engine behind, and so does nothing else here.
"""

from __future__ import annotations

import numpy as np

from policies.frozen import frozen
from twin.calibrate.measured import Measurement

USUAL_PROMPTS = 10
"""Requests per user where a row does not say; the longest that is simulated, too: more of the same teaches nothing."""
LEAST_PROMPTS = 20
UNKNOWN_SPREAD = 0.2
"""Lengths within so much of the nominal ones where a row does not say. Equal lengths would march in step, and real
clients do not; of 0, 0.1 and 0.2 this explains the runs without a stated protocol best."""


@frozen
class ClosedLoop:
    """`users` at a time, until all prompts are answered; lengths by request in sending order."""

    users: int
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


def closed_loop(row: Measurement, seed: int = 0) -> ClosedLoop:
    """The loop that a row was measured with; the lengths are drawn."""
    prompts = USUAL_PROMPTS * row.users if row.prompts is None else max(row.users, row.prompts)
    prompts = min(prompts, max(USUAL_PROMPTS * row.users, LEAST_PROMPTS))
    draws = np.random.default_rng(seed)
    isl, osl = (_lengths(draws, tokens, row.length_ratio, prompts) for tokens in (row.isl, row.osl))
    return ClosedLoop(users=min(row.users, prompts), prompts=isl, outputs=osl)


def _lengths(draws: np.random.Generator, tokens: int, ratio: float | None, count: int) -> tuple[int, ...]:
    """Uniform whole numbers in [ratio L, L]; around L where the ratio is not known."""
    if ratio is not None:
        return tuple(draws.integers(max(1, int(tokens * ratio)), tokens + 1, count).tolist())
    spread = draws.uniform(1 - UNKNOWN_SPREAD, 1 + UNKNOWN_SPREAD, count)
    return tuple(np.maximum(1, np.rint(spread * tokens).astype(int)).tolist())
