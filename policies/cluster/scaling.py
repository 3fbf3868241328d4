"""How a change of worker counts goes on, and who may change what it must keep to.

A decision is every order with the same `decision_id`. A connector that takes counts (Kubernetes, a virtual one) sums
them into a target per role; each decision ends with exactly one `ScaleDone` or `ScaleFailed`.
"""

from __future__ import annotations

from policies.cluster.events import Event
from policies.cluster.ids import Role
from policies.frozen import frozen


@frozen
class RoleProgress:
    """Workers of one role: that take work, that are on their way up, that are on their way out."""

    role: Role
    ready: int
    pending: int
    draining: int


@frozen
class ScaleEvent(Event):
    """A fact about one decision."""

    decision_id: int


@frozen
class ScaleProgress(ScaleEvent):
    """How far a decision has come."""

    roles: tuple[RoleProgress, ...]


@frozen
class ScaleDone(ScaleEvent):
    """Everything that the decision asked for is so."""


@frozen
class ScaleFailed(ScaleEvent):
    """The decision was given up: who ordered it looks again at what there is."""

    reason: str


@frozen
class GpuBudgetChanged(Event):
    """Somebody who runs the cluster set how many GPUs may be used, and must be at least (None: no bound)."""

    max_gpus: int | None
    min_gpus: int | None = None
