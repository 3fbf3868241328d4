"""The Kubernetes connector: replicas of Deployments, StatefulSets, LeaderWorkerSets and whatever else has a scale.

It patches `spec.replicas` of the scale subresource and nothing else, and believes no status of an older generation.
Whatever else scales the same object is found out: an autoscaler is refused, a hand edit is adopted or undone, and said
once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from executors.connectors.kubernetes_api import KubernetesApi, Refused
from executors.connectors.kubernetes_objects import Scaled, patch_line
from executors.connectors.protocol import ConnectorError, Rehearsed, Seen
from policies.cluster.ids import Role
from policies.errors import ConfigError

log = logging.getLogger(__name__)

CONFLICTS: Final = 3
"""How often a write is tried again after somebody else's came between."""

DriftPolicy = Literal["adopt", "enforce"]


class KubernetesConnector:
    """`objects` and `roles` by group. `drift_policy`: what becomes of replicas that somebody else has set. `dry_run`:
    patches go out with dryRun=All and are said, and every decision fails for that reason.

    `external_changes` counts changes that were not ours.
    """

    name = "kubernetes"
    watches = True

    def __init__(
        self,
        api: KubernetesApi,
        objects: Mapping[str, Scaled],
        roles: Mapping[str, Role],
        *,
        drift_policy: DriftPolicy = "adopt",
        dry_run: bool = False,
        poll_s: float,
        timeout_s: float,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.roles = roles
        self.poll_s, self.timeout_s = poll_s, timeout_s
        self.external_changes = 0
        self._api = api
        self._objects = objects
        self._drift_policy = drift_policy
        self._dry_run = dry_run
        self._say = say
        self._last: dict[str, int] = {}

    async def open(self) -> None:
        """Read every object and rehearse a patch of what it has: rights that are missing are found out now."""
        for group, scaled in self._objects.items():
            try:
                self._last[group] = _replicas(await self._api.scale(scaled), scaled)
                await self._api.write(scaled, self._last[group], dry_run=True)
                await self._api.object(scaled)
                await self._refuse_autoscaler(scaled)
            except Refused as refused:
                raise ConfigError(_explained(scaled, refused)) from refused
            except ConnectorError as error:
                raise ConfigError(str(error)) from error

    async def settled(self) -> None:
        """A patch may follow a patch at once."""

    async def asked(self) -> Mapping[str, int | None]:
        return {group: await self._asked(group) for group in self._objects}

    async def _asked(self, group: str) -> int:
        """How many replicas there are to be: what we wrote last, or somebody else's number where that is adopted."""
        scaled, last = self._objects[group], self._last[group]
        there = _replicas(await self._api.scale(scaled), scaled)
        if there == last:
            return last
        await self._refuse_autoscaler(scaled)
        self.external_changes += 1
        if self._drift_policy == "adopt":
            log.warning("%s: somebody set replicas from %d to %d: adopted", scaled, last, there)
            self._last[group] = there
        else:
            log.warning("%s: somebody set replicas from %d to %d: set back", scaled, last, there)
            await self._put(group, last)
        return self._last[group]

    async def write(self, change: Mapping[str, int], base: Mapping[str, int]) -> Mapping[str, int]:
        targets = {group: max(0, base[group] + by) for group, by in change.items()}
        if self._dry_run:
            raise Rehearsed(await self.rehearse(change, base))
        written: list[str] = []
        try:
            for group in sorted(targets, key=lambda one: change[one]):  # what frees goes first
                targets[group] = await self._write(group, base[group], change[group])
                written.append(group)
        except ConnectorError:
            for group in written:  # half a decision is none
                with contextlib.suppress(ConnectorError):
                    await self._put(group, max(0, targets[group] - change[group]))
            raise
        return targets

    async def _write(self, group: str, base: int, by: int) -> int:
        for left in reversed(range(CONFLICTS + 1)):
            target = max(0, base + by)
            try:
                await self._put(group, target)
                return target
            except Refused as refused:
                if refused.status != 409 or not left:
                    raise
                base = await self._asked(group)
        raise AssertionError

    async def _put(self, group: str, replicas: int) -> None:
        scaled = self._objects[group]
        after = await self._api.write(scaled, replicas, dry_run=self._dry_run)
        if not self._dry_run:
            self._last[group] = _replicas(after, scaled)

    async def rehearse(self, change: Mapping[str, int], base: Mapping[str, int]) -> str:
        """The server checks the patches and keeps nothing."""
        said = []
        for group, by in change.items():
            replicas = max(0, base[group] + by)
            await self._api.write(self._objects[group], replicas, dry_run=True)
            said.append(patch_line(self._objects[group], replicas))
            self._say(f"dry run: {said[-1]}")
        return f"dry run: {'; '.join(said)}"

    async def look(self) -> Seen:
        waits = []
        for group, scaled in self._objects.items():
            wanted = await self._asked(group)
            missing = _missing(await self._api.object(scaled), scaled, wanted)
            if missing:
                waits.append(f"{scaled}: {missing}{await self._why(scaled)}")
        return Seen(confirmed=not waits, waits_for="; ".join(waits), targets=dict(self._last))

    async def _why(self, scaled: Scaled) -> str:
        """What the pods of an object wait for, where it says which they are."""
        reasons: Sequence[str] = ()
        with contextlib.suppress(Refused):  # it only helps people
            selector = (await self._api.scale(scaled)).get("status", {}).get("selector")
            reasons = await self._api.pods_wait_for(scaled.namespace, selector) if selector else ()
        return f" ({', '.join(reasons)})" if reasons else ""

    async def give_up(self, undo: Mapping[str, int]) -> None:
        """Replicas that nobody waits for any more are not asked for any more: they may need GPUs that others have."""
        if undo:
            asked = await self.asked()
            base = {group: asked[group] or 0 for group in undo}
            await self.write(undo, base)

    async def close(self) -> None:
        await self._api.close()

    async def _refuse_autoscaler(self, scaled: Scaled) -> None:
        for one in await self._api.autoscalers(scaled.namespace):
            target = one["spec"]["scaleTargetRef"]
            group = str(target.get("apiVersion", "")).rpartition("/")[0]
            if (target["kind"], target["name"]) == (scaled.resource.kind, scaled.name) and group in (
                "",
                scaled.resource.group,
            ):
                raise ConnectorError(
                    f"{scaled} is scaled by HorizontalPodAutoscaler {one['metadata']['name']} already: two that scale "
                    "one object undo each other; remove one of them"
                )


class PrintedConnector:
    """A dry run without a cluster: patches are said, and every decision fails for that reason."""

    name = "kubernetes (dry run)"
    watches = False

    def __init__(
        self,
        objects: Mapping[str, Scaled],
        roles: Mapping[str, Role],
        *,
        poll_s: float,
        timeout_s: float,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.roles = roles
        self.poll_s, self.timeout_s = poll_s, timeout_s
        self._objects = objects
        self._say = say

    async def open(self) -> None:
        """There is nothing to reach."""

    async def settled(self) -> None:
        """Nothing is under way."""

    async def asked(self) -> Mapping[str, int | None]:
        return dict.fromkeys(self._objects)

    async def write(self, change: Mapping[str, int], base: Mapping[str, int]) -> Mapping[str, int]:
        raise Rehearsed(await self.rehearse(change, base))

    async def rehearse(self, change: Mapping[str, int], base: Mapping[str, int]) -> str:
        said = [patch_line(self._objects[group], max(0, base[group] + by)) for group, by in change.items()]
        for line in said:
            self._say(f"dry run: {line}")
        return f"dry run: {'; '.join(said)}"

    async def look(self) -> Seen:
        return Seen(confirmed=True)

    async def give_up(self, undo: Mapping[str, int]) -> None:
        """Nothing was asked for."""

    async def close(self) -> None:
        """Nothing is open."""


def _replicas(scale: Mapping[str, Any], scaled: Scaled) -> int:
    """How many a scale subresource asks for; Kubernetes leaves a 0 out."""
    spec = scale.get("spec")
    if not isinstance(spec, Mapping):
        raise ConnectorError(f"{scaled}: its scale subresource has no spec; name a resource that can be scaled")
    return int(spec.get("replicas", 0))


def _missing(whole: Mapping[str, Any], scaled: Scaled, wanted: int) -> str:
    """What an object still lacks of so many replicas; empty where they are there."""
    status: Mapping[str, Any] = whole.get("status") or {}
    generation, observed = whole["metadata"].get("generation"), status.get("observedGeneration")
    if observed is None and scaled.resource.generations:
        observed = 0
    if None not in (generation, observed) and observed < generation:
        return f"its controller has not seen generation {generation} yet"
    replicas = int(status.get("replicas", 0))
    if replicas != wanted:
        return f"{replicas} of {wanted} replicas"
    ready = status.get("readyReplicas", 0 if scaled.resource.counts_ready else replicas)
    return "" if ready == wanted else f"{ready} of {wanted} ready"


def _explained(scaled: Scaled, refused: Refused) -> str:
    match refused.status:
        case 401 | 403:
            return f"{refused}. The planner's role needs these rules (docs/planner.md):\n{scaled.rule()}"
        case 404:
            return (
                f"{refused}. Is there {scaled}, of {scaled.resource.group}/{scaled.resource.version}? Name one that is"
            )
        case _:
            return str(refused)
