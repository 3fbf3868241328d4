"""What a connector may scale in Kubernetes: objects with a `/scale` subresource, as a person writes them down."""

from __future__ import annotations

import json
import re
from typing import Final

from policies.errors import ConfigError
from policies.frozen import frozen

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@frozen
class Resource:
    """A kind of object. `counts_ready`: its status has readyReplicas, where absent is 0; `generations`: and the
    generation that it tells of. Whoever leaves a field out is not asked for it."""

    kind: str
    group: str
    version: str
    plural: str
    counts_ready: bool = False
    generations: bool = False


KNOWN: Final = (
    Resource(kind="Deployment", group="apps", version="v1", plural="deployments", counts_ready=True, generations=True),
    Resource(
        kind="StatefulSet", group="apps", version="v1", plural="statefulsets", counts_ready=True, generations=True
    ),
    Resource(
        kind="LeaderWorkerSet",
        group="leaderworkerset.x-k8s.io",
        version="v1",
        plural="leaderworkersets",
        counts_ready=True,
    ),
    Resource(
        kind="DynamoGraphDeploymentScalingAdapter",
        group="nvidia.com",
        version="v1alpha1",
        plural="dynamographdeploymentscalingadapters",
    ),
)


@frozen
class Scaled:
    """The object whose replicas are the workers of a group."""

    resource: Resource
    namespace: str
    name: str

    @property
    def path(self) -> str:
        """Of its scale subresource."""
        one = self.resource
        return f"/apis/{one.group}/{one.version}/namespaces/{self.namespace}/{one.plural}/{self.name}/scale"

    def __str__(self) -> str:
        return f"{self.resource.kind} {self.namespace}/{self.name}"

    def rule(self) -> str:
        """The RBAC rules that the planner's role needs for it."""
        one = self.resource
        rules = (
            ([one.group], [one.plural], ["get"]),
            ([one.group], [f"{one.plural}/scale"], ["get", "patch"]),
            ([""], ["pods"], ["get", "list"]),
            (["autoscaling"], ["horizontalpodautoscalers"], ["list"]),
        )
        plain = [{"apiGroups": groups, "resources": resources, "verbs": verbs} for groups, resources, verbs in rules]
        return "\n".join(f"  - {json.dumps(rule)}" for rule in plain)


def patch(replicas: int) -> dict[str, object]:
    """The merge patch of a scale subresource."""
    return {"spec": {"replicas": replicas}}


def patch_line(scaled: Scaled, replicas: int) -> str:
    """A patch as it goes over the wire, for people."""
    return f"PATCH {scaled.path} {json.dumps(patch(replicas), separators=(',', ':'))}"


def read_scaled(text: str, namespace: str, where: str) -> Scaled:
    """`Deployment/NAME`, or `PLURAL.VERSION.GROUP/NAME` of whatever has a scale subresource. Raises ConfigError."""
    kind, slash, name = text.partition("/")
    known = {one.kind.lower(): one for one in KNOWN}
    resource = known.get(kind.lower())
    parts = kind.split(".", 2)
    if resource is None and len(parts) == 3 and all(parts):
        plural, version, group = parts
        same = [one for one in KNOWN if (one.group, one.plural) == (group, plural)]
        resource = (
            Resource(
                kind=same[0].kind,
                group=group,
                version=version,
                plural=plural,
                counts_ready=same[0].counts_ready,
                generations=same[0].generations,
            )
            if same
            else Resource(kind=plural, group=group, version=version, plural=plural)
        )
    if not slash or resource is None or not _NAME.fullmatch(name):
        kinds = ", ".join(one.kind for one in KNOWN)
        raise ConfigError(
            f"{where} = {text!r}: write KIND/NAME with KIND one of {kinds}, or PLURAL.VERSION.GROUP/NAME for another "
            "resource that has a scale subresource"
        )
    return Scaled(resource=resource, namespace=namespace, name=name)
