"""Estimates that are there already (a table of measurements, results of other runs), judged and put in order by name.

The same judge as the search has; nothing is evaluated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from aiconfig.estimate import Estimate
from aiconfig.judge import Judgement, judge
from aiconfig.outcome import FOUND, NOT_FOUND
from policies.frozen import frozen
from reports.sla import Sla


@frozen
class Ranked:
    """All by name. `order` begins with the best, or with the nearest miss if `best` is None."""

    sla: Sla
    order: tuple[str, ...]
    judgements: Mapping[str, Judgement]
    best: str | None

    @property
    def exit_code(self) -> int:
        """0 if something keeps the limits, 3 if not."""
        return NOT_FOUND if self.best is None else FOUND

    @property
    def line(self) -> str:
        """The answer in one line."""
        if self.best is not None:
            return f"best: {self.best}"
        none = f"no configuration meets {', '.join(str(slo) for slo in self.sla.slos)}"
        if not self.order:
            return none
        limit = self.judgements[self.order[0]].binding
        if limit is None or limit.excess is None:
            return f"{none}; not judged"
        if math.isinf(limit.excess):
            return f"{none}; nearest: {self.order[0]}, which has no {limit.slo.metric}"
        return f"{none}; nearest: {self.order[0]}, {limit.excess * 100:.1f} % over on {limit.slo.metric}"


def rank_measured(estimates: Mapping[str, Estimate], sla: Sla) -> Ranked:
    """Least distance first, then most output tokens a second, then the simplest, then the name."""
    judgements = {name: judge(estimate, sla) for name, estimate in estimates.items()}

    def key(name: str) -> tuple[float, float, tuple[object, ...], str]:
        distance = judgements[name].distance
        far = math.inf if distance is None else distance
        return (far, -estimates[name].output_tokens_per_s, estimates[name].candidate.simplicity, name)

    order = tuple(sorted(estimates, key=key))
    best = next((name for name in order if judgements[name].kept), None)
    return Ranked(sla=sla, order=order, judgements=judgements, best=best)
