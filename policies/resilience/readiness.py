"""Whether a model can be served now: one rule for /ready, the list of models, the router and the planner.

Ready means: for every role that the deployment needs there is a worker that is registered, answers, does not drain and
may be chosen. Whether a process is alive is another question, and starting without workers is no error.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.cluster.ids import Role
from policies.cluster.state import ClusterView
from policies.frozen import frozen


@frozen
class Readiness:
    """`missing` roles, and for each of them what became of its workers, in words."""

    missing: tuple[Role, ...]
    why: tuple[str, ...]

    @property
    def ready(self) -> bool:
        return not self.missing

    @property
    def text(self) -> str:
        """One line for an answer 503; empty when ready."""
        return "; ".join(self.why)


def readiness(view: ClusterView, needs: Iterable[Role], lora: str | None = None) -> Readiness:
    """Whether requests (of one adapter) can be served. `needs` are the roles without which nothing works."""
    missing, why = [], []
    for role in needs:
        if not view.live_for(lora, role):
            missing.append(role)
            why.append(_story(view, role, lora))
    return Readiness(missing=tuple(missing), why=tuple(why))


def _story(view: ClusterView, role: Role, lora: str | None) -> str:
    """What became of the workers of a role."""
    workers = [worker for worker in view.workers.values() if worker.up.role is role]
    if not workers:
        return f"no {role.value} worker is registered"
    draining = sum(worker.draining for worker in workers)
    fenced = sum(bool(worker.fences) and not worker.draining for worker in workers)
    parts = [f"{draining} draining"] if draining else []
    parts += [f"{fenced} fenced"] if fenced else []
    other = len(workers) - draining - fenced
    parts += [f"{other} without adapter {lora!r}"] if other else []
    return f"no {role.value} worker takes new work: {', '.join(parts)}"
