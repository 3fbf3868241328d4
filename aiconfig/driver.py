"""One search from end to end: which part of the space, who simulates it, and what there is when it is stopped.

Only the order of things is here. A search that is stopped, or whose time is up, answers from what was done by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiconfig.drawn import Drawn
from aiconfig.estimate import CLOSED_FORM
from aiconfig.evaluate import Simulation, setting_of
from aiconfig.evaluation import ClosedFormEvaluation
from aiconfig.finalists import Simulate, Spread, Turn, refusals_are_none, take_turn
from aiconfig.load_point import Searched
from aiconfig.outcome import SearchResult
from aiconfig.patience import Patience, unplayed
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.result import Result, result_of
from aiconfig.search import search
from aiconfig.sensitivity import Variation, variations
from aiconfig.space import Legal, Space
from aiconfig.study import StudyOptions
from aiconfig.table import Row, rows_of
from policies.errors import ConfigError
from policies.frozen import frozen

Told = Callable[[int, int], None]
"""Called with (deployments simulated, all that are to be)."""


@frozen
class How:
    """How to search. `study` samples a space that is too large to be searched exactly (or if `sampled` says so).

    `jobs` processes simulate, or those of the Ray cluster at `ray`. Several `objectives` are the axes of the front.
    """

    simulates: bool = True
    jobs: int = 1
    ray: str | None = None
    objectives: tuple[str, ...] = ()
    study: StudyOptions = StudyOptions()
    sampled: bool = False
    timeout_s: float | None = None
    soft: bool = False

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ConfigError(f"--jobs {self.jobs}: at least 1 process")


@frozen
class Driven:
    """A search that was run: what is kept of it, and a row for every candidate. `interrupted` by Ctrl-C."""

    result: Result
    rows: tuple[Row, ...]
    interrupted: bool


def drive(request: SearchRequest, how: How, told: Told | None = None) -> Driven:
    """Search as asked for. Raises ConfigError or CapabilityError for what cannot be done here."""
    patience = Patience(how.timeout_s)
    simulate = patience.asking(Simulation(setting_of(request))) if how.simulates else None
    proposed: Sequence[Legal | Rejection] | None = None
    notes: tuple[str, ...] = ()
    if how.sampled or Space(request).is_large:
        from aiconfig.sampling import sample

        sampled = sample(request, how.study, how.objectives)
        proposed, notes = sampled.proposed, (sampled.line(),)
        patience.interrupted = not sampled.studied.complete and not patience.over
    spread = None
    if simulate is not None:
        spread = Drawn(_spread(how, simulate, patience, told), how.objectives, how.study.seed)
    outcome = search(request, simulate, proposed, spread)
    notes += (spread.line,) if spread is not None and spread.line else ()
    varied = _variations(outcome, simulate, patience)
    if patience.late:
        notes += (f"time was up after {how.timeout_s:g} s: what was not looked at by then is missing",)
    result = result_of(
        outcome,
        objectives=how.objectives,
        variations=varied,
        soft=how.soft,
        complete=not patience.over,
        notes=notes,
    )
    return Driven(result=result, rows=tuple(rows_of(outcome)), interrupted=patience.interrupted)


def _spread(how: How, simulate: Simulate, patience: Patience, told: Told | None) -> Spread:
    """Turns where they are to run; those that were not over when patience was are not simulated."""
    if how.ray is not None or how.jobs > 1:
        from aiconfig.spread import in_processes, on_ray

        if how.ray is not None:
            return on_ray(how.ray, told, patience)
        return in_processes(how.jobs, told, patience)

    def spread(turns: Sequence[Turn]) -> list[Searched | Rejection]:
        found: list[Searched | Rejection] = []
        for turn in turns:
            if patience.over:
                found.append(unplayed(turn.candidate.name))
                continue
            if told is not None:
                told(len(found), len(turns))
            outcome = take_turn(turn, simulate)
            if isinstance(outcome, Rejection) and patience.over:
                outcome = unplayed(turn.candidate.name)
            found.append(outcome)
        return found

    return spread


def _variations(outcome: SearchResult, simulate: Simulate | None, patience: Patience) -> tuple[Variation, ...]:
    """Those of the best; simulated where it is."""
    best, request = outcome.best, outcome.request
    if best is None:
        return ()
    by_runs = simulate is not None and best.estimate.level != CLOSED_FORM
    evaluate = refusals_are_none(simulate) if by_runs and simulate else ClosedFormEvaluation(request.physics)
    found = variations(best.candidate, request.workload, best.load, request.sla, evaluate)
    return () if patience.over else found
