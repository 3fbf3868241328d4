"""What a search came to as one value that can be kept: result.json is that value and nothing else.

It holds what was found, not how people read it: see `answer` for the terminal and `page` for the browser. Equal
searches give equal bytes: no date, no host, no time taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aiconfig.estimate import CLOSED_FORM, Estimate
from aiconfig.gains import Gain, gains_of
from aiconfig.objectives import OBJECTIVES, Objective, Terms
from aiconfig.outcome import Miss, Scored, SearchResult
from aiconfig.pareto import AXES, Axis, front
from aiconfig.plain import from_plain, to_plain
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.sensitivity import Variation
from policies.errors import ConfigError
from policies.frozen import frozen

SCHEMA: Final = "aiconfig.result/1"
RESULT_JSON: Final = "result.json"
MOST_SHOWN: Final = 50
"""Candidates that are kept with all their figures where nothing was simulated; all are in candidates.parquet."""


@frozen
class Counts:
    """How many candidates were legal, had an estimate, were simulated; and those left out, by reason."""

    legal: int
    scored: int
    simulated: int
    reasons: Mapping[str, int]


@frozen
class Result:
    """A finished search.

    `found` are candidates in order: those that keep the limits best first, then the others by how far they miss them;
    those that were simulated, or the first ones by the closed form if none was. `front` names those of them that no
    other is better than in every one of `axes`. `examples` has one rejection of each reason. `nearest` is there if
    nothing keeps the limits, `gains` say what ways to serve are worth where several were simulated, `variations` are
    those of the first of `found`. `complete` is False after Ctrl-C and where time ran out. `files` are those written
    beside, by path.
    """

    request: SearchRequest
    found: tuple[Scored, ...]
    front: tuple[str, ...]
    axes: tuple[str, ...]
    counts: Counts
    examples: tuple[Rejection, ...]
    nearest: Miss | None
    variations: tuple[Variation, ...]
    provenance: tuple[str, ...]
    notes: tuple[str, ...]
    gains: tuple[Gain, ...] = ()
    soft: bool = False
    complete: bool = True
    files: tuple[str, ...] = ()
    schema: str = SCHEMA

    @property
    def best(self) -> Scored | None:
        """What to deploy: the first that keeps the limits, or with soft limits the first of all."""
        if self.soft:
            return self.found[0] if self.found else None
        return next((one for one in self.found if one.judgement.kept), None)

    @property
    def simulated(self) -> bool:
        """Whether `found` are figures of simulations."""
        return any(one.estimate.level != CLOSED_FORM for one in self.found)

    def best_of(self, mode: str) -> Scored | None:
        """The first candidate of a mode."""
        return next((one for one in self.found if one.candidate.mode == mode), None)

    def named(self, name: str) -> Scored | None:
        """A candidate by its name, or by its place in the table, from 1."""
        if name.isdecimal():
            place = int(name)
            return self.found[place - 1] if 1 <= place <= len(self.found) else None
        return next((one for one in self.found if one.candidate.name == name), None)

    def to_json(self) -> str:
        """The bytes of result.json."""
        return json.dumps(to_plain(self), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def objective_of(request: SearchRequest) -> Objective:
    """What the request calls best."""
    return OBJECTIVES[request.objective]


def terms_of(request: SearchRequest) -> Terms:
    """What objectives need beside an estimate."""
    return Terms(gpus_bought=request.gpus, usd_per_gpu_hour=request.usd_per_gpu_hour)


def result_of(
    outcome: SearchResult,
    *,
    objectives: Sequence[str] = (),
    variations: tuple[Variation, ...] = (),
    soft: bool = False,
    complete: bool = True,
    notes: tuple[str, ...] = (),
) -> Result:
    """What is kept of a search. Several `objectives` are the axes of the front, instead of the usual ones."""
    simulated = tuple(one for one in outcome.ranked if one.estimate.level != CLOSED_FORM)
    found = simulated or outcome.ranked[:MOST_SHOWN]
    fronted: tuple[Scored, ...] = outcome.front
    axes: tuple[str, ...] = AXES
    if len(objectives) > 1:
        kept = [one for one in simulated or outcome.ranked if not one.distance]
        terms = terms_of(outcome.request)
        fronted = tuple(front(kept, lambda one: one.estimate, [_axis(name, terms) for name in objectives]))
        axes = tuple(objectives)
    return Result(
        request=outcome.request,
        found=found,
        front=tuple(one.candidate.name for one in fronted),
        axes=axes,
        counts=Counts(legal=outcome.legal, scored=outcome.scored, simulated=len(simulated), reasons=outcome.counts),
        examples=_examples(outcome.rejections),
        nearest=outcome.nearest,
        variations=variations,
        provenance=outcome.provenance,
        notes=(*outcome.notes, *notes),
        gains=gains_of(outcome.request, simulated, outcome.rejections),
        soft=soft,
        complete=complete,
    )


def _axis(name: str, terms: Terms) -> Axis:
    objective = OBJECTIVES[name]

    def axis(estimate: Estimate) -> float | None:
        score = objective.score(estimate, terms)
        return score if score > float("-inf") else None

    return axis


def _examples(rejections: Sequence[Rejection]) -> tuple[Rejection, ...]:
    first: dict[str, Rejection] = {}
    for one in rejections:
        first.setdefault(one.reason, one)
    return tuple(first[reason] for reason in sorted(first))


def read_result(path: Path) -> Result:
    """The result in a file, or in the folder of a search. Raises ConfigError for what is none."""
    file = path / RESULT_JSON if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: is not there; give the folder of a search, or its {RESULT_JSON}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not text; give the folder of a search, or its {RESULT_JSON}") from None
    try:
        plain = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: is not JSON ({error.msg})") from None
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"{file}: schema {schema!r}, this version reads {SCHEMA!r}; search again")
    return from_plain(Result, plain, str(file))
