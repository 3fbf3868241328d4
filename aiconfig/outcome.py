"""What a search comes to, as plain values: the best, the front, everybody else with the reason, and what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from aiconfig.candidate import Candidate
from aiconfig.changes import Change
from aiconfig.estimate import Estimate, Load
from aiconfig.judge import Judgement
from aiconfig.memory import Fit
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from policies.frozen import frozen

FOUND = 0
NOT_FOUND = 3
"""Exit codes: something keeps the limits; nothing does (or nothing is known to)."""


@frozen
class Scored:
    """A candidate at its load point. `estimate` is of the best level that there is, `closed` always the closed form.

    `judgement` is the verdict on `estimate`; `screening` the same with means in place of percentiles that are not
    known. `score` is that of the objective, larger is better. `runs` were simulated for it.
    """

    candidate: Candidate
    fit: Fit
    load: Load
    estimate: Estimate
    closed: Estimate
    judgement: Judgement
    screening: Judgement
    score: float
    runs: int = 0

    @property
    def distance(self) -> float:
        """Worst relative excess over any limit, as far as its level can tell; 0 if all are kept."""
        known = self.judgement.distance
        return (self.screening.distance or 0.0) if known is None else known


@frozen
class Miss:
    """The nearest miss where nothing keeps the limits, and single changes that would make it keep them."""

    scored: Scored
    changes: tuple[Change, ...]

    @property
    def line(self) -> str:
        """One line for people: who, and what it misses by how much."""
        limit = self.scored.judgement.binding or self.scored.screening.binding
        if limit is None or limit.value is None:
            return f"nearest: {self.scored.candidate.name}"
        unit = f"{limit.value * 1e3:.6g} ms" if limit.slo.unit == "s" else f"{limit.value:.6g} {limit.slo.unit}"
        return (
            f"nearest: {self.scored.candidate.name} at {self.scored.load}, {unit} against {limit.slo}: "
            f"{(limit.excess or 0.0) * 100:.1f} % over"
        )


@frozen
class SearchResult:
    """The answer. `ranked` holds everybody who has an estimate, best first; `rejections` everybody else, and those of
    `ranked` that were not simulated although others were.

    `best` keeps every limit by its own estimate; `best_agg` and `best_disagg` are the best of each mode. With a
    percentile limit and no simulation nothing is known to keep it: `best` is None, and `ranked` is by means. `scored`
    deployments were estimated by the closed form, whatever the ways to serve them.
    """

    request: SearchRequest
    best: Scored | None
    best_agg: Scored | None
    best_disagg: Scored | None
    front: tuple[Scored, ...]
    ranked: tuple[Scored, ...]
    rejections: tuple[Rejection, ...]
    nearest: Miss | None
    legal: int
    scored: int
    provenance: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 if something keeps the limits, 3 if not."""
        return NOT_FOUND if self.best is None else FOUND

    @property
    def counts(self) -> Mapping[str, int]:
        """Rejections by reason, most first, equals by name."""
        found = Counter(one.reason for one in self.rejections)
        return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))
