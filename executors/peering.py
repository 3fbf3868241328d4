"""Who the other frontends are whose routers share bookings with ours, as a person writes it. Opens nothing."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from executors.peer_seal import read_key
from executors.ports import LOOPBACK
from policies.errors import ConfigError
from policies.frozen import frozen

NO_KEY: Final = "none"
"""In place of a file: messages are not sealed, and it is known."""


@frozen
class Peering:
    """Who the other frontends are: tcp:// addresses, or the discovery store that all register in. `listen`: host and
    port of our own socket (port 0: any). `key`: what all of them seal their messages with (None: nothing is)."""

    addresses: tuple[str, ...] = ()
    place: str | None = None
    listen: tuple[str, int] = (LOOPBACK, 0)
    key: bytes | None = None


def peering(who: str, listen: str | None, key_file: str | None = None) -> Peering:
    """As it stands on a line; `key_file` is a file with the key, or `none`. Raises ConfigError."""
    host, port = _host_and_port(listen) if listen is not None else (LOOPBACK, 0)
    if host in ("0.0.0.0", "::", "*"):
        raise ConfigError(f"--peer-listen {listen}: give the address of this host that the other frontends reach")
    if key_file is None and not _is_loopback(host):
        raise ConfigError(
            f"--peer-listen {listen}: whoever reaches that could say where requests go; give all frontends one "
            f"--peer-key FILE, or --peer-key {NO_KEY} on a network where nobody else is"
        )
    key = read_key(Path(key_file)) if key_file not in (None, NO_KEY) else None
    if not who.startswith("tcp://"):
        return Peering(place=who, listen=(host, port), key=key)
    addresses = tuple(one.strip() for one in who.split(","))
    for one in addresses:
        parts = urlsplit(one)
        if parts.scheme != "tcp" or not parts.hostname or parts.port is None or parts.path:
            raise ConfigError(f"--peers {one}: write tcp://HOST:PORT, several with commas, or a discovery store")
    if port == 0:
        raise ConfigError("--peers with addresses: the others have to know ours too; give --peer-listen HOST:PORT")
    return Peering(addresses=addresses, listen=(host, port), key=key)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"tcp://{text}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None or parts.path:
        raise ConfigError(f"--peer-listen {text}: write HOST:PORT")
    return parts.hostname, port
