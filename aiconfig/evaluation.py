"""One question to whoever can answer it: what does this candidate do under that demand at this load?

The closed form answers here; a simulation answers the same question elsewhere. None: it does not fit, or its queue
would grow for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from aiconfig.candidate import Candidate
from aiconfig.closed_form import ClosedForm
from aiconfig.estimate import CLOSED_FORM, Estimate, Load
from aiconfig.judge import judge
from aiconfig.legality import Worker, pair_rejection, worker_rejection
from aiconfig.load_point import broken
from aiconfig.memory import fit, host_rejection, placement
from aiconfig.physics import SHIPPED, Physics, uncalibrated
from aiconfig.reasons import Rejection
from aiconfig.workload import Workload
from reports.sla import Sla
from twin.perf.hardware import find_gpu
from twin.perf.models import find_model

Evaluate = Callable[[Candidate, Workload, Load], Estimate | None]


class ClosedFormEvaluation:
    """`Evaluate` by the closed form; what is not legal or does not fit is None as well."""

    def __init__(self, physics: Physics = SHIPPED) -> None:
        self._physics = physics
        self._forms: dict[Workload, ClosedForm] = {}

    def __call__(self, candidate: Candidate, workload: Workload, load: Load) -> Estimate | None:
        if rejection(candidate, self._physics) is not None:
            return None
        room = fit(candidate, workload, None, self._physics.hardware)
        if isinstance(room, Rejection):
            return None
        form = self._forms.get(workload)
        if form is None:
            form = self._forms[workload] = ClosedForm(workload, self._physics)
        return form.estimate(candidate, load, room)


def rejection(candidate: Candidate, physics: Physics = SHIPPED) -> Rejection | None:
    """The rule that a candidate breaks, whatever the budget; None if engines would start it."""
    hardware = physics.hardware
    model = find_model(candidate.model)
    for pool in candidate.pools:
        worker = Worker(
            name=candidate.name,
            engine=candidate.engine,
            model=model,
            gpu=find_gpu(pool.gpu, hardware),
            pool=pool,
            nextn=candidate.nextn,
        )
        found = worker_rejection(worker)
        if found is None and physics.strict:
            placed = placement(candidate.model, pool, hardware)
            found = uncalibrated(candidate.name, candidate.engine, placed, physics)
        if found is not None:
            return found
    if candidate.mode == "disagg":
        prefill, decode = candidate.pools
        found = pair_rejection(candidate.name, model, prefill, decode, find_gpu(prefill.gpu, hardware))
        if found is not None:
            return found
    return host_rejection(candidate, hardware)


def keeps(estimate: Estimate | None, sla: Sla | None) -> bool:
    """Whether the limits are kept, as far as an estimate of its level can tell."""
    if estimate is None:
        return False
    return not broken(estimate, sla) if estimate.level == CLOSED_FORM else judge(estimate, sla).kept
