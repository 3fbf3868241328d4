"""Who is there: worker records in a file, in a shared folder or in etcd, behind one protocol.

`open_discovery` takes the place as a person writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from executors.discovery.protocol import Discovery
from policies.errors import ConfigError

PREFIX: Final = "/dynatwin/workers/"


def open_discovery(where: str) -> Discovery:
    """`etcd://host:2379[,host:2379][/prefix]` (etcds: over TLS), a `.toml` file of workers, or a folder.

    Opens nothing yet. Raises ConfigError for any other place, CapabilityError for etcd without aiohttp.
    """
    scheme, has_scheme, _ = where.partition("://")
    if not has_scheme:
        return _in_files(Path(where))
    if scheme not in ("etcd", "etcds"):
        raise ConfigError(f"discovery {where!r}: write etcd://host:2379, a file ending in .toml, or a folder")
    parts = urlsplit(where)
    if not parts.netloc or "@" in parts.netloc:
        raise ConfigError(f"discovery {where!r}: write etcd://host:2379, several with commas, without a user")
    from executors.discovery.etcd import EtcdDiscovery
    from executors.discovery.etcd_client import EtcdClient

    web = "https" if scheme == "etcds" else "http"
    client = EtcdClient([f"{web}://{server}" for server in parts.netloc.split(",")])
    prefix = f"/{parts.path.strip('/')}/" if parts.path.strip("/") else PREFIX
    return EtcdDiscovery(client, prefix, f"etcd at {parts.netloc}")


def _in_files(path: Path) -> Discovery:
    if path.suffix == ".toml":
        from executors.discovery.static import StaticDiscovery

        return StaticDiscovery(path)
    from executors.discovery.folder import FolderDiscovery

    return FolderDiscovery(path)
