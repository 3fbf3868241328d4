"""What each way to serve is worth: the best deployment under it against the same workers served in the plainest way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiconfig.objectives import OBJECTIVES, Terms
from aiconfig.outcome import Scored
from aiconfig.request import SearchRequest
from policies.frozen import frozen


@frozen
class Gain:
    """`name` is the best simulated candidate that is served so, `against` the same workers under the first of the
    request's servings. `change` is that of the objective's figure, relative, each at its own load (None: not known);
    more is not always better, see the objective."""

    serving: str
    name: str
    against: str
    change: float | None


def gains_of(request: SearchRequest, found: Sequence[Scored]) -> tuple[Gain, ...]:
    """A gain for every serving but the first that has a simulated pair to compare, in the order of the request."""
    base, *others = request.servings
    by_name = {one.candidate.name: one for one in found}
    gains = []
    for serving in others:
        for one in found:
            against = by_name.get(replace(one.candidate, serving=base).name)
            if one.candidate.serving == serving and against is not None:
                gains.append(_gain(request, one, against))
                break
    return tuple(gains)


def _gain(request: SearchRequest, one: Scored, against: Scored) -> Gain:
    terms = Terms(gpus_bought=request.gpus, usd_per_gpu_hour=request.usd_per_gpu_hour)
    new, old = (OBJECTIVES[request.objective].figure(each.estimate, terms) for each in (one, against))
    return Gain(
        serving=one.candidate.serving.text,
        name=one.candidate.name,
        against=against.candidate.name,
        change=new / old - 1.0 if old and new is not None else None,
    )
