"""What each way to serve is worth: the best deployment under it against the same workers served in the plainest way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiconfig.objectives import OBJECTIVES, Terms
from aiconfig.outcome import Scored
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from policies.frozen import frozen


@frozen
class Gain:
    """`name` is the best simulated candidate that is served so, `against` the same workers under the first of the
    request's servings. `change` is that of the objective's figure, relative, each at its own load; more is not always
    better, see the objective. It is None where a figure is not known; `refused` is the reason if `against` has none."""

    serving: str
    name: str
    against: str
    change: float | None
    refused: str | None = None


def gains_of(request: SearchRequest, found: Sequence[Scored], rejections: Sequence[Rejection] = ()) -> tuple[Gain, ...]:
    """A gain for every serving but the first under which somebody was simulated who was also asked under the first, in
    the order of the request. `found` are those that were simulated, best first."""
    base, *others = request.servings
    by_name = {one.candidate.name: one for one in found}
    refused = {one.name: one.reason for one in rejections}
    gains = []
    for serving in others:
        for one in found:
            against = replace(one.candidate, serving=base).name
            if one.candidate.serving == serving and (against in by_name or against in refused):
                gains.append(_gain(request, one, against, by_name.get(against), refused.get(against)))
                break
    return tuple(gains)


def _gain(request: SearchRequest, one: Scored, name: str, against: Scored | None, refused: str | None) -> Gain:
    terms = Terms(gpus_bought=request.gpus, usd_per_gpu_hour=request.usd_per_gpu_hour)
    figure = OBJECTIVES[request.objective].figure
    new = figure(one.estimate, terms)
    old = None if against is None else figure(against.estimate, terms)
    return Gain(
        serving=one.candidate.serving.text,
        name=one.candidate.name,
        against=name,
        change=new / old - 1.0 if old and new is not None else None,
        refused=None if against is not None else refused,
    )
