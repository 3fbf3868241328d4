"""Which part of a large space is looked at: a study over its legal points, scored by the closed form.

Spaces of up to `space.LARGEST_EXACT` legal points are searched exactly, and need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from aiconfig.candidate import Candidate
from aiconfig.objectives import OBJECTIVES, Terms
from aiconfig.outcome import Scored
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.scoring import Scoring
from aiconfig.space import Legal, Space
from aiconfig.study import Score, Studied, StudyOptions, run_study
from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.names import pick

LARGEST_SAMPLED: Final = 300_000
"""Points of a space up to which it is sampled: so many are enumerated in half a minute, in a few hundred MiB."""


@frozen
class Sampled:
    """What to search: the points that were studied, and every rejection of the space. `studied` says how."""

    proposed: tuple[Legal | Rejection, ...]
    studied: Studied

    def line(self) -> str:
        """For people."""
        done = self.studied
        kept = f", {done.kept:,} of them from the storage" if done.kept else ""
        end = "" if done.complete else ", stopped early"
        return (
            f"sampled by {done.sampler}: {len(done.trials):,} of {done.space:,} legal deployments{kept}{end}; "
            "the others were not looked at"
        )


def sample(request: SearchRequest, options: StudyOptions, objectives: Sequence[str] = ()) -> Sampled:
    """Study the space of a request by `objectives` (none: that of the request; several: their front).

    Limits are constraints, screened as the closed form screens them. Raises ConfigError for an objective that only a
    simulation knows, and what `run_study` raises.
    """
    names = tuple(objectives) or (request.objective,)
    chosen = [pick("objective", name, OBJECTIVES) for name in names]
    points = list(islice(Space(request), LARGEST_SAMPLED + 1))
    if len(points) > LARGEST_SAMPLED:
        raise ConfigError(
            f"--gpus {request.gpus}: there are more than {LARGEST_SAMPLED:,} deployments of so many, more than are "
            "sampled; give fewer GPUs, or fewer --engine, --mode, --weights and --kv to try"
        )
    legal = {one.candidate.name: one for one in points if isinstance(one, Legal)}
    candidates = [one.candidate for one in legal.values()]
    scoring = Scoring(request)
    terms = Terms(gpus_bought=request.gpus, usd_per_gpu_hour=request.usd_per_gpu_hour)

    def scores(asked: Sequence[Candidate]) -> list[Score]:
        return [_score(scoring.of(legal[candidate.name])) for candidate in asked]

    def _score(found: Scored | Rejection) -> Score:
        if isinstance(found, Rejection):
            return Score(why=found.line())
        values = tuple(objective.score(found.estimate, terms) for objective in chosen)
        for objective, value in zip(chosen, values, strict=True):
            if value == float("-inf"):
                raise ConfigError(
                    f"--objective {objective.name}: known from simulated runs alone, and a space of "
                    f"{len(candidates):,} is sampled by the closed form; take another, or a smaller space (--engine, "
                    "--mode, --gpus)"
                )
        return Score(values=values, violation=found.screening.distance or 0.0)

    about = f"{replace(request, origins={})!r} {names}"
    studied = run_study(candidates, scores, replace(options, objectives=len(chosen), about=about))
    tried = {trial.candidate.name for trial in studied.trials}
    proposed = tuple(one for one in points if isinstance(one, Rejection) or one.candidate.name in tried)
    return Sampled(proposed=proposed, studied=studied)
