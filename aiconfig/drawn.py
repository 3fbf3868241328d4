"""Which finalists are simulated under which ways to serve, where they are too many to simulate all: a study draws them.

Each finalist is simulated under the first way all the same, so that what others are worth can be said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiconfig.candidate import Candidate
from aiconfig.estimate import Estimate
from aiconfig.finalists import Outcome, Spread, Turn
from aiconfig.judge import judge
from aiconfig.objectives import OBJECTIVES
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.result import terms_of
from aiconfig.study import Score, StudyOptions, run_study

LARGEST_PLAYED: Final = 48
"""Turns up to which all are played; of more, so many are. A turn is up to seven runs, some ten seconds in all."""
WIDTH: Final = 8
"""Turns that are drawn at once, whatever the number of processes: the answer must not depend on that."""
NOT_DRAWN: Final = "a study drew other ways to serve"


class Drawn:
    """A `Spread` over another one. `line` says afterwards what was drawn; empty if everything was played."""

    def __init__(self, spread: Spread, objectives: Sequence[str], seed: int) -> None:
        self._spread, self._objectives, self._seed = spread, tuple(objectives), seed
        self.line = ""

    def __call__(self, turns: Sequence[Turn]) -> Sequence[Outcome]:
        if len(turns) <= LARGEST_PLAYED:
            return self._spread(turns)
        first = [turn for turn in turns if turn.candidate.serving == turn.request.servings[0]]
        found = dict(zip((turn.candidate.name for turn in first), self._spread(first), strict=True))
        rest = {turn.candidate.name: turn for turn in turns if turn.candidate.name not in found}
        objectives = self._objectives or (turns[0].request.objective,)

        def scores(asked: Sequence[Candidate]) -> list[Score]:
            outcomes = self._spread([rest[one.name] for one in asked])
            found.update(zip((one.name for one in asked), outcomes, strict=True))
            return [_score(outcome, turns[0].request, objectives) for outcome in outcomes]

        options = StudyOptions(
            objectives=len(objectives),
            trials=max(1, LARGEST_PLAYED - len(found)),
            seed=self._seed,
            width=WIDTH,
        )
        studied = run_study([turn.candidate for turn in rest.values()], scores, options)
        self.line = (
            f"{len(found):,} of {len(turns):,} finalists with ways to serve were simulated, {len(studied.trials):,} of "
            f"them drawn by {studied.sampler}"
        )
        return [found.get(turn.candidate.name) or _not_drawn(turn) for turn in turns]


def _not_drawn(turn: Turn) -> Rejection:
    return Rejection(name=turn.candidate.name, reason="not_simulated", detail=NOT_DRAWN)


def _score(outcome: Outcome, request: SearchRequest, objectives: Sequence[str]) -> Score:
    """Of the run that comes nearest to the limits, then of the best one."""
    if isinstance(outcome, Rejection):
        return Score(why=outcome.line())
    terms = terms_of(request)

    def values(run: Estimate) -> tuple[float, ...]:
        return tuple(OBJECTIVES[name].score(run, terms) for name in objectives)

    def missed(run: Estimate) -> float:
        return judge(run, request.sla).distance or 0.0

    best = min(outcome.runs, key=lambda run: (missed(run), [-value for value in values(run)]))
    if any(value == float("-inf") for value in values(best)):
        return Score(why="a figure of the objectives is not known")
    return Score(values=values(best), violation=missed(best))
