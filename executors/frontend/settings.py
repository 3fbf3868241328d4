"""What an operator may set of the frontend, with the defaults of its contract. Times are seconds, sizes bytes."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Final, Literal

from executors.engines.protocol import Ability
from policies.errors import ConfigError
from policies.frozen import frozen

MAX_STOPS: Final = 32
"""What vLLM and Dynamo take; OpenAI takes 4."""


@frozen
class Limits:
    """How much one client may ask, say or hold open."""

    body_bytes: int = 16 * 1024 * 1024
    json_depth: int = 64
    messages: int = 10_000
    string_chars: int = 1_000_000
    headers: int = 100
    header_bytes: int = 16 * 1024
    prompts: int = 128
    n: int = 4
    stops: int = 4
    connections: int = 4096
    connections_per_address: int = 512
    in_flight: int = 1024
    tokenizer_threads: int = 2
    queued_chunks: int = 256


@frozen
class Deadlines:
    """How long anything may take. `total_s` and `first_token_s` count from arrival (None: no such limit)."""

    header_s: float = 5.0
    body_s: float = 10.0
    body_bytes_per_s: float = 1024.0
    idle_s: float = 75.0
    stall_s: float = 30.0
    keep_alive_s: float = 15.0
    total_s: float | None = None
    first_token_s: float | None = None
    grace_s: float = 5.0
    drain_s: float = 900.0


@frozen
class Access:
    """Who may ask. `keys_file`: one key a line, then its name and its role (user, trusted, admin) if wanted.

    Without keys everybody is an admin where only this machine can connect, and a user elsewhere. `requests_per_s` and
    `tokens_per_min` are buckets of each key (None: no limit).
    """

    keys_file: Path | None = None
    require_auth: bool = False
    metrics_open: bool = True
    untrusted_pins: Literal["refuse", "ignore"] = "refuse"
    tenant_isolation: Literal["none", "key"] = "none"
    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()


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
    anthropic: bool = True
    debug: bool = False
    allow_unknown: bool = False
    overload_status: Literal[429, 503, 529] = 529
    retry_after_s: float = 1.0
    metrics_prefix: str = "dynamo_frontend"
    bucket_profile: Literal["superset", "dynamo"] = "superset"
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

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
