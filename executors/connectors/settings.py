"""Which connector carries a planner's decisions out, and its settings: read from plain values, checked once.

Keys as in the configuration's `[planner]` table: `connector`, and the tables `virtual` and `kubernetes` below it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Final, Literal, get_args

from policies.errors import ConfigError
from policies.frozen import frozen

Kind = Literal["local", "virtual", "kubernetes"]
DryRun = Literal["off", "server", "print"]

POLL_S: Final = 10.0
TIMEOUT_S: Final = 1800.0
"""180 looks, one every 10 s: of the virtual connector of Dynamo 1.6.1."""


@frozen
class VirtualSettings:
    """`[planner.virtual]`. `store`: a folder, or etcd://host:2379[/prefix]."""

    store: str = ""
    poll_s: float = POLL_S
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        _above_zero("virtual", self, "poll_s", "timeout_s")
        if not self.store:
            raise ConfigError(
                "planner.virtual.store is missing: name the folder, or etcd://host:2379, where decisions are written"
            )


@frozen
class KubernetesSettings:
    """`[planner.kubernetes]`. `objects`: by worker group the object whose replicas its workers are (Deployment/NAME).

    `drift_policy`: replicas that somebody else sets are adopted, or set back (enforce). `dry_run`: server sends patches
    with dryRun=All, print needs no cluster. `kubeconfig` and `context`: of the cluster (None: the one around us).
    """

    objects: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "default"
    drift_policy: Literal["adopt", "enforce"] = "adopt"
    dry_run: DryRun = "off"
    kubeconfig: str | None = None
    context: str | None = None
    poll_s: float = POLL_S
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        _above_zero("kubernetes", self, "poll_s", "timeout_s")
        if not self.objects:
            raise ConfigError(
                "planner.kubernetes.objects is missing: name for each worker group its object, as in "
                'objects = { decode = "Deployment/vllm-decode" }'
            )
        _one_of("planner.kubernetes.drift_policy", self.drift_policy, ("adopt", "enforce"))
        _one_of("planner.kubernetes.dry_run", self.dry_run, get_args(DryRun))


@frozen
class ConnectorSettings:
    """Who carries out what the planner decides; of the tables only that one's is there."""

    connector: Kind = "local"
    virtual: VirtualSettings | None = None
    kubernetes: KubernetesSettings | None = None

    @property
    def needs_discovery(self) -> bool:
        """Whether workers come that nobody here has started."""
        return self.virtual is not None or (self.kubernetes is not None and self.kubernetes.dry_run == "off")

    @classmethod
    def of(cls, planner: Mapping[str, Any]) -> ConnectorSettings:
        """From `connector`, `virtual` and `kubernetes` of a plain `[planner]` table; other keys are somebody else's.

        Raises ConfigError, also for a table of a connector that was not asked for.
        """
        kind = planner.get("connector", "local")
        _one_of("planner.connector", kind, get_args(Kind))
        for name in ("virtual", "kubernetes"):
            if name in planner and name != kind:
                raise ConfigError(
                    f'[planner.{name}] is given and planner.connector is {kind}: set connector = "{name}", or remove it'
                )
        return cls(
            connector=kind,
            virtual=_table(VirtualSettings, "virtual", planner.get("virtual", {})) if kind == "virtual" else None,
            kubernetes=_table(KubernetesSettings, "kubernetes", planner.get("kubernetes", {}))
            if kind == "kubernetes"
            else None,
        )


def _table(kind: Any, name: str, given: Any) -> Any:
    known = [one.name for one in fields(kind)]
    if not isinstance(given, Mapping):
        raise ConfigError(f"planner.{name} = {given!r} is no table")
    for key, value in given.items():
        where = f"planner.{name}.{key}"
        if key not in known:
            raise ConfigError(f"{where} is not known; known here: {', '.join(known)}")
        if key in ("poll_s", "timeout_s"):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{where} = {value!r} is not a number of seconds")
        elif key == "objects":
            if not isinstance(value, Mapping) or not all(isinstance(one, str) for one in value.values()):
                raise ConfigError(f'{where} = {value!r}: write {{ GROUP = "Deployment/NAME" }}')
        elif not isinstance(value, str):
            raise ConfigError(f"{where} = {value!r} is not a text")
    return kind(**given)


def _above_zero(table: str, settings: object, *keys: str) -> None:
    for key in keys:
        value = getattr(settings, key)
        if not 0 < value < math.inf:
            raise ConfigError(f"planner.{table}.{key} is {value}, it must be above 0; set seconds")


def _one_of(key: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{key} is {value!r}, it must be one of {', '.join(known)}")
