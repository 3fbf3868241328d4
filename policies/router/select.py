"""Who may be chosen, and which one when costs are equal or a temperature is set.

Candidates always come sorted by worker id, so that an index means the same in every run. Draws are counter-based
(`policies.cluster.draws`): a choice is a function of seed, request and costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from policies.cluster.draws import draw, pick
from policies.cluster.events import RequestArrived, RequestMigrated
from policies.cluster.ids import Place, Role
from policies.cluster.state import WorkerView
from policies.router.settings import TieBreak

NOT_ALLOWED, FENCED, EXCLUDED, MODEL, ADAPTER, TAINT = "not_allowed", "fenced", "excluded", "model", "adapter", "taint"
BUSY, ENGINE = "all_busy", "engine_limit"
"""Bars that load alone puts up; when it does so on all workers, they are the codes of the refusal."""


_NAMED = 5
"""Adapters that a refusal names."""


class Bar(NamedTuple):
    """Why a worker cannot get a request: one word, and a text that follows "it is". `by_prompts`: too many prompts."""

    code: str
    text: str
    by_prompts: bool = False


def why_not(worker: WorkerView, event: RequestArrived, required_taints: Sequence[str] = ()) -> Bar | None:
    """The first thing that keeps a worker from a request, whatever its load; None when nothing does.

    Nothing here is ever bypassed, not by a pin, a session or a preference either.
    """
    hints = event.hints
    if hints is not None and hints.allowed is not None and worker.worker_id not in hints.allowed:
        return Bar(NOT_ALLOWED, "not among the workers allowed")
    if worker.draining:
        return Bar(FENCED, "draining")
    if worker.fences:
        return Bar(FENCED, f"fenced ({', '.join(sorted(cause.value for cause in worker.fences))})")
    if isinstance(event, RequestMigrated) and worker.worker_id in event.excluded:
        return Bar(EXCLUDED, "where the request failed before")
    return unfit(worker, event, required_taints)


def unfit(worker: WorkerView, event: RequestArrived, required_taints: Sequence[str] = ()) -> Bar | None:
    """What a worker lacks to run a request at all: the model, the adapter, a taint."""
    hints, up = event.hints, worker.up
    if hints is not None and hints.model is not None and up.models is not None and hints.model not in up.models:
        return Bar(MODEL, f"not one that serves model {hints.model!r}")
    if not up.serves(event.lora):
        return Bar(ADAPTER, f"not one that serves adapter {event.lora!r}")
    for taint in (*required_taints, *(hints.required_taints if hints is not None else ())):
        if taint not in up.taints:
            return Bar(TAINT, f"without the required taint {taint}")
    return None


class Refusal(NamedTuple):
    """Why a request is not sent anywhere; `code` is a word of router.md's table of refusals. `by_prompts`: too many of
    them are the reason (None: load is not)."""

    code: str
    reason: str
    by_prompts: bool | None = None


def lacks(
    event: RequestArrived, mine: Sequence[WorkerView], role: Role | None, required_taints: Sequence[str] = ()
) -> Refusal | None:
    """What none of the workers (of one role) has, whether it takes new work or not."""
    hints = event.hints
    model = hints.model if hints is not None else None
    if model is not None and not any(w.up.models is None or model in w.up.models for w in mine):
        return Refusal("unknown_model", f"no worker serves model {model!r}")
    if event.lora and not any(worker.up.serves(event.lora) for worker in mine):
        served = {name for worker in mine for name in worker.up.loras or ()}
        names = f"{', '.join(sorted(served)[:_NAMED])}{', ...' if len(served) > _NAMED else ''}" or "none"
        kind = f"{role.value} " if role is not None else ""
        return Refusal("unknown_lora", f"no {kind}worker serves adapter {event.lora!r}; there are {names}")
    for taint in (*required_taints, *(hints.required_taints if hints is not None else ())):
        if mine and not any(taint in worker.up.taints for worker in mine):
            return Refusal("missing_taint", f"no worker has the required taint {taint}")
    return None


class Ties:
    """Chooses among equals. `note` each dispatch: the rule least_recent needs to know who was used when."""

    __slots__ = ("_noted", "_rule", "_seed", "_turn")

    def __init__(self, rule: TieBreak, seed: int) -> None:
        self._rule = rule
        self._seed = seed
        self._noted: dict[Place, int] = {}
        self._turn = 0

    def note(self, place: Place) -> None:
        """A request was sent to this worker."""
        if self._rule == "least_recent":
            self._turn += 1
            self._noted[place] = self._turn

    def forget(self, place: Place) -> None:
        """The worker is gone."""
        self._noted.pop(place, None)

    def choose(self, draw_id: str, equals: Sequence[Place]) -> int:
        """Index into `equals` (sorted by id, at least two)."""
        if self._rule == "lowest_id":
            return 0
        if self._rule == "least_recent":
            turns = [self._noted.get(place, 0) for place in equals]
            return turns.index(min(turns))
        return self._drawn(draw_id, len(equals))

    def _drawn(self, draw_id: str, n: int) -> int:
        return pick(draw(self._seed, "tie", draw_id), n)

    def lowest(self, draw_id: str, costs: Sequence[float], places: Sequence[Place]) -> tuple[int, str]:
        """Index of the lowest cost and the rule that decided, `min` or `tie`; equal means exactly equal."""
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least), "min"
        equals = [i for i, cost in enumerate(costs) if cost == least]
        if self._rule == "seeded":  # it does not matter who they are
            return equals[self._drawn(draw_id, len(equals))], "tie"
        return equals[self.choose(draw_id, [places[i] for i in equals])], "tie"


def shares(costs: Sequence[float], temperature: float) -> list[float]:
    """Probability of each candidate at a temperature above 0: p ~ exp(-(cost - min) / ((max - min) * T))."""
    least, spread = min(costs), max(costs) - min(costs)
    if spread == 0:
        return [1 / len(costs)] * len(costs)
    odds = [math.exp(-(cost - least) / (spread * temperature)) for cost in costs]
    total = sum(odds)
    return [odd / total for odd in odds]


def softmax(u: float, costs: Sequence[float], temperature: float) -> int:
    """Index of the candidate whose share of [0, 1) u falls into; the last one when rounding leaves a gap."""
    reached = 0.0
    for i, share in enumerate(shares(costs, temperature)):
        reached += share
        if u < reached:
            return i
    return len(costs) - 1
