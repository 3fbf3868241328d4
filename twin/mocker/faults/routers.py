"""What whoever runs the cluster does to its routers while they run: other limits on load.

It tells them and does nothing itself; what they make of it is theirs.
"""

from __future__ import annotations

from policies.cluster.events import BusyThresholdsChanged
from twin.mocker.faults.stage import Entry, Stage
from twin.scenario.model import Fault, Occurrence


def set_limits(stage: Stage, fault: Fault, occurrence: Occurrence, entry: Entry) -> str | None:
    """Limits of `[router.busy]` change from now on; those not named stay as they are."""
    told = (f"{one.name} = {'none' if one.limit is None else f'{one.limit:g}'}" for one in fault.changes)
    entry.target = ", ".join(told)
    stage.world.post(BusyThresholdsChanged(at_s=stage.now_s, changes=fault.changes))
    return None
