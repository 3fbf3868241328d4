"""Single decisions as a report tells them: terms, runner-up, and what they come to in hindsight.

Apart from reports/report.py because most runs have none of it, and making a dataclass costs a good part of a
millisecond. It holds figures and computes none.
"""

from __future__ import annotations

from dataclasses import dataclass

from reports.metrics import Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleSample:
    """One decision in hindsight: TTFT on the chosen worker and on the best one, from their true states."""

    row: int
    at_s: float
    worker_id: int
    ttft_s: float
    best_worker_id: int
    best_ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleMeta:
    """Decisions looked at in hindsight: one in `every`, of which `left_out` could not be told."""

    every: int
    samples: tuple[OracleSample, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateFigures:
    """One worker as a decision saw it, with the terms of its cost in blocks."""

    worker_id: int
    cost: float
    overlap_blocks: int
    prefill_blocks: float
    credit_blocks: float
    decode_blocks: float
    active_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedFigures:
    """What the terms of all decisions say, where they were recorded. `not_cheapest` decisions have a regret."""

    decisions: int
    not_cheapest: int
    regret_blocks: Distribution
    most_regretted: tuple[DecisionFigures, ...]
    slowest: tuple[DecisionFigures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleFigures:
    """A sample of decisions in hindsight: `regret_s` over all of it, `worst` first those that cost most."""

    every: int
    decisions: int
    left_out: int
    best_chosen: int
    regret_s: Distribution
    worst: tuple[OracleSample, ...]
