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
class Untold:
    """What a study that tells nothing of its protocol must have done, by its figures."""

    skipped_rounds: int = 0  # requests per user in the beginning that are not part of the mean
    output_spread: float = UNKNOWN_SPREAD


STUDIES = {("vendor_gap_study", "0.5.6.post2"): Untold(skipped_rounds=2, output_spread=0.9)}
"""By who measured and engine version. This one's TTFT does not grow with the number of users as an opening burst makes
it, and its users are not in step."""


@frozen
class ClosedLoop:
    """`users` at a time, until all prompts are answered; lengths by request in sending order. The first `skipped`
    requests are part of the load and not of the means."""

    users: int
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    skipped: int = 0


def closed_loop(row: Measurement, seed: int = 0) -> ClosedLoop:
    """The loop that a row was measured with; the lengths are drawn."""
    told = row.prompts is not None
    study = Untold() if told else STUDIES.get((row.client, row.engine_version), Untold())
    count = USUAL_PROMPTS * row.users if row.prompts is None else max(row.users, row.prompts)
    skipped = study.skipped_rounds * row.users
    count = min(count, max(USUAL_PROMPTS * row.users, LEAST_PROMPTS)) + skipped
    draws = np.random.default_rng(seed)
    isl = _lengths(draws, row.isl, row.length_ratio, UNKNOWN_SPREAD, count)
    osl = _lengths(draws, row.osl, row.length_ratio, study.output_spread, count)
    return ClosedLoop(users=min(row.users, count), prompts=isl, outputs=osl, skipped=skipped)


def _lengths(
    draws: np.random.Generator, tokens: int, ratio: float | None, spread: float, count: int
) -> tuple[int, ...]:
    """Uniform whole numbers in [ratio L, L]; within `spread` around L where the ratio is not known."""
    if ratio is not None:
        return tuple(draws.integers(max(1, int(tokens * ratio)), tokens + 1, count).tolist())
    around = draws.uniform(1 - spread, 1 + spread, count)
    return tuple(np.maximum(1, np.rint(around * tokens).astype(int)).tolist())
