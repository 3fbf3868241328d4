"""One deployment priced: the closed form and a simulation of the same load side by side, and what they are made of."""

from __future__ import annotations

import json
from typing import Final

from aiconfig.breakdown import PoolBreakdown, breakdown
from aiconfig.candidate import Candidate
from aiconfig.closed_form import ClosedForm
from aiconfig.estimate import Estimate, Load
from aiconfig.evaluate import Simulation, setting_of
from aiconfig.evaluation import rejection
from aiconfig.finalists import Turn, take_turn
from aiconfig.judge import Judgement, judge, screened
from aiconfig.load_point import closed_form_load
from aiconfig.memory import Fit, fit
from aiconfig.patience import Patience
from aiconfig.plain import to_plain
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from policies.errors import ConfigError
from policies.frozen import frozen

SCHEMA: Final = "aiconfig.estimate/1"


@frozen
class Price:
    """What a deployment does at a load. `simulated` is None if that was not asked for; `judgement` is the verdict on
    the better of the two estimates."""

    candidate: Candidate
    request: SearchRequest
    load: Load
    fit: Fit
    closed: Estimate
    simulated: Estimate | None
    judgement: Judgement
    pools: tuple[PoolBreakdown, ...]
    schema: str = SCHEMA

    @property
    def estimate(self) -> Estimate:
        """The better one."""
        return self.simulated or self.closed

    def to_json(self) -> str:
        """One document, the same for equal prices."""
        return json.dumps(to_plain(self), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def price(candidate: Candidate, request: SearchRequest, *, simulates: bool = True) -> Price | Rejection:
    """The deployment at the request's load; without one, at the largest that keeps its limits, or with one user.

    A Rejection: what engines would refuse, what does not fit, or a load that it cannot take.
    """
    broken = rejection(candidate, request.physics)
    if broken is not None:
        return broken
    room = fit(candidate, request.workload, request.load, request.hardware)
    if isinstance(room, Rejection):
        return room
    closed_form = ClosedForm(request.workload, request.physics)
    closed = _closed(closed_form, candidate, room, request)
    if isinstance(closed, Rejection):
        return closed
    simulated = None
    if simulates:
        found = _simulated(candidate, request, closed.load)
        if isinstance(found, Rejection):
            return found
        simulated = found
        again = closed_form.estimate(candidate, simulated.load, room)
        closed = closed if again is None else again
    best = simulated or closed
    return Price(
        candidate=candidate,
        request=request,
        load=best.load,
        fit=room,
        closed=closed,
        simulated=simulated,
        judgement=judge(best, request.sla) if simulates else screened(best, request.sla),
        pools=breakdown(candidate, request.workload, room, best, request.physics),
    )


def _closed(closed_form: ClosedForm, candidate: Candidate, room: Fit, request: SearchRequest) -> Estimate | Rejection:
    if request.load is not None:
        found = closed_form.estimate(candidate, request.load, room)
        if found is not None:
            return found
        has, needs = closed_form.most(candidate, room).rps, request.load.rps
        return Rejection(name=candidate.name, reason="unstable", needs=needs, has=has, unit="requests/s")
    if request.workload.arrivals != "closed" and request.sla is None:
        raise ConfigError("at which load? give --rate X, or --sla for the largest that keeps it")
    point = closed_form_load(closed_form, candidate, room, request.sla) if request.sla is not None else None
    return point[1] if point is not None else closed_form.idle(candidate, room)


def _simulated(candidate: Candidate, request: SearchRequest, start: Load) -> Estimate | Rejection:
    """By simulation: at the load itself where it was asked for, else the largest that keeps the limits."""
    patience = Patience()
    simulate = patience.asking(Simulation(setting_of(request)))
    found = take_turn(Turn(request=request, candidate=candidate, load=start), simulate)
    if patience.interrupted:
        raise KeyboardInterrupt
    if isinstance(found, Rejection):
        return found
    runs = found.runs if found.best is None else (found.best,)
    if not runs:
        return Rejection(name=candidate.name, reason="unstable", detail=f"no run at {start} came to its end")
    return min(runs, key=lambda run: judge(run, request.sla).distance or 0.0)
