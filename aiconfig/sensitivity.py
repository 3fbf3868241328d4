"""What becomes of a candidate if the demand is not what was asked for: more load, longer prompts, a worker less.

Each variation is evaluated anew, by whoever `evaluate` is; nothing is extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from aiconfig.candidate import Candidate
from aiconfig.estimate import CLOSED_FORM, Estimate, Load
from aiconfig.evaluation import Evaluate
from aiconfig.judge import Judgement, judge, screened
from aiconfig.workload import Workload
from policies.frozen import frozen
from reports.sla import Sla

LOADS: Final = (0.5, 1.5, 2.0)
LENGTHS: Final = (2.0,)


@frozen
class Variation:
    """One change of the demand; `estimate` is None if the deployment cannot take it (it does not fit, or the queue
    grows), and then nothing is judged."""

    name: str
    estimate: Estimate | None
    judgement: Judgement | None


def variations(
    candidate: Candidate, workload: Workload, load: Load, sla: Sla | None, evaluate: Evaluate
) -> tuple[Variation, ...]:
    """Every variation of the candidate at that load, the load itself first."""
    found = []
    for name, one, demand, at in _cases(candidate, workload, load):
        estimate = evaluate(one, demand, at)
        found.append(Variation(name=name, estimate=estimate, judgement=_judged(estimate, sla)))
    return tuple(found)


def _cases(candidate: Candidate, workload: Workload, load: Load) -> Iterator[tuple[str, Candidate, Workload, Load]]:
    yield "as asked for", candidate, workload, load
    for times in LOADS:
        if load.users is None:
            yield f"load x{times:g}", candidate, workload, Load(rps=(load.rps or 0.0) * times)
        elif round(load.users * times) not in (0, load.users):
            yield f"load x{times:g}", candidate, workload, Load(users=round(load.users * times))
    if workload.trace is None:
        for times in LENGTHS:
            yield f"prompts x{times:g}", candidate, replace(workload, isl=int(workload.isl * times)), load
            yield f"answers x{times:g}", candidate, replace(workload, osl=int(workload.osl * times)), load
        if workload.prefix_tokens:
            yield "nothing cached", candidate, replace(workload, prefix_tokens=0), load
    for at, pool in enumerate(candidate.pools):
        if pool.replicas > 1:
            fewer = replace(pool, replicas=pool.replicas - 1)
            pools = (*candidate.pools[:at], fewer, *candidate.pools[at + 1 :])
            yield f"one {pool.role} worker less", replace(candidate, pools=pools), workload, load


def _judged(estimate: Estimate | None, sla: Sla | None) -> Judgement | None:
    if estimate is None:
        return None
    return screened(estimate, sla) if estimate.level == CLOSED_FORM else judge(estimate, sla)
