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
"""Lengths within so much of the nominal ones where a row does not say. Equal lengths would keep all users in step for
ever, which the measurements do not show."""

SINGLE_BURSTS = {("vendor_gap_study", "0.5.1.post1"), ("vendor_gap_study", "0.5.8.post1")}
"""By who measured and engine version: studies without a stated protocol that sent every user's prompt once. Their TTFT
is half of what all prompts take one after the other, and their TPOT that of decodes which no later prompt disturbs:
read so, the mean error of SGLang falls from 14.7 to 11.1 % (TPOT) and from 45 to 35 % (TTFT)."""


BALANCE_STEPS = 60
"""Attention-DP ranks of TensorRT-LLM wait so many steps for each other's prompts: `timeout_iters` beside
`enable_balance` in the public launch scripts."""


@frozen
class ClosedLoop:
    """`users` at a time, until all prompts are answered; lengths by request in sending order."""

    users: int
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


def closed_loop(row: Measurement, seed: int = 0) -> ClosedLoop:
    """The loop that a row was measured with; the lengths are drawn."""
    most = max(USUAL_PROMPTS * row.users, LEAST_PROMPTS)
    if row.prompts is not None:
        count = min(most, max(row.users, row.prompts))
    else:
        is_burst = (row.client, row.engine_version) in SINGLE_BURSTS
        count = row.users if is_burst else USUAL_PROMPTS * row.users
    draws = np.random.default_rng(seed)
    isl, osl = (_lengths(draws, tokens, row.length_ratio, count) for tokens in (row.isl, row.osl))
    return ClosedLoop(users=min(row.users, count), prompts=isl, outputs=osl)


def _lengths(draws: np.random.Generator, tokens: int, ratio: float | None, count: int) -> tuple[int, ...]:
    """Uniform whole numbers in [ratio L, L]; around L where the ratio is not known."""
    if ratio is not None:
        return tuple(draws.integers(max(1, int(tokens * ratio)), tokens + 1, count).tolist())
    around = draws.uniform(1 - UNKNOWN_SPREAD, 1 + UNKNOWN_SPREAD, count)
    return tuple(np.maximum(1, np.rint(around * tokens).astype(int)).tolist())
