"""What an operator may set of the frontend: `[live.frontend]` of the configuration, and what is of one host alone.

Times are seconds, sizes bytes. Defaults are those of the configuration.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from executors.engines.protocol import Ability
from policies.errors import ConfigError
from policies.frozen import frozen
from twin.config import Config, ResilienceConfig
from twin.config_lists import name_pairs
from twin.config_live import MAX_STOPS, FrontendAccess, FrontendConfig, FrontendDeadlines
from twin.config_live import FrontendLimits as Limits
from twin.config_schema import keys_of

__all__ = ("Access", "Deadlines", "Limits", "Settings", "Tls", "is_loopback")

_USUAL: Final = FrontendConfig()


@frozen
class Deadlines(FrontendDeadlines):
    """Those of the configuration; `grace_s` and `drain_s` are of a stop: in which new requests are still taken, and in
    which open ones may then end."""

    grace_s: float = ResilienceConfig().grace_s
    drain_s: float = ResilienceConfig().drain_timeout_s


@frozen
class Access(FrontendAccess):
    """Those of the configuration, and `keys_file`: one key a line, then its name and its role (user, trusted, admin) if
    wanted. Without keys everybody is an admin where only this machine can connect, and a user elsewhere."""

    keys_file: Path | None = None
    require_auth: bool = False


@frozen
class Tls:
    cert: Path
    key: Path
    client_ca: Path | None = None


@frozen
class Settings:
    """`aliases` are other names of models; `loras` says on which model an adapter sits; `abilities` are the engines'.

    `admin_port` moves the paths of administrators to a port of 127.0.0.1 of their own. `kserve_port`: the gRPC server
    is on.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int | None = None
    kserve_port: int | None = None
    tls: Tls | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    loras: Mapping[str, str] = field(default_factory=dict)
    abilities: frozenset[Ability] = frozenset()
    anthropic: bool = _USUAL.anthropic
    debug: bool = False
    allow_unknown: bool = _USUAL.allow_unknown
    overload_status: int = _USUAL.overload_status
    retry_after_s: float = _USUAL.retry_after_s
    metrics_prefix: str = _USUAL.metrics_prefix
    bucket_profile: str = _USUAL.bucket_profile
    limits: Limits = field(default_factory=Limits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    access: Access = field(default_factory=Access)

    def __post_init__(self) -> None:
        if not 1 <= self.limits.stops <= MAX_STOPS:
            raise ConfigError(f"limits.stops is {self.limits.stops}; take 1 to {MAX_STOPS}")
        if self.overload_status not in (429, 503, 529):
            raise ConfigError(f"overload_status is {self.overload_status}; take 429, 503 or 529")
        if self.access.require_auth and self.access.keys_file is None:
            raise ConfigError("require_auth is set without a keys_file; name a file of API keys")

    @classmethod
    def of(cls, config: Config, served_as: str) -> Settings:
        """Those of a configuration, in front of a model by that name. Raises ConfigError for another name of a model
        that is not there."""
        table, resilience = config.live.frontend, config.resilience
        names = {"aliases": _names(config, "aliases"), "loras": _names(config, "loras")}
        known = {served_as, *names["loras"]}
        for key, name, meant in ((key, *pair) for key, pairs in names.items() for pair in pairs.items()):
            if meant not in (known if key == "aliases" else {served_as}):
                where = f"{config.origins.get(f'live.frontend.{key}', 'given')}: live.frontend.{key}"
                raise ConfigError(f'{where}: "{name}={meant}": {meant} is not served here; {served_as} is')
        deadlines = Deadlines(
            **_values(table.deadlines), grace_s=resilience.grace_s, drain_s=resilience.drain_timeout_s
        )
        return cls(
            aliases=names["aliases"],
            loras=names["loras"],
            anthropic=table.anthropic,
            allow_unknown=table.allow_unknown,
            overload_status=table.overload_status,
            retry_after_s=table.retry_after_s,
            metrics_prefix=table.metrics_prefix,
            bucket_profile=table.bucket_profile,
            limits=table.limits,
            deadlines=deadlines,
            access=Access(**_values(table.access)),
        )

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names(config: Config, key: str) -> dict[str, str]:
    return name_pairs(getattr(config.live.frontend, key), f"live.frontend.{key}")


def _values(table: object) -> dict[str, Any]:
    return {entry.name: getattr(table, entry.name) for entry in keys_of(type(table))}
