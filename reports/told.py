"""Single decisions as a report tells them: terms, runner-up, and what they come to in hindsight.

Apart from reports/report.py because most runs have none of it, and making a dataclass costs a good part of a
millisecond. It holds figures and computes none.
"""

from __future__ import annotations

from policies.frozen import frozen
from reports.metrics import Distribution


@frozen
class OracleSample:
    """One decision in hindsight: TTFT on the chosen worker and on the best one, from their true states."""

    row: int
    at_s: float
    worker_id: int
    ttft_s: float
    best_worker_id: int
    best_ttft_s: float


@frozen
class OracleMeta:
    """Decisions looked at in hindsight: one in `every`, of which `left_out` could not be told."""

    every: int
    samples: tuple[OracleSample, ...]
    left_out: int = 0


@frozen
class CandidateFigures:
    """One worker as a decision saw it, with the terms of its cost in blocks."""

    worker_id: int
    cost: float
    overlap_blocks: int
    prefill_blocks: float
    credit_blocks: float
    decode_blocks: float
    active_requests: int


@frozen
class DecisionFigures:
    """One decision: who was chosen by which rule, who would have been next (None: nobody else could be chosen), what it
    cost above the cheapest, and the TTFT that came of it.
    """

    row: int
    request_id: str | None
    at_s: float
    mode: str
    rule: str
    chosen: CandidateFigures
    runner_up: CandidateFigures | None
    regret_blocks: float
    overlap_lost_blocks: int
    ttft_s: float | None


@frozen
class ExplainedFigures:
    """What the terms of all decisions say, where they were recorded. `not_cheapest` decisions have a regret."""

    decisions: int
    not_cheapest: int
    regret_blocks: Distribution
    most_regretted: tuple[DecisionFigures, ...]
    slowest: tuple[DecisionFigures, ...]


@frozen
class OracleFigures:
    """A sample of decisions in hindsight: `regret_s` over all of it, `worst` first those that cost most."""

    every: int
    decisions: int
    left_out: int
    best_chosen: int
    regret_s: Distribution
    worst: tuple[OracleSample, ...]
